"""A message on its way, at one of its ends: its deadline, and when to say that it stalls. Runs on ranks."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from sparkdl.collective.deadline import Deadline
from sparkdl.collective.stalls import StallTimer, numbered, warn_of_stall
from sparkdl.collective.turns import MessageHandle
from sparkdl.collective.waits import NotedWait
from sparkdl.errors import CommunicatorTimeoutError

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Array, Communicator
    from sparkdl.collective.envelopes import Envelope
    from sparkdl.collective.message_monitor import MessageMonitor
    from sparkdl.collective.stalls import StallCheck


class PendingMessage:
    """One end of a message.

    Its time runs from when it is the first of those with its direction and tag.

    Args:
        what: the call, in words.
        kind: ``"send"`` or ``"recv"``.
        peer: rank of the other end; -1 for any, until :meth:`comes_from` says which.
        tag: the message's.
        array: what is sent, or where it is received.
        envelope: what this end says of it.
        dtype: of the elements.
        num_bytes: the array's size.
        timeout_s: its deadline.
        monitor: what is told of it.

    Attributes:
        handle: for the caller.
    """

    def __init__(
        self,
        *,
        what: str,
        kind: str,
        peer: int,
        tag: int,
        array: Array,
        envelope: Envelope,
        dtype: str,
        num_bytes: int,
        timeout_s: float,
        monitor: MessageMonitor,
    ) -> None:
        self.what, self.kind, self.peer, self.tag = what, kind, peer, tag
        self.array, self.envelope = array, envelope
        self.timeout_s = timeout_s
        self._timing = monitor.begin(kind, tag=tag, num_bytes=num_bytes, dtype=dtype)
        self._future: Future[None] = Future()
        self.handle = MessageHandle(self._future, monitor.blocked, peer)
        self._deadline: Deadline | None = None
        self._stall: StallTimer | None = None
        self._wait: NotedWait | None = None

    def comes_from(self, peer: int) -> None:
        """Say which rank sends what may come from any."""
        self.peer = self.handle.source = peer

    def matched(self) -> None:
        """Say that the other end has called, too."""
        self._timing.both_here()
        self._end_wait()

    def complete(self) -> None:
        """Say that it has arrived."""
        self._timing.end(is_ok=True)
        self._future.set_result(None)
        self._end_wait()

    def fail(self, error: Exception) -> None:
        """Say that it never will."""
        self._timing.end(is_ok=False)
        self._future.set_exception(error)
        self._end_wait()

    def late(self, name: str) -> CommunicatorTimeoutError:
        """The error of its deadline on the communicator of that name."""
        why = "no rank has sent one" if self.peer < 0 else f"rank {self.peer} has not answered"
        return CommunicatorTimeoutError(
            f"{self.what} on {name!r} was not complete within {self.timeout_s:g} s: {why}"
        )

    def look_at_the_clock(self, parent: Communicator) -> None:
        """Warn of a stall if it is time for that.

        Raises:
            CommunicatorTimeoutError: if its deadline has passed, or it has stalled for too long.
        """
        if self._deadline is None or self._stall is None:
            self._deadline, self._stall = Deadline(self.timeout_s), StallTimer(parent.stall_check)
            ranks = range(parent.world_size) if self.peer < 0 else (parent.rank, self.peer)
            both = [parent.world_ranks[rank] for rank in ranks]
            self._wait = NotedWait(parent.name, both, self.what, self.timeout_s)
            if self._timing.is_ready or self._future.done():
                self._wait.end()  # it has gone on meanwhile, in another thread
        if self._deadline.expired:
            raise self.late(parent.name)
        if self._timing.is_ready:
            return  # it is under way
        called = numbered(parent.name, parent.world_ranks)
        check_stall(self._stall, parent.stall_check, called, self.what, rank=parent.rank, peer=self.peer)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.end()


def check_stall(
    stall: StallTimer, check: StallCheck, communicator: str, what: str, *, rank: int, peer: int
) -> None:
    """Warn of a message that its other end does not join, if it is time for that.

    Args:
        stall: of the message.
        check: when to warn, and when to give up.
        communicator: what to call it.
        what: the call, in words.
        rank: of this end.
        peer: of the other end; -1 for any.

    Raises:
        CommunicatorTimeoutError: if it is to be given up.
    """
    missing = "no rank had sent one" if peer < 0 else f"rank {peer} had not joined"
    if stall.is_over:
        raise CommunicatorTimeoutError(
            f"{what} on {communicator} stalled for {check.abort_after_s:g} s: {missing}"
        )
    if stall.warning_is_due:
        warn_of_stall(communicator, rank, what, stall.waited_s, missing)
