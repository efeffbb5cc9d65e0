"""The roster of an elastic launch: which members there are, and who forms the next world.

A world ends when one of its members is lost or cannot reach the others, or when others wait to join. Each member then
arrives here as soon as it notices. The next world begins when all remaining members have arrived, together with those
that wait to join. Only members of the ended world are waited for. If none of them is left, the members that are started
instead begin together, like those of the first world.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import CommunicatorTimeoutError, count_of
from sparkdl.launch.wire.world import (
    ANSWER_KEY,
    ARRIVALS,
    BROKEN_KEY,
    LEAVE_KEY,
    Answer,
    MemberArrival,
    World,
)

if TYPE_CHECKING:
    from sparkdl.rendezvous.store import Rendezvous

logger = logging.getLogger(__name__)

MAX_RESTARTS = 100
"""How many lost ranks of an elastic fit or run are started again if the user has set no limit."""

SETTLE_S = 10.0
"""How long the first world, and one without any member of the world before, wait for more members once they have
enough."""

PATIENT_S = 1e6
"""Seconds for which a member may wait for a slot: it joins when there is one."""

_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ElasticLimits:
    """How many ranks an elastic launch may have, and what it survives.

    Attributes:
        least: minimum number of ranks.
        most: maximum number of ranks.
        max_restarts: maximum number of members that are started in place of lost ones.
        group_size: number of ranks of a member, which live and end together, such as those that share one copy of a
            model.
        max_retries: how often in succession the same members may form a world again without a further update.
        own_slots: maximum number of members in slots of the launch itself, if others may offer slots; ``most`` when
            None.
    """

    least: int
    most: int
    max_restarts: int
    max_retries: int = 3
    group_size: int = 1
    own_slots: int | None = None

    @property
    def is_barrier(self) -> bool:
        """Whether the ranks of a member start together, in a barrier stage."""
        return self.group_size > 1

    @property
    def least_members(self) -> int:
        """Minimum number of members."""
        return self.least // self.group_size

    @property
    def most_members(self) -> int:
        """Maximum number of members."""
        return self.most // self.group_size


class Roster:
    """The members of an elastic launch.

    Args:
        rendezvous: rendezvous that the members use.
        wanted: number of members that the first world waits for.
        limits: limits of the launch.
        leases: names under which successive worlds use a folder.

    Attributes:
        world: the current world; None before the first.
        retries: number of worlds that the same members have formed again.
        failure: why no further world is formed; empty if nothing speaks against it.
    """

    def __init__(
        self, rendezvous: Rendezvous, *, wanted: int, limits: ElasticLimits, leases: Iterator[str]
    ) -> None:
        self._rendezvous, self._wanted, self._limits, self._leases = rendezvous, wanted, limits, leases
        self.world: World | None = None
        self.retries = 0
        self.failure = ""
        self._next = 1
        self._arrivals: dict[int, dict[int, tuple[int, MemberArrival]]] = {}
        """Number of the arrival, and the arrival, of each rank that waits for an answer, by member and place."""
        self._lost: set[int] = set()
        self._leaving: set[int] = set()
        self._to_leave: set[int] = set()
        self._returning: set[int] = set()
        self._is_over = False
        self._last_arrival_at = 0.0
        self._asked_to_leave = 0
        self._progress = -1
        self._fruitless = 0
        self._retried = 0
        self._not_before = 0.0

    @property
    def members(self) -> set[int]:
        """The members that take part or wait to do so."""
        current = set() if self.world is None else set(self.world.members)
        return (current | self._waiting) - self._lost

    @property
    def num_lost(self) -> int:
        """Number of members that were lost, and had not been asked to leave."""
        return len(self._lost - self._leaving)

    @property
    def _waiting(self) -> set[int]:
        """The members whose ranks all wait for the next world."""
        size = self._limits.group_size
        return {member for member, places in self._arrivals.items() if len(places) == size}

    def poll(self, timeout_s: float) -> None:
        """Take in arrivals and losses, waiting at most that long for one; begin the next world if it is complete."""
        while (arrival := self._take(timeout_s)) is not None:
            number, content = arrival
            self._take_in(number, content)
            timeout_s = 0.0
        self._let_go()
        self._form()

    def _take_in(self, number: int, arrival: MemberArrival) -> None:
        member = arrival.member
        if arrival.is_lost:
            self.lose(member)
        elif arrival.is_leaving:
            self.let_go(member)
        elif arrival.has_left:
            self._returning.add(member)
            if member in self._arrivals:
                self.lose(member)
        elif self._is_over:
            self._answer(number, _OF_OVER)
        elif member in self._lost:
            self._answer(number, _OF_GONE if member in self._leaving else _OF_REPLACED)
        else:
            self._arrivals.setdefault(member, {})[arrival.place] = number, arrival
            self._last_arrival_at = time.monotonic()
            if member in self._returning:  # another of its ranks has ended already
                self.lose(member)

    def let_go(self, member: int) -> None:
        """Have a member leave the run: it is not in the world that begins after the current step.

        As long as no other member has a state, it stays.
        """
        self._to_leave.add(member)

    def _let_go(self) -> None:
        for member in sorted(self._to_leave - self._leaving):
            current = set() if self.world is None else set(self.world.members)
            if member in current and not current - self._leaving - self._lost - {member}:
                continue
            self._leaving.add(member)
            if self.world is None or member not in current:
                self._release(member, _OF_GONE)
            elif member not in self._arrivals:
                self._ask_to_leave(self.world)

    def _release(self, member: int, answer: Answer) -> None:
        """Take a member out of the run, and answer its ranks that wait."""
        self._lost.add(member)
        for number, _ in self._arrivals.pop(member, {}).values():
            self._answer(number, answer)

    def lose(self, member: int) -> None:
        """Note that a member is lost, or was given up. Whatever it still asks for is refused."""
        if member in self.released:  # and the others have not waited for it
            return
        if self.world is not None and member in self.world.members and member not in self._lost:
            self._rendezvous.set(BROKEN_KEY.format(self.world.number), f"member {member} was lost".encode())
        self._release(member, _OF_REPLACED)

    @property
    def released(self) -> set[int]:
        """The members that have left the run because they were asked to, and that are to be ended."""
        return self._leaving & self._lost

    def break_up(self) -> None:
        """Have all ranks leave the current world, and refuse them another one: the run is over or has failed."""
        self._is_over = True
        if self.world is not None and not self._rendezvous.check([BROKEN_KEY.format(self.world.number)]):
            self._rendezvous.set(BROKEN_KEY.format(self.world.number), b"the run is over")
        self.end()

    def end(self) -> None:
        """Release the members that wait, as the run is over: the function has returned on rank 0."""
        for places in self._arrivals.values():
            for number, arrival in places.values():
                self._answer(number, Answer() if arrival.is_done else _OF_OVER)
        self._arrivals.clear()

    def _take(self, timeout_s: float) -> tuple[int, MemberArrival] | None:
        try:
            content = self._rendezvous.get(f"{ARRIVALS}/{self._next}", timeout_s)
        except CommunicatorTimeoutError:
            return None
        number, self._next = self._next, self._next + 1
        self._rendezvous.delete(f"{ARRIVALS}/{number}")
        return number, MemberArrival.from_json(content)

    def _form(self) -> None:
        """Begin the next world once every remaining member of the current one has arrived."""
        if self.world is not None:
            absent = set(self.world.members) - self._lost - self._waiting
            if absent:
                if self._waiting - set(self.world.members):
                    self._ask_to_leave(self.world)
                return
        self._release_leaving()
        num_waiting = len(self._waiting)
        if num_waiting < self._limits.least_members:
            return
        is_settled = time.monotonic() >= self._last_arrival_at + SETTLE_S
        is_first = self.world is None or not (set(self.world.members) & self._waiting)
        if is_first and num_waiting < self._wanted and not is_settled:
            return
        self._begin()

    def _progress_of(self, member: int) -> int:
        return max(arrival.progress for _, arrival in self._arrivals[member].values())

    def _release_leaving(self) -> None:
        """Release the members that are to leave, unless the others that wait have not come as far."""
        leaving = self._waiting & self._leaving
        staying = [self._progress_of(member) for member in self._waiting - leaving]
        for member in leaving:
            if staying and max(staying) >= self._progress_of(member):
                self._release(member, _OF_GONE)
            else:
                self._leaving.discard(member)  # and is asked again in the next world

    def _begin(self) -> None:
        before = self.world
        rank_before = {} if before is None else {member: rank for rank, member in enumerate(before.members)}
        progress_of = {member: self._progress_of(member) for member in self._waiting}
        members = sorted(
            progress_of,
            key=lambda member: (-progress_of[member], rank_before.get(member, len(rank_before)), member),
        )[: self._limits.most_members]
        progress = progress_of[members[0]]
        if (
            before is not None
            and set(members) == set(before.members)
            and not self._may_retry(before, progress)
        ):
            return
        self._progress = progress
        self.world = World(
            number=1 if before is None else before.number + 1,
            members=tuple(members),
            group_size=self._limits.group_size,
            progress=progress,
            lease=next(self._leases),
        )
        if before is None and len(members) < self._wanted:
            logger.warning(
                "The run begins with %d of %d ranks, as there were no slots for more within %g s. Others join when "
                "slots are free.",
                self.world.num_ranks,
                self._wanted * self._limits.group_size,
                SETTLE_S,
            )
        if before is not None:
            self._log(before, self.world)
            for key in (LEAVE_KEY, BROKEN_KEY):  # ends the members' watches
                if not self._rendezvous.check([key.format(before.number)]):
                    self._rendezvous.set(key.format(before.number), b"")
        for member in members:
            for number, _ in self._arrivals.pop(member).values():
                self._answer(number, Answer(world=self.world))

    def _may_retry(self, before: World, progress: int) -> bool:
        """Whether the members of a world may form another one now; if they do so too often, refuse them all.

        They wait longer each time that they have not finished a step in between: 1, 2, 4, ... seconds.
        """
        if self._retried < before.number:
            self._retried = before.number
            self.retries += 1
            self._fruitless = self._fruitless + 1 if progress <= self._progress else 0
            pause_s = min(2.0 ** (self._fruitless - 1), _LONGEST_PAUSE_S) if self._fruitless else 0.0
            self._not_before = time.monotonic() + pause_s
        if self._fruitless <= self._limits.max_retries:
            return time.monotonic() >= self._not_before
        self.failure = (
            f"The ranks have met {self._fruitless} times without losing one and without finishing a step in between. "
            "Look at the network between them."
        )
        for member in self._waiting:
            self._release(member, Answer(refusal=self.failure))
        return False

    def _ask_to_leave(self, world: World) -> None:
        if self._asked_to_leave < world.number:
            self._asked_to_leave = world.number
            self._rendezvous.set(LEAVE_KEY.format(world.number), b"")

    def _log(self, before: World, after: World) -> None:
        gone, new = set(before.members) - set(after.members), set(after.members) - set(before.members)
        left = gone & self._leaving
        what = [
            f"without {_name(gone - left)}" if gone - left else "",
            f"without {_name(left)}, as asked" if left else "",
            f"with {_name(new)} in addition" if new else "",
            "" if gone or new else "with the same ranks, as a connection between them failed",
        ]
        if not set(before.members) & set(after.members):
            logger.warning(
                "All ranks were lost. %d new one%s begin with the last checkpoint, or without one from the beginning.",
                after.num_ranks,
                "" if after.num_ranks == 1 else "s",
            )
            return
        logger.warning(
            "The run continues with %s, %s.",
            count_of(after.num_ranks, "rank"),
            " and ".join(filter(None, what)),
        )

    def _answer(self, number: int, answer: Answer) -> None:
        self._rendezvous.set(ANSWER_KEY.format(number), answer.to_json())


_OF_GONE = Answer(refusal="This rank was asked to leave the run, and the others continue without it.")
_OF_OVER = Answer(refusal="This rank is not needed any more: the run is over.")
_OF_REPLACED = Answer(
    refusal="This rank was considered lost, and the others have continued without it. Its work is not needed any more."
)


def _name(members: set[int]) -> str:
    numbers = ", ".join(map(str, sorted(members)))
    return f"member{'' if len(members) == 1 else 's'} {numbers}"
