"""The context of the function on a rank: its rank, communicator and topology, and its reports to the driver."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from sparkdl.collective import Communicator, Rendezvous, find_hosts, open_communicator
from sparkdl.collective.current import provided
from sparkdl.collective.error_origin import is_consequence
from sparkdl.collective.job import RankJob
from sparkdl.collective.telemetry.stalls import NotedWait
from sparkdl.errors import CommunicatorError, WorldLeftError
from sparkdl.launch.rank.heartbeat import RankHeartbeat
from sparkdl.launch.rank.membership import Membership
from sparkdl.launch.rank.stacks import RankStacks
from sparkdl.launch.wire.messages import MessageConnection
from sparkdl.launch.wire.world import World
from sparkdl.topology import Topology

_NOTICE_S = 2.0
"""How long after an error to wait for the news that another rank is lost, which takes milliseconds."""


class RankContext:
    """First argument of every function that runs on the ranks.

    In an elastic launch the ranks form a new world whenever one of them is lost or another one joins:
    :meth:`meet_again` then changes the attributes.

    Attributes:
        rank: number of this rank.
        world_size: number of ranks.
        rendezvous: key-value store shared by the ranks.
        job: how this rank finds the others, and the options of the communicator.
    """

    def __init__(
        self,
        *,
        job: RankJob,
        rendezvous: Rendezvous,
        task: MessageConnection,
        heartbeat: RankHeartbeat,
        stacks: RankStacks,
        member: int | None = None,
    ) -> None:
        self.rank = job.rank
        self.world_size = job.world_size
        self.rendezvous = rendezvous
        self.job = job
        self._task = task
        self._heartbeat = heartbeat
        self._stacks = stacks
        self._membership = None if member is None else Membership(rendezvous, member, job.rank, self._break)
        self._communicator: Communicator | None = None
        self._topology: Topology | None = None

    def begin(self) -> None:
        """Provide the job to code without this context; in an elastic launch, first wait for the first world."""
        if self._membership is not None:
            self._enter(self._membership.enter())
            self._leave_on_sigterm(self._membership)
        else:
            provided.job = self.job, self.rendezvous

    def _leave_on_sigterm(self, membership: Membership) -> None:
        """Have the first SIGTERM make this rank leave after the current step, and the next one end it at once."""

        def handle(number: int, frame: object) -> None:
            del number, frame
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # Not here: the interrupted code may hold the lock of the connection.
            threading.Thread(target=membership.ask_to_leave, name="sparkdl-leave", daemon=True).start()

        signal.signal(signal.SIGTERM, handle)

    @property
    def is_elastic(self) -> bool:
        """Whether the ranks may form other worlds."""
        return self._membership is not None

    @property
    def is_to_leave(self) -> bool:
        """Whether other ranks wait to join, so that all ranks are to call :meth:`meet_again` after this step.

        Ranks learn this at different times, and have to agree on the step.
        """
        return self._membership is not None and self._membership.is_to_leave

    @property
    def world(self) -> World | None:
        """The current world of an elastic launch; None in any other launch."""
        return None if self._membership is None else self._membership.world

    def ask_to_leave(self) -> None:
        """Ask that this rank may leave the run after the current step. Only for an elastic launch."""
        assert self._membership is not None
        self._membership.ask_to_leave()

    def can_continue(self, error: BaseException) -> bool:
        """Whether another rank caused an error, so that the ranks can continue in another world.

        In an elastic launch the error may be another library's: Gloo's, for example, says only that a connection was
        cut. Such an error counts as caused by another rank if a rank is lost.
        """
        return (
            isinstance(error, WorldLeftError)
            or is_consequence(error)
            or (self._membership is not None and self._membership.is_broken(timeout_s=_NOTICE_S))
        )

    def meet_again(self, reason: str, *, progress: int = -1) -> None:
        """Leave the world, and wait for the next one. Only for an elastic launch.

        Args:
            reason: why this rank leaves, for ranks that still wait for it.
            progress: how far this rank's state has come, such as a number of steps; -1 if it has none. The rank that
                has come farthest is rank 0 of the next world.

        Raises:
            CommunicatorError: if the others have continued without this rank, or ranks meet too often.
        """
        assert self._membership is not None
        self._heartbeat.progressed_at = None  # none is expected while this rank waits for others
        with contextlib.suppress(CommunicatorError):  # it may have failed already
            self.close(failed=True, reason=reason)
        self._communicator = None
        self._enter(self._membership.enter(progress=progress))

    def finish(self, *, progress: int = -1) -> bool:
        """Wait until the value of rank 0 has reached the driver.

        Returns at once on rank 0, on the other ranks of its member, and outside of an elastic launch.

        Returns:
            Whether the run is over. If not, rank 0 was lost before, and the ranks have formed a new world.
        """
        if self._membership is None or self.world is None:
            return True
        if self.rank < self.world.group_size:
            self._membership.leave()
            return True
        self.close()
        world = self._membership.enter(progress=progress, is_done=True)
        if world is None:
            return True
        self._enter(world)
        return False

    def _enter(self, world: World | None) -> None:
        assert self._membership is not None
        assert world is not None, "the function has not returned"
        self.rank, self.world_size = self._membership.rank, world.num_ranks
        self._heartbeat.enter(world.number)
        self.rendezvous = self._membership.rendezvous()
        self.job = replace(self.job, rank=self.rank, world_size=self.world_size)
        self._communicator = self._topology = None
        provided.job = self.job, self.rendezvous

    def _break(self, reason: str) -> None:
        """Abort the communicator, as a rank is lost: this ends waits for one that is only frozen, too."""
        communicator = self._communicator
        if communicator is not None:
            with contextlib.suppress(CommunicatorError):  # it may be closing
                communicator.abort(reason)

    @property
    def communicator(self) -> Communicator:
        """The communicator of all ranks; opened on first use, for which every rank has to call this."""
        if self._communicator is None:
            open_ = partial(
                open_communicator,
                rendezvous=self.rendezvous,
                rank=self.rank,
                world_size=self.world_size,
                secret=self.job.secret,
                transport=self.job.transport,
                wire=self.job.wire,
                timeout_s=self.job.timeout_s,
                host_of_rank=self.topology.host_of_rank,
            )
            if self._membership is None:
                self._communicator = open_()
            else:
                self._communicator = self._membership.unless_broken(open_, _discard)
                self._membership.check()
        return self._communicator

    @property
    def open_communicator(self) -> Communicator | None:
        """The communicator if it is open; None otherwise."""
        return self._communicator

    @property
    def topology(self) -> Topology:
        """Which ranks share a host; determined on first use, for which every rank has to call this."""
        if self._topology is None:
            timeout_s = self.job.timeout_s
            with NotedWait("world", tuple(range(self.world_size)), "opening", timeout_s):
                hosts = find_hosts(
                    self.rendezvous.view("topology"),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout_s=timeout_s,
                )
            self._topology = Topology(rank=self.rank, host_of_rank=hosts)
        return self._topology

    def report(self, event: dict[str, Any]) -> None:
        """Send an event to the driver's ``on_event``; its values must have types that JSON can encode."""
        self._task.send({"kind": "event", "event": event})

    def progress(self, *, done: bool = False) -> None:
        """Report progress. Costs next to nothing; call it as often as you like.

        From the first call on, a rank that does not call this for ``hang_timeout_s``, and waits for no other rank
        meanwhile, counts as hanging. A function that never calls it may compute for as long as no other rank waits
        for it.

        Args:
            done: whether this was the last step; the rest of the function may then take as long as no other rank waits
                for this one.
        """
        self._heartbeat.progressed_at = None if done else time.monotonic()

    def note_position(self, position: str) -> None:
        """Note the position of the function, such as ``epoch 2, step 5``, for the error if the process dies there.

        Costs next to nothing. The position is kept until the next call; an empty text removes it.
        """
        self._stacks.note_position(position)

    def close(self, *, failed: bool = False, reason: str = "") -> None:
        """Close the communicator, or abort it so that no other rank waits for this one."""
        if self._communicator is None:
            return
        if failed:
            self._communicator.abort(reason)
        self._communicator.close()
        self._communicator = None


def _discard(communicator: Communicator) -> None:
    with contextlib.suppress(CommunicatorError):
        communicator.abort("a rank was lost while the communicator was opened")
        communicator.close()
