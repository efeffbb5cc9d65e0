"""Messages between two ranks: the parts that do not depend on the transport.

Each end of a message has a deadline and a time at which to warn of a stall. Both ends describe the message in an
envelope, and compare the envelopes to find out whether they agree. The error of a failed message names the failure of
the communicator to which it belongs.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.buffers import DTYPES, item_bytes
from sparkdl.collective.operation_queue import FutureHandle
from sparkdl.collective.telemetry.stalls import NotedWait, StallTimer
from sparkdl.errors import (
    CommunicatorAbortedError,
    CommunicatorError,
    CommunicatorTimeoutError,
    MismatchError,
    ParamError,
    RankLostError,
)
from sparkdl.rendezvous.deadline import Deadline

if TYPE_CHECKING:
    from sparkdl.collective.buffers import FlatBuffer
    from sparkdl.collective.communicator import Array, Communicator
    from sparkdl.collective.telemetry.monitor import OperationMonitor


class PendingMessage:
    """One end of a message.

    Its timeout begins when no earlier message with the same peer, direction and tag is pending.

    Args:
        kind: ``"send"`` or ``"recv"``.
        peer: rank of the other end; None for any rank.
        tag: tag of the message.
        array: array that is sent, or into which the message is received.
        buffer: its elements.
        timeout_s: seconds until the message fails.
        monitor: monitor that records the message.

    Attributes:
        what: description of the call, for messages.
        peer: rank of the other end; -1 for any rank, until :meth:`comes_from` sets it.
        envelope: dtype and size at this end.
        handle: handle for the caller.
    """

    def __init__(
        self,
        *,
        kind: str,
        peer: int | None,
        tag: int,
        array: Array,
        buffer: FlatBuffer,
        timeout_s: float,
        monitor: OperationMonitor,
    ) -> None:
        size, dtype = buffer.data.size, buffer.dtype
        whom = "any rank" if peer is None else f"rank {peer}"
        self.what = f"{kind} of {size} {dtype} {'to' if kind == 'send' else 'from'} {whom} with tag {tag}"
        self.kind, self.tag = kind, tag
        self.peer = -1 if peer is None else peer
        self.array = array
        self.envelope: Envelope = np.array([DTYPES.index(dtype), size], np.int64)
        self.timeout_s = timeout_s
        self._timing = monitor.begin(
            kind, name=f"tag {tag}", num_bytes=size * item_bytes(dtype), dtype=dtype, is_blocking=False
        )
        self._future: Future[None] = Future()
        self.handle = FutureHandle(self._future, monitor.blocked, self.peer)
        self._deadline: Deadline | None = None
        self._stall: StallTimer | None = None
        self._wait: NotedWait | None = None

    def comes_from(self, peer: int) -> None:
        """Set the sender of a message from any rank."""
        self.peer = self.handle.source = peer

    def note_match(self) -> None:
        """Note that the other end has made its call as well."""
        self._timing.all_here()
        self._end_wait()

    def complete(self) -> None:
        """Note that the message has arrived."""
        self._timing.end(is_ok=True)
        self._future.set_result(None)
        self._end_wait()

    def fail(self, error: Exception) -> None:
        """Note that the message has failed."""
        self._timing.end(is_ok=False)
        self._future.set_exception(error)
        self._end_wait()

    def late(self, name: str) -> CommunicatorTimeoutError:
        """Return the error for a message whose deadline has passed."""
        why = "no rank has sent one" if self.peer < 0 else f"rank {self.peer} has not answered"
        return CommunicatorTimeoutError(
            f"{self.what} on {name!r} was not complete within {self.timeout_s:g} s: {why}"
        )

    def check_deadline(self, parent: Communicator) -> None:
        """Warn of a stall if a warning is due.

        Raises:
            CommunicatorTimeoutError: if the deadline has passed, or the message has stalled for too long.
        """
        if self._deadline is None or self._stall is None:
            self._deadline, self._stall = Deadline(self.timeout_s), StallTimer()
            ranks = range(parent.world_size) if self.peer < 0 else (parent.rank, self.peer)
            both = [parent.world_ranks[rank] for rank in ranks]
            self._wait = NotedWait(parent.name, both, self.what, self.timeout_s)
            if self._timing.ready_ns or self._future.done():
                self._wait.end()  # another thread has matched or completed it meanwhile
        if self._deadline.expired:
            raise self.late(parent.name)
        if self._timing.ready_ns:
            return  # both ends have called
        missing = "no rank had sent one" if self.peer < 0 else f"rank {self.peer} had not joined"
        self._stall.check(parent, self.what, lambda: missing)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.end()


Envelope = np.ndarray[Any, np.dtype[np.int64]]
"""Two numbers: the dtype's index in :data:`DTYPES`, and the number of elements."""


def check_message(peer: int | None, tag: int, *, rank: int, world_size: int, max_tag: int) -> None:
    """Check the peer (None for any rank) and the tag of a message of a rank.

    Raises:
        ParamError: if ``peer`` does not exist or is ``rank`` itself, or the tag is out of range.
    """
    if world_size == 1 and peer is None:
        raise ParamError("a world of one rank has no other to receive a message from")
    if peer is not None and (not 0 <= peer < world_size or peer == rank):
        raise ParamError(f"rank {rank} of {world_size} cannot exchange messages with rank {peer}")
    if not 0 <= tag <= max_tag:
        raise ParamError(f"tag {tag} is outside 0 to {max_tag}, the tags that this transport has")


def compare(sent: Envelope, expected: Envelope, *, source: int, to: int, tag: int) -> None:
    """Compare the envelopes of both ends of a message.

    Raises:
        MismatchError: if they differ; the same error at both ends.
    """
    if sent.tolist() != expected.tolist():
        raise MismatchError(
            f"the ranks disagree about a message with tag {tag}: rank {source} said send of {_describe(sent)}"
            f" to rank {to}; rank {to} said recv of {_describe(expected)} from rank {source}"
        )


def _describe(envelope: Envelope) -> str:
    dtype, count = envelope.tolist()
    return f"{count} {DTYPES[dtype]}"


NEWS_S = 3.0
"""How long to wait for the communicator itself to find out why a link failed."""


def fail_communicator(
    message: PendingMessage, error: Exception, parent: Communicator | None, parent_name: str
) -> CommunicatorError:
    """Return the error of a failed message, and make its communicator fail as well.

    Args:
        message: the failed message.
        error: error of the link.
        parent: communicator of the message; None if it no longer exists.
        parent_name: name of the communicator.
    """
    what = f"{message.what} on {parent_name!r}"
    late = isinstance(error, CommunicatorTimeoutError)
    if late:
        error = message.late(parent_name)
    if parent is None:
        return CommunicatorError(f"{what} failed: {error}")
    is_news = isinstance(error, RankLostError | CommunicatorAbortedError)
    if parent.has_failed_within(NEWS_S if is_news else 0.0):
        failure = parent.error()
        return type(failure)(f"{message.what}: {failure}")
    reason = str(error) if late else f"{what} failed: {error}"
    parent.abort(reason)
    if late:
        return CommunicatorTimeoutError(reason)
    return RankLostError(reason) if isinstance(error, RankLostError) else CommunicatorError(reason)
