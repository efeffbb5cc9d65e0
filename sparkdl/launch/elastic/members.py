"""Starts and supervises the members of an elastic launch, and returns the values of the last world's ranks.

Runs on the *driver*, or in the coordinating task. Each member is a launch of one rank: its stage, its channel and its
supervision are those of any other launch. Lost members are started again; a rank whose code raises ends all of them.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, cast

from sparkdl.closing import Closing
from sparkdl.collective import Coordinator, RendezvousClient
from sparkdl.errors import (
    ClusterLostError,
    HangError,
    LinkLostError,
    ProcessesLostError,
    RankError,
    SlotsMissingError,
    SparkdlError,
)
from sparkdl.launch.elastic.offers import PREFIX, Invitation, OfferedSlots
from sparkdl.launch.elastic.roster import PATIENT_S, ElasticLimits, Roster
from sparkdl.launch.failures import rank_error, renumber_rank
from sparkdl.launch.hangs.hang_error import hang_error
from sparkdl.launch.hangs.watch import HangWatch
from sparkdl.launch.supervision import END_TIMEOUT_S, Listener, Supervision
from sparkdl.launch.wire.channel import DriverChannel
from sparkdl.launch.wire.outcome import Failure, StopReason

if TYPE_CHECKING:
    from sparkdl.launch.ranks import MakeStage
    from sparkdl.launch.stage import Stage
    from sparkdl.launch.supervision import OnEvent, OnLog
    from sparkdl.launch.wire.spec import LaunchSpec
    from sparkdl.launch.wire.world import World

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
_POLL_S = 0.05
_LOOK_EVERY_S = 1.0
_BREAK_UP_S = 2.0
"""How long the ranks have to end by themselves when the run is over; others are ended then."""


@dataclass
class _MemberLaunch:
    """A member that was started.

    Attributes:
        supervision: supervision of its launch.
        slot: number of its slot, which no other running member has.
        is_given_up: whether the others have continued without it.
        has_returned: whether its function has returned.
    """

    supervision: Supervision
    slot: int
    is_given_up: bool = False
    has_returned: bool = False


def run_members(
    make_stage: MakeStage,
    spec: LaunchSpec,
    limits: ElasticLimits,
    *,
    host: str | Sequence[str],
    on_log: OnLog | None,
    on_event: OnEvent | None,
    leases: Iterator[str] | None = None,
    on_open: Callable[[Invitation], None] | None = None,
) -> list[Any]:
    """Run the function of a launch on ranks that come and go, and return the values of the last world's ranks.

    Args:
        make_stage: function that starts the task of a member by its spec and the number of its slot.
        spec: spec of the launch; it begins with ``num_ranks`` ranks, if they come in time.
        limits: limits of the launch.
        host: address or addresses of this machine at which the tasks reach it.
        on_log: called with the number of a member and a line that it has printed; prints them when None.
        on_event: called with the number of a member and an event that it has reported.
        leases: names under which successive worlds use the folder of their checkpoints; empty names when None.
        on_open: called with the invitation before the members are started. Other processes need it to offer slots.

    Raises:
        SlotsMissingError: if there are not enough slots for ``limits.least`` ranks in time.
        ProcessesLostError: if more ranks are lost than ``limits`` allow; it is the error of the last one.
        LinkLostError: if ranks repeatedly meet without finishing a step.
        RankError: if code on a rank raises; ``__cause__`` is its exception.
        HangError: if the code of the ranks hangs.
    """
    with ExitStack() as stack:
        coordinator = stack.enter_context(Coordinator(secret=spec.secret, world_size=limits.most, host=host))
        client = RendezvousClient.connect(coordinator.address, spec.secret, timeout_s=CONNECT_TIMEOUT_S)
        stack.enter_context(client)
        rendezvous = client.view(PREFIX)
        wanted = spec.num_ranks // limits.group_size
        roster = Roster(rendezvous, wanted=wanted, limits=limits, leases=leases or repeat(""))
        own = limits.most_members if limits.own_slots is None else limits.own_slots
        offers = OfferedSlots(rendezvous, first=own, versions=spec.versions)
        if on_open is not None:
            on_open(Invitation(coordinator=coordinator.address, secret=spec.secret))
        run = _ElasticRun(
            make_stage,
            replace(spec, num_ranks=limits.group_size, roster=coordinator.address),
            limits,
            roster,
            offers,
            own=own,
            wanted=wanted,
            host=host,
            on_log=on_log,
            on_event=on_event,
        )
        with run:
            return run.values()


def values_of_world(fetches: Iterable[Callable[[], list[Any]] | None], group_size: int) -> list[Any]:
    """Return the values of the ranks of the last world, in order of rank; None for ranks that were lost at the end.

    Args:
        fetches: for each member, a function that returns the values of its ranks; None for a member that was lost.
        group_size: number of ranks of a member.

    Raises:
        SparkdlError: what the function of the first member, which has rank 0, raises.
    """
    values: list[Any] = []
    for fetch in fetches:
        of_member = [None] * group_size
        if fetch is not None:
            try:
                of_member = fetch()
            except SparkdlError as error:
                if not values:
                    raise
                logger.warning("Rank %d ended after rank 0 had returned: %s", len(values), _why(error))
        values += of_member
    return values


class _ElasticRun(Closing):
    """The members of one launch; a context manager that ends them."""

    def __init__(
        self,
        make_stage: MakeStage,
        spec: LaunchSpec,
        limits: ElasticLimits,
        roster: Roster,
        offers: OfferedSlots,
        *,
        own: int,
        wanted: int,
        host: str | Sequence[str],
        on_log: OnLog | None,
        on_event: OnEvent | None,
    ) -> None:
        self._make_stage, self._spec, self._limits, self._roster = make_stage, spec, limits, roster
        self._offers, self._own = offers, own
        self._wanted, self._host, self._on_log, self._on_event = wanted, host, on_log, on_event
        self._members: dict[int, _MemberLaunch] = {}
        self._numbers = count()
        self._num_losses = 0
        self._world_of_loss = -1
        self._last_loss: ProcessesLostError | None = None
        self._too_few_since: float | None = time.monotonic()
        self._watch: tuple[World, HangWatch] | None = None
        self._next_look = 0.0
        self._reported: World | None = None
        self._stack = ExitStack()

    def close(self) -> None:
        for member in self._members.values():
            member.supervision.cancel(StopReason("the run has ended"))
        self._offers.end()
        self._roster.break_up()
        deadline = time.monotonic() + _BREAK_UP_S
        with contextlib.suppress(SparkdlError):  # of the launches; the run has its own, or none
            while self._is_running() and time.monotonic() < deadline:
                self._offers.poll()
                self._roster.poll(_POLL_S)
        self._stack.close()

    def _is_running(self) -> bool:
        """Whether a member still runs; passes on what ranks say."""
        are_running = [member.supervision.poll(0.0) for member in self._members.values()]
        return any(are_running)

    def values(self) -> list[Any]:
        """Supervise the members until the function has returned on rank 0, and return the values by rank."""
        while True:
            self._offers.poll()
            self._let_go()
            self._start_missing()
            for number, member in list(self._members.items()):
                if member.has_returned:
                    continue
                if not member.supervision.poll(0.0):
                    self._end(number, member)
                elif member.supervision.channel.lost and not member.is_given_up:
                    (failure, *_) = member.supervision.channel.failures
                    self._lose(number, self._loss(number, failure), is_cause=True)
                    self._give_up(
                        number, StopReason("its task was lost, and the others have continued without it")
                    )
            self._look_for_hangs()
            self._roster.poll(_POLL_S)
            self._report_world()
            if self._roster.failure:
                raise LinkLostError(self._roster.failure, rank=0, host="")
            self._check_size()
            world = self._roster.world
            first = None if world is None else self._members.get(world.members[0])
            if world is not None and first is not None and first.has_returned:
                return self._last_values(world)

    def _report_world(self) -> None:
        """Report each new world as an event of its rank 0."""
        world = self._roster.world
        if world is None or world is self._reported or self._on_event is None:
            return
        self._reported = world
        event = {
            "kind": "world",
            "number": world.number,
            "ranks": world.num_ranks,
            "losses": self._roster.num_lost * world.group_size,
            "retries": self._roster.retries,
        }
        self._on_event(world.members[0] * world.group_size, event)

    def _start_missing(self) -> None:
        """Start members up to the number that is wanted, and up to the maximum once the function runs."""
        target = self._wanted if self._roster.world is None else self._limits.most_members
        taken = {member.slot for member in self._members.values() if not member.is_given_up}
        free = [slot for slot in self._slots() if slot not in taken]
        for slot in free[: max(0, target - len(taken))]:
            self._start(next(self._numbers), slot)

    def _slots(self) -> list[int]:
        """The slots in which members may be started: first those of the launch's own, then those that others offer."""
        may_start = self._num_losses <= self._limits.max_restarts
        of_launch = range(self._own) if may_start else ()
        return [*of_launch, *(self._offers.offer_of if self._own or may_start else ())]

    def _is_counted(self, slot: int) -> bool:
        """Whether losses in a slot are counted: not in one that another process offers, which may come and go freely.

        Without slots of its own, a launch depends on those that others offer.
        """
        return slot < self._own or not self._own

    def _let_go(self) -> None:
        """Have the members leave whose slots are to go: those that others offered, or Spark decommissions."""
        if is_time := time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY_S
        for number, member in self._members.items():
            if member.is_given_up:
                continue
            if number in self._roster.released:
                member.is_given_up = True
                self._num_losses += self._is_counted(member.slot)  # so that replacements have an end
                member.supervision.cancel(StopReason("it leaves the run"))
            elif is_time and member.supervision.stage.is_to_leave:
                self._roster.let_go(number)

    def _start(self, number: int, slot: int) -> None:
        size = self._limits.group_size
        channel = DriverChannel(self._spec.secret, size, host=self._host)
        spec = replace(
            self._spec,
            job=f"sparkdl-{secrets.token_hex(8)}",
            driver=channel.address,
            member=number,
            start_timeout_s=PATIENT_S,
        )
        supervision = Supervision(
            lambda: self._stage(spec, slot, channel),
            channel,
            spec.limits,
            Listener(self._on_log, self._on_event, first_rank=number * size),
            watches_hangs=False,
        )
        self._members[number] = _MemberLaunch(self._stack.enter_context(supervision), slot)

    def _stage(self, spec: LaunchSpec, slot: int, channel: DriverChannel) -> Stage:
        if slot < self._own:
            return self._make_stage(spec, slot)
        return self._offers.start(slot, spec, channel)

    def _end(self, number: int, member: _MemberLaunch) -> None:
        """Take in how a member has ended: with its value, as lost, or by an error that ends all.

        What it reported to the driver decides. Its rows are fetched only when all members are to end: the fetch takes a
        task of Spark, for which there may be no slot while other members run.
        """
        failures, error = member.supervision.channel.failures, member.supervision.stage.error
        has_ended_well = not failures and error is None and not member.is_given_up
        world = self._roster.world
        if has_ended_well and world is not None and number in world.members:
            member.has_returned = True
            return
        if not member.is_given_up and number not in self._roster.released:
            failure = next(iter(failures), None)
            if failure is None or not (failure.is_loss or failure.is_consequence):
                self._raise(number, member)
            else:
                self._lose(number, self._loss(number, failure), is_cause=failure.is_loss)
        del self._members[number]

    def _loss(self, number: int, failure: Failure) -> ProcessesLostError:
        """The error of a lost rank; it is counted through all members."""
        failure = replace(failure, rank=number * self._limits.group_size + failure.rank)
        return cast("ProcessesLostError", rank_error(failure, were_lost=True))

    def _raise(self, number: int, member: _MemberLaunch) -> None:
        """Raise the error of a member whose code has raised, or whose task could not run, unless it was only lost.

        Raises:
            RankError: if its code has raised; ``__cause__`` is the exception.
            LaunchError: if Spark could not run it.
        """
        if member.supervision.stage.error is None:  # why it failed is in its rows
            for other in self._members.values():
                if other is not member:
                    other.supervision.cancel(StopReason(f"member {number} failed"))
        try:
            self._values_of(number)
        except ClusterLostError:
            raise
        except SlotsMissingError as error:
            if self._roster.world is None:
                raise
            logger.info("Member %d found no slots, and another one takes its place: %s", number, error)
        except ProcessesLostError as error:
            self._lose(number, error, is_cause=True)

    def _values_of(self, number: int) -> list[Any]:
        """Return the values of the ranks of a member that has ended; errors count ranks through all members."""
        try:
            return self._members[number].supervision.values()
        except RankError as error:
            rank = number * self._limits.group_size + error.rank
            raise renumber_rank(error, rank) from error.__cause__

    def _lose(self, number: int, error: ProcessesLostError, *, is_cause: bool) -> None:
        logger.warning("Member %d was lost: %s", number, _why(error))
        self._count_loss(number, error, is_cause=is_cause)
        self._roster.lose(number)

    def _count_loss(self, number: int, error: ProcessesLostError, *, is_cause: bool) -> None:
        """Count a lost member. Members that ended because another one was lost count once per world."""
        self._last_loss = error
        if not self._is_counted(self._members[number].slot):
            return
        world = 0 if self._roster.world is None else self._roster.world.number
        if is_cause or self._world_of_loss != world:
            self._num_losses += 1
        self._world_of_loss = world

    def _give_up(self, number: int, reason: StopReason) -> None:
        """Continue without a member, and have it ended."""
        member = self._members[number]
        member.is_given_up = True
        member.supervision.cancel(reason)
        if reason.is_hang:
            self._offers.offer_of.pop(member.slot, None)  # no more members are started there
        self._roster.lose(number)

    def _look_for_hangs(self) -> None:
        """Give up the ranks of the current world that hang.

        Raises:
            HangError: if the code of the ranks is the cause, and would hang again.
        """
        world = self._roster.world
        if world is None:
            return
        if self._watch is None or self._watch[0] is not world:
            self._watch = world, HangWatch(self._spec.limits)
        reports = {
            world.rank_of(number, place): report._replace(health=report.health.within(world.number))
            for number in world.members
            if number in self._members and not self._members[number].is_given_up
            for place, report in self._members[number].supervision.channel.health.items()
        }
        hang = self._watch[1].observe(time.monotonic(), reports)
        if hang is None:
            return
        hosts = {
            world.rank_of(number, place): host
            for number in world.members
            if number in self._members
            for place, host in self._members[number].supervision.channel.hosts.items()
        }
        culprits = {rank // world.group_size: rank for rank in hang.culprits}
        if hang.is_in_code or len(culprits) == len(world.members):
            raise hang_error(hang, (), hosts)
        for index, rank in culprits.items():
            number = world.members[index]
            if number in self._members:
                logger.warning("Member %d is given up, as %s.", number, hang.why)
                name = number * world.group_size + rank % world.group_size
                error = HangError(
                    f"Rank {name} on {hosts.get(rank, 'an unknown host')} hung: {hang.why}",
                    rank=name,
                    host=hosts.get(rank, ""),
                )
                self._count_loss(number, error, is_cause=True)
                self._give_up(number, StopReason(hang.why, is_hang=True))

    def _check_size(self) -> None:
        """Check that there are enough members, or may be again.

        Raises:
            SlotsMissingError: if there have not been enough for too long.
            ProcessesLostError: if too few are left and no more are started.
        """
        if len(self._roster.members) >= self._limits.least_members or self._roster.world is None:
            if self._roster.world is not None:
                self._too_few_since = None
        elif self._too_few_since is None:
            self._too_few_since = time.monotonic()
        may_start = self._num_losses <= self._limits.max_restarts
        active = sum(not member.is_given_up for member in self._members.values())
        if not may_start and active < self._limits.least_members and self._last_loss is not None:
            raise self._last_loss
        if self._too_few_since is None:
            return
        waited_s = time.monotonic() - self._too_few_since
        if waited_s > self._spec.start_timeout_s:
            raise SlotsMissingError(
                f"{len(self._roster.members) * self._limits.group_size} ranks run after {waited_s:.0f} s, and at "
                f"least {self._limits.least} are needed (minWorkers, min_workers): other jobs hold the free slots, or "
                "executors are missing. Wait for them, or lower the minimum."
            ) from self._last_loss

    def _last_values(self, world: World) -> list[Any]:
        """Let the other ranks of the last world return, too, and return the values of all; None for a lost one."""
        for number, member in self._members.items():
            if number not in world.members:
                member.supervision.cancel(StopReason("the run is over"))
        deadline = time.monotonic() + END_TIMEOUT_S
        running = {number for number in world.members if number in self._members}
        while running and time.monotonic() < deadline:
            self._offers.poll()
            self._roster.poll(_POLL_S)
            self._roster.end()
            running = {number for number in running if self._members[number].supervision.poll(0.0)}
        ended = self._members.keys() - running
        return values_of_world(
            [partial(self._values_of, number) if number in ended else None for number in world.members],
            world.group_size,
        )


def _why(error: Exception) -> str:
    """Why a member ended, in one line: of a rank that failed, what it reported."""
    return str(error).strip().splitlines()[0].rpartition("all ranks were ended: ")[2]
