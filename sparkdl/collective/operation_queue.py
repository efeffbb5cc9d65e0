"""Queue of a communicator whose operations run in Python, one at a time and in the order of the calls."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Blocked = Callable[[], AbstractContextManager[Any]]
    """Returns a context manager that a thread enters while it waits."""


class FutureHandle:
    """Handle of an operation that runs on a thread of this process, or of a message.

    Attributes:
        source: rank that sends the message; for a message from any rank, -1 until the sender is known.
    """

    def __init__(self, future: Future[None], blocked: Blocked = nullcontext, source: int = -1) -> None:
        self._future = future
        self._blocked = blocked
        self.source = source

    def wait(self, timeout_s: float | None = None) -> None:
        """See :class:`~sparkdl.collective.communicator.Handle`."""
        try:
            with nullcontext() if self._future.done() else self._blocked():
                self._future.result(timeout_s)
        except FutureTimeoutError as error:
            if self._future.done():
                raise
            raise CommunicatorTimeoutError(f"the operation is not complete after {timeout_s:g} s") from error

    def done(self) -> bool:
        """See :class:`~sparkdl.collective.communicator.Handle`."""
        return self._future.done()

    def when_done(self, action: Callable[[], None]) -> None:
        """Call ``action``, on any thread, as soon as the operation is complete; it must return at once."""
        pending = [action]  # taken out: a future keeps its callbacks, and the action may refer to this handle
        self._future.add_done_callback(lambda _: pending.pop()())


def refuse_signal_handler(thread: int | None, name: str) -> None:
    """Return at once, unless the calling thread is the one that carries out an operation.

    Only a signal handler can call anything then. The operation would wait for the handler, and the handler for it.

    Args:
        thread: identifier of the thread that carries out an operation; None if there is none.
        name: name of the communicator.

    Raises:
        CommunicatorError: if it is the calling thread.
    """
    if thread == threading.get_ident():
        raise CommunicatorError(
            f"a signal handler called communicator {name!r} in the middle of an operation, which ends only after the"
            " handler: set a flag in the handler, and act on it between two operations"
        )


class OperationQueue:
    """Queue of operations, and the thread that runs them.

    Args:
        name: name of the communicator.
        blocked: returns a context manager that a thread enters while it waits.

    Attributes:
        queued_ns: time at which the running operation was submitted, in nanoseconds of ``time.monotonic_ns()``; 0 if it
            runs on its caller's thread.
    """

    def __init__(self, name: str, blocked: Blocked = nullcontext) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"sparkdl-mpi-{name}")
        self._name = name
        self._closed = False
        self._submitting = threading.RLock()  # reentrant: a signal handler may run at any line
        self._turn = threading.Lock()
        self._caller: int | None = None
        self._num_pending = 0
        self._blocked = blocked
        self.queued_ns = 0

    def run(self, operation: Callable[[], None]) -> None:
        """Run ``operation`` after the queued ones; on the caller's thread if none is queued."""
        refuse_signal_handler(self._caller, self._name)
        with self._submitting:
            at_once = self._num_pending == 0
            if at_once:
                self._num_pending += 1
                self._caller = threading.get_ident()
                self._turn.acquire()
        if not at_once:
            self.submit(operation).wait()
            return
        try:
            self.queued_ns = 0
            operation()
        finally:
            self._caller = None
            self._turn.release()
            self._finish()

    def submit(self, operation: Callable[[], None]) -> FutureHandle:
        """Queue ``operation``.

        Raises:
            CommunicatorError: if :meth:`close` was called, or this is a signal handler in the middle of an operation.
        """
        refuse_signal_handler(self._caller, self._name)
        with self._submitting:
            if self._closed:
                raise CommunicatorError(f"communicator {self._name!r} is closed")
            self._num_pending += 1
            future = self._executor.submit(self._take_turn, operation, time.monotonic_ns())
            return FutureHandle(future, self._blocked)

    def close(self) -> None:
        """Wait for all submitted operations, and end the thread."""
        refuse_signal_handler(self._caller, self._name)
        with self._submitting:
            self._closed = True
        self._executor.shutdown()

    def _take_turn(self, operation: Callable[[], None], queued_ns: int) -> None:
        try:
            with self._turn:
                self.queued_ns = queued_ns
                operation()
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._submitting:
            self._num_pending -= 1
