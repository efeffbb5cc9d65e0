"""Daemon threads, read-ahead and the release of Arrow's memory. Runs on every *rank*.

:class:`DaemonThreads` runs calls in order and does not keep a process from exiting. ``ThreadPoolExecutor`` joins its
threads when the interpreter exits, so that a thread waiting for a Store that does not answer keeps the process alive
for ever.

:class:`ReadAhead` runs an iterator in a background thread, a bounded number of items ahead of its consumer, so that
shuffling proceeds while the training loop computes. Items are passed on as they are and should be worth a thread
switch: thousands of rows, not a batch of a few.

:class:`ArrowRelease` has Arrow's allocator return unused memory where that allocator is mimalloc, on the reader
threads. mimalloc keeps memory that one thread decoded and another one freed for the thread that decoded it. Lists of
784 floats under a limit of 128 MiB took up to 410 MiB that way, and 266 to 306 MiB where the readers have it collect
after every 64 MiB, for 15 to 20 % more processor time. jemalloc, with which ranks start, needs none of it.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator


Result = TypeVar("Result")

READ_AHEAD_BYTES = 256 << 20
"""How much memory the items that are read ahead take at most by default."""

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
        # The threads hold the queue and not this, so that they end when their owner is collected without stopping them.
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


Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """An iterator over the items of another one, which a thread of its own goes through.

    Args:
        items: what to go through; the thread closes it in the end.
        max_items: how many items wait at most.
        name: name of the thread.
        max_bytes: what the items that wait and the one that is being made take at most, where items are no larger
            than those before them. One is always made, whatever it takes.
        bytes_of: what an item takes; without it items take nothing.
    """

    def __init__(
        self,
        items: Generator[Item, None, None],
        max_items: int,
        name: str,
        *,
        max_bytes: int = 0,
        bytes_of: Callable[[Item], int] | None = None,
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

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """Return the next item; an error of the iterator is raised where its item would have been."""
        with self._changed:
            while not self._waiting and not self._ended:
                self._changed.wait()
            if self._waiting:
                item = self._waiting.popleft()
                self._waiting_bytes -= self._size_of(item)
                self._changed.notify()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Ask the thread to end after the item that it is making, and wait for it.

        Whatever the items wait for must end before: close the reader first. Items that wait can still be taken; those
        that were not made are a :class:`~sparkdl.errors.DataError`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _size_of(self, item: Item) -> int:
        return 0 if self._bytes_of is None else self._bytes_of(item)

    def _wait_while(self, is_full: Callable[[], bool]) -> None:
        while is_full() and not self._closed:
            self._changed.wait()
        if self._closed:
            # Not an end, which would pass for that of the items.
            raise DataError("The feed was closed while an epoch was being read.")

    def _run(self) -> None:
        try:
            for item in self._items:
                size = self._size_of(item)
                self._largest_bytes = max(self._largest_bytes, size)
                with self._changed:
                    self._wait_while(lambda: len(self._waiting) >= self._max_items)
                    self._waiting.append(item)
                    self._waiting_bytes += size
                    del item
                    self._changed.notify()
                    # Before the next one is made, which will take memory from then on.
                    self._wait_while(
                        lambda: (
                            bool(self._waiting)
                            and self._waiting_bytes + self._largest_bytes > self._max_bytes
                            and self._bytes_of is not None
                        )
                    )
        except BaseException as error:  # raised where the items are taken
            self._error = error
        finally:
            self._items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()


EVERY_BYTES = 64 << 20
_ALLOCATOR = "mimalloc"


class ArrowRelease:
    """Counts what is decoded, in all threads together.

    Args:
        every_bytes: how much is decoded between one release and the next.
        find_pool: returns the pool that is decoded into.
    """

    def __init__(
        self, every_bytes: int = EVERY_BYTES, find_pool: Callable[[], Any] = pa.default_memory_pool
    ) -> None:
        self._every_bytes, self._find_pool = every_bytes, find_pool
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Say that so much was decoded; the thread that says so at the time gives back what is not in use."""
        with self._lock:
            self._num_bytes += num_bytes
            is_due = self._num_bytes >= self._every_bytes
            if is_due:
                self._num_bytes = 0
        if is_due and (pool := self._find_pool()).backend_name == _ALLOCATOR:
            pool.release_unused()


ARROW_RELEASE = ArrowRelease()
"""That of this process: its allocator is one for all feeds."""
