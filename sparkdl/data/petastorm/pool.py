"""Reader threads for Petastorm's ``Reader`` that return results in the order of the requests.

Petastorm's own thread pool returns results as they are completed, so that the order of an epoch depends on timing. It
limits the number of row groups, while this pool limits their bytes.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from sparkdl.data.files.threads import DaemonThreads
from sparkdl.data.petastorm.containment import install
from sparkdl.errors import DataError

install()
from petastorm.workers_pool import EmptyResultError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_POLL_S = 0.02
_LIVENESS_S = 0.5


class OrderedThreadPool:
    """Runs one worker per thread; :meth:`get_results` returns one result after the other.

    Args:
        num_threads: number of threads.
        timeout_s: seconds to wait for one result.
        budget_bytes: upper bound of the bytes of all results that are being made, are waiting, or were returned last.
            One result is always made, whatever its size.
        bytes_of: returns the bytes that the result of a request takes while it is made; a finished result counts half
            of that.
        name_of: returns the name of a row group in error messages, from its number in the dataset.
    """

    def __init__(
        self,
        num_threads: int,
        timeout_s: float,
        budget_bytes: int,
        bytes_of: Callable[[dict[str, Any]], int],
        name_of: Callable[[int], str],
    ) -> None:
        self.workers_count = num_threads
        self._budget = _ByteBudget(budget_bytes)
        self._bytes_of, self._name_of = bytes_of, name_of
        self._bytes_taken = 0
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(num_threads, "sparkdl-reader")
        self._submitted: queue.Queue[tuple[Future[list[Any]], dict[str, Any]]] = queue.Queue()
        self._ready: list[Any] = []
        self._thread = threading.local()
        self._stopped = threading.Event()

    def start(self, worker_class: Any, worker_args: Any = None, ventilator: Any = None) -> None:
        """Start to process the ventilator's requests (called by Petastorm's Reader)."""
        self._worker_class, self._worker_args, self._ventilator = worker_class, worker_args, ventilator
        ventilator.start()

    def ventilate(self, **request: Any) -> None:
        """Request one row group (called by Petastorm's ventilator thread)."""
        num_bytes = self._bytes_of(request)
        if not self._budget.take(num_bytes):
            return
        self._submitted.put((self._threads.submit(self._process, request, num_bytes), request))

    def get_results(self) -> Any:
        """Return the next result.

        Raises:
            EmptyResultError: if there are no more.
            DataError: if reading failed, took longer than the timeout, or the pool was stopped.
        """
        deadline = time.monotonic() + self._timeout_s
        # A caller that asks for the next result no longer uses the previous one.
        self._budget.give_back(self._bytes_taken)
        self._bytes_taken = 0
        while not self._ready:
            self._check_running()
            # Checked before the queue: once it is true, nothing more is added to the queue.
            is_last = self._ventilator.completed()
            try:
                future, request = (
                    self._submitted.get_nowait() if is_last else self._submitted.get(timeout=_POLL_S)
                )
            except queue.Empty:
                if is_last:
                    raise EmptyResultError from None
                if time.monotonic() > deadline:
                    raise timeout_error("the next row group", self._timeout_s) from None
                continue
            self._ready = self._await(future, request, deadline)
            self._bytes_taken = self._bytes_of(request) // 2
            self._ventilator.processed_item()
        return self._ready.pop()

    def stop(self) -> None:
        """Ask the threads to end; pending row groups are not read."""
        self._stopped.set()
        self._budget.close()
        self._threads.stop()
        self._ventilator.stop()

    def join(self) -> None:
        """Wait for the threads to end, each after the row group that it is reading."""
        self._threads.join()

    @property
    def diagnostics(self) -> dict[str, int]:
        """Number of row groups that were or are being read ahead."""
        return {"output_queue_size": self._submitted.qsize()}

    def _process(self, request: dict[str, Any], num_bytes: int) -> list[Any]:
        thread = self._thread
        if not hasattr(thread, "worker"):
            thread.published = []
            thread.worker = self._worker_class(0, thread.published.append, self._worker_args)
        thread.worker.process(**request)
        published: list[Any] = thread.published[::-1]
        thread.published.clear()
        self._budget.give_back(num_bytes - num_bytes // 2)
        return published

    def _await(self, future: Future[list[Any]], request: dict[str, Any], deadline: float) -> list[Any]:
        while not wait([future], timeout=_LIVENESS_S).done:
            self._check_running()
            if time.monotonic() > deadline:
                raise timeout_error(self._name_of(request["piece_index"]), self._timeout_s)
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
        """Take so many bytes once they are free or none are held; return False once the budget is closed."""
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
