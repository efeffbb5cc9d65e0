"""Threads that work off calls in their order and do not keep a process from ending. Runs on every *rank*.

``ThreadPoolExecutor`` joins its threads when the interpreter exits, so that one that waits for a Store which does not
answer keeps the process for ever.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_EXIT_GRACE_S = 2.0
"""How long the end of the interpreter waits for threads: one that comes back from C++ later is killed in there."""

_Call = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...]]

_alive: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()

_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Those of objects that are gone, too, which end by themselves, but may be in C++ yet."""


class DaemonThreads:
    """Runs calls in a number of threads, each beginning with the call that waits longest.

    Args:
        num_threads: number of threads.
        name: what their names begin with.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"{name}_{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        _alive.add(self)
        _running.update(self._threads)
        # The threads hold the queue and not this, so that they end with whoever forgets to stop them.
        weakref.finalize(self, _end, self._calls, num_threads).atexit = False

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Have a function called; after :meth:`stop` its future is cancelled at once."""
        future: Future[Result] = Future()
        with self._lock:
            if self._stopped:
                future.cancel()
            else:
                self._calls.put((future, function, arguments))
        return future

    def stop(self) -> None:
        """Ask the threads to end after the calls that they are making; all others are cancelled."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            while True:
                try:
                    call = self._calls.get_nowait()
                except queue.Empty:
                    break
                if call is not None:
                    call[0].cancel()
            _end(self._calls, len(self._threads))

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the threads to end, at most so many seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        future, function, arguments = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # raised where the result is taken
            future.set_exception(error)
        del call, future, function, arguments  # and not kept until the next call


def _end(calls: queue.SimpleQueue[_Call | None], num_threads: int) -> None:
    for _ in range(num_threads):
        calls.put(None)


@atexit.register
def _end_with_the_interpreter() -> None:
    for pool in list(_alive):
        pool.stop()
    deadline = time.monotonic() + _EXIT_GRACE_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
