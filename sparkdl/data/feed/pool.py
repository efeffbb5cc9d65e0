"""Reader threads that return results in the order of the requests, within a bound of bytes.

Petastorm's own thread pool returns results as they are completed, so that the order of an epoch depends on timing, and
it limits the number of row groups instead of their bytes.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from sparkdl.data.files.threads import DaemonThreads
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sparkdl.data.dataset.blocks import Block
    from sparkdl.data.feed.epoch_plan import Rows

_POLL_S = 0.02
_LIVENESS_S = 0.5


class OrderedThreadPool:
    """Reads row groups that a ventilator of Petastorm requests; :meth:`get_result` returns one after the other.

    Args:
        read: function of the number of a row group in the dataset and of the rows to read of it.
        num_threads: number of threads that call it.
        timeout_s: seconds to wait for one result.
        budget_bytes: upper bound of the bytes of all results that are being made, are waiting, or were returned last.
            One result is always made, whatever its size.
        bytes_of: returns the bytes that the result of a row group takes while it is made; a finished result counts half
            of that.
        name_of: returns the name of a row group in error messages.
    """

    def __init__(
        self,
        read: Callable[[int, Rows], Block],
        *,
        num_threads: int,
        timeout_s: float,
        budget_bytes: int,
        bytes_of: Callable[[int], int],
        name_of: Callable[[int], str],
    ) -> None:
        self._read, self._bytes_of, self._name_of = read, bytes_of, name_of
        self._budget = _ByteBudget(budget_bytes)
        self._bytes_taken = 0
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(num_threads, "sparkdl-reader")
        self._submitted: queue.Queue[tuple[Future[Block], int]] = queue.Queue()
        self._stopped = threading.Event()

    def start(self, ventilator: Any) -> None:
        """Start the ventilator of Petastorm, which calls :meth:`ventilate` for one row group after the other."""
        self._ventilator = ventilator
        ventilator.start()

    def ventilate(self, row_group: int, rows: Rows) -> None:
        """Request one row group (called by Petastorm's ventilator thread)."""
        num_bytes = self._bytes_of(row_group)
        if self._budget.take(num_bytes):
            self._submitted.put((self._threads.submit(self._process, row_group, rows, num_bytes), row_group))

    def get_result(self) -> Block | None:
        """Return the next result, or None after the last one.

        Raises:
            DataError: if reading failed, took longer than the timeout, or the pool was stopped.
        """
        deadline = time.monotonic() + self._timeout_s
        # A caller that asks for the next result no longer uses the previous one.
        self._budget.give_back(self._bytes_taken)
        self._bytes_taken = 0
        while True:
            self._check_running()
            # Checked before the queue: once it is true, nothing more is added to the queue.
            is_last = self._ventilator.completed()
            try:
                future, row_group = (
                    self._submitted.get_nowait() if is_last else self._submitted.get(timeout=_POLL_S)
                )
                break
            except queue.Empty:
                if is_last:
                    return None
                if time.monotonic() > deadline:
                    raise timeout_error("the next row group", self._timeout_s) from None
        block = self._await(future, row_group, deadline)
        self._bytes_taken = self._bytes_of(row_group) // 2
        self._ventilator.processed_item()
        return block

    def stop(self) -> None:
        """Ask the threads to end; pending row groups are not read. Calling it again does nothing."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._budget.close()
            self._threads.stop()
            self._ventilator.stop()

    def _process(self, row_group: int, rows: Rows, num_bytes: int) -> Block:
        block = self._read(row_group, rows)
        self._budget.give_back(num_bytes - num_bytes // 2)
        return block

    def _await(self, future: Future[Block], row_group: int, deadline: float) -> Block:
        while not wait([future], timeout=_LIVENESS_S).done:
            self._check_running()
            if time.monotonic() > deadline:
                raise timeout_error(self._name_of(row_group), self._timeout_s)
        if future.cancelled():
            self._check_running()
        return future.result()

    def _check_running(self) -> None:
        if self._stopped.is_set():
            raise DataError("The feed was closed while an epoch was being read.")


def results_in_order(
    function: Callable[[int], int],
    row_groups: Iterable[int],
    *,
    num_threads: int,
    timeout_s: float,
    name_of: Callable[[int], str],
) -> Iterator[int]:
    """Call a function for row groups in reader threads, and yield the results in the order of the row groups.

    Args:
        function: function of the number of a row group in the dataset.
        row_groups: numbers of the row groups.
        num_threads: number of threads that call the function.
        timeout_s: seconds to wait for one result.
        name_of: returns the name of a row group in error messages.

    Raises:
        DataError: if a call takes longer than the timeout. Exceptions of the function are raised unchanged.
    """
    threads = DaemonThreads(num_threads, "sparkdl-counter")
    try:
        futures = [(row_group, threads.submit(function, row_group)) for row_group in row_groups]
        for row_group, future in futures:
            if not wait([future], timeout=timeout_s).done:
                raise timeout_error(name_of(row_group), timeout_s)
            yield future.result()
    finally:
        threads.stop()


def timeout_error(what: str, timeout_s: float) -> DataError:
    """Return the error of a read that took too long."""
    return DataError(
        f"Reading {what} took longer than {timeout_s:g} s. See whether the Store can be reached, or raise "
        "read_timeout_s."
    )


class _ByteBudget:
    """A bound of bytes that may be held; a thread that wants more than are free waits."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._held = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> bool:
        """Wait until so many bytes are free or none are held, and take them; return False if the budget is closed."""
        with self._changed:
            while self._held and self._held + num_bytes > self._budget_bytes and not self._is_closed:
                self._changed.wait()
            self._held += num_bytes
            return not self._is_closed

    def give_back(self, num_bytes: int) -> None:
        """Return so many bytes to the budget."""
        if num_bytes:
            with self._changed:
                self._held -= num_bytes
                self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
