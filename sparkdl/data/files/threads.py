"""Daemon threads and read-ahead.

:class:`DaemonThreads` runs calls in order and does not keep a process from exiting. ``ThreadPoolExecutor`` joins its
threads when the interpreter exits, so that a thread waiting for a Store that does not answer keeps the process alive
for ever.

:class:`ReadAhead` runs an iterator in a background thread, a bounded number of items ahead of its consumer, so that
shuffling proceeds while the training loop computes. Items are passed on as they are and should be worth a thread
switch: thousands of rows, not a batch of a few.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


Result = TypeVar("Result")

READ_AHEAD_BYTES = 256 << 20
"""Default upper bound of the memory of items that are read ahead, in bytes."""

_EXIT_GRACE_S = 2.0
"""Seconds that the interpreter waits for threads at exit; a thread that returns from C++ later is killed there."""

_Call = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...]]

_alive: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()

_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""All threads, also those of garbage-collected objects: they end by themselves, but may still run C++ code."""


class DaemonThreads:
    """Runs calls in a number of threads; the call that has waited longest is next.

    Args:
        num_threads: number of threads.
        name: prefix of the threads' names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Reentrant: the garbage collector may drop a feed, which stops its threads, at any line of ``submit``.
        self._lock = threading.RLock()
        self._stopped = False
        self._threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"{name}_{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        _alive.add(self)
        _running.update(self._threads)
        # The threads refer to the queue and not to this object, so that they end if it is collected without stop().
        weakref.finalize(self, _end, self._calls, num_threads).atexit = False

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Schedule a call of a function and return its future; after :meth:`stop` the future is cancelled at once."""
        future: Future[Result] = Future()
        with self._lock:
            if self._stopped:
                future.cancel()
            else:
                self._calls.put((future, function, arguments))
        return future

    def stop(self) -> None:
        """Ask the threads to end after their current calls; waiting calls are cancelled."""
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


Item = TypeVar("Item")


class ReadAhead(Iterator[Item]):
    """An iterator over the items of a generator, which runs in a thread of its own.

    Args:
        items: generator of the items; the thread closes it in the end.
        max_items: maximum number of items that wait.
        name: name of the thread.
        max_bytes: upper bound of the bytes of the waiting items and the next one. It holds if no item is larger than
            those before it. One item is always made, whatever its size.
        bytes_of: returns the bytes of an item; by default 0, for no limit in bytes.
    """

    def __init__(
        self,
        items: Generator[Item, None, None],
        max_items: int,
        name: str,
        *,
        max_bytes: int = 0,
        bytes_of: Callable[[Item], int] = lambda _: 0,
    ) -> None:
        self._items = items
        self._max_items = max_items
        self._max_bytes, self._bytes_of = max_bytes, bytes_of
        self._waiting_bytes = self._largest_bytes = 0
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        """Return the next item; an error of the generator is raised in the place of its item."""
        with self._changed:
            while not self._waiting and not self._ended:
                self._changed.wait()
            if self._waiting:
                item = self._waiting.popleft()
                self._waiting_bytes -= self._bytes_of(item)
                self._changed.notify()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Ask the thread to end after the current item, and wait for it.

        Whatever the generator waits for, such as a reader, must be closed first. Items that are ready can still be
        taken; after them a :class:`~sparkdl.errors.DataError` is raised.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _wait_while(self, is_full: Callable[[], bool]) -> None:
        while is_full() and not self._closed:
            self._changed.wait()
        if self._closed:
            # An error, because StopIteration would look like the end of the items.
            raise DataError("The feed was closed while an epoch was being read.")

    def _run(self) -> None:
        try:
            for item in self._items:
                size = self._bytes_of(item)
                self._largest_bytes = max(self._largest_bytes, size)
                with self._changed:
                    self._wait_while(lambda: len(self._waiting) >= self._max_items)
                    self._waiting.append(item)
                    self._waiting_bytes += size
                    del item
                    self._changed.notify()
                    # Wait before the next item is made, because making it takes memory.
                    self._wait_while(
                        lambda: (
                            bool(self._waiting)
                            and self._waiting_bytes + self._largest_bytes > self._max_bytes
                        )
                    )
        except BaseException as error:  # raised where the items are taken
            self._error = error
        finally:
            self._items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()
