"""Doing operations one at a time, synchronous and asynchronous alike, in the order of submission."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from sparkdl.errors import CommunicatorTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable


class FutureHandle:
    """The handle of an operation that a thread of this process carries out."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout_s: float | None = None) -> None:
        """See :class:`~sparkdl.collective.handle.Handle`."""
        try:
            self._future.result(timeout_s)
        except FutureTimeoutError as error:
            if self._future.done():
                raise
            raise CommunicatorTimeoutError(f"the operation is not complete after {timeout_s:g} s") from error

    def done(self) -> bool:
        """See :class:`~sparkdl.collective.handle.Handle`."""
        return self._future.done()


class Turns:
    """One queue of operations and the one thread that works on it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._submitting = threading.Lock()
        self._turn = threading.Lock()
        self._num_pending = 0

    def run(self, operation: Callable[[], None]) -> None:
        """Carry out ``operation`` after all that was submitted; on the caller's thread if that is nothing."""
        with self._submitting:
            at_once = self._num_pending == 0
            if at_once:
                self._num_pending += 1
                self._turn.acquire()
        if not at_once:
            self.submit(operation).wait()
            return
        try:
            operation()
        finally:
            self._turn.release()
            self._finish()

    def submit(self, operation: Callable[[], None]) -> FutureHandle:
        """Queue ``operation``."""
        with self._submitting:
            self._num_pending += 1
            return FutureHandle(self._executor.submit(self._take_turn, operation))

    def close(self) -> None:
        """Wait for everything that was submitted, and end the thread."""
        self._executor.shutdown()

    def _take_turn(self, operation: Callable[[], None]) -> None:
        try:
            with self._turn:
                operation()
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._submitting:
            self._num_pending -= 1
