"""Reads one rank's shard of one epoch with Petastorm's ventilator: a thread that requests row groups ahead.

Of Petastorm 0.12.1 the feed takes:

- ``ConcurrentVentilator``, which hands the planned row groups to a pool, and waits while too many are on their way,
- its division of work: a ventilator requests, a pool of reader threads decodes, and the reader takes the results.

The plan (which row groups, which of their rows, in which order), the threads with one order and a bound of bytes, and
the decoding with Arrow are sparkdl's: Petastorm's own thread pool returns results as they are completed, so that the
order of an epoch depends on timing, and it limits the number of row groups instead of their bytes. The ventilator is
loaded from Petastorm's installed file, without the package around it: that would import pandas, and needs names which
pyarrow and NumPy have removed. Only Petastorm's own datasets, predicates and transforms need the package;
:mod:`sparkdl.data.petastorm` reads them.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.data.files.threads import DaemonThreads
from sparkdl.errors import DataError
from sparkdl.foreign_errors import how_to_install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sparkdl.data.dataset.blocks import Block
    from sparkdl.data.feed.epoch_plan import RowGroupPart, Rows

SUPPORTED_RELEASE = "0.12"
"""The supported release of Petastorm. 0.13.1 pins setuptools below what torch needs, and its thread pool loses row
groups."""

_MAX_ROW_GROUPS_HELD = 64
# Petastorm's 0.01 s would limit the feed to a few hundred row groups per second.
_VENTILATION_INTERVAL_S = 0.001
_POLL_S = 0.02
_LIVENESS_S = 0.5
_REQUIREMENT = "petastorm==0.12.1"


def find_petastorm() -> Path:
    """Return the folder of the installed Petastorm, without importing it.

    Raises:
        DataError: if it is not installed, or has an unsupported version.
    """
    spec = PathFinder.find_spec("petastorm")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"Reading Parquet needs Petastorm, which is not installed here. {how_to_install('data', _REQUIREMENT)}"
        )
    release = version("petastorm")
    if not release.startswith(SUPPORTED_RELEASE + "."):
        raise DataError(
            f"petastorm {release} is installed, sparkdl needs 0.12.1. {how_to_install('data', _REQUIREMENT)}"
        )
    return Path(spec.submodule_search_locations[0])


@cache
def load_ventilator() -> Any:
    """Return Petastorm's class ``ConcurrentVentilator``.

    Raises:
        DataError: if Petastorm is not installed, or has an unsupported version.
    """
    path = find_petastorm() / "workers_pool" / "ventilator.py"
    spec = importlib.util.spec_from_file_location("sparkdl.data.feed.petastorm_ventilator", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ConcurrentVentilator


class ShardReader(Iterator["Block"]):
    """Iterator over the blocks of a shard in the order of its plan, one for every row group.

    Args:
        shard: rows to read of each row group.
        read: function of the number of a row group in the dataset and of the rows to read of it.
        num_threads: number of threads that call it.
        timeout_s: seconds to wait for one row group.
        budget_bytes: upper bound of the bytes of all blocks that are being made, are waiting, or were returned last.
            One block is always made, whatever its size.
        bytes_of: returns the bytes that the block of a row group takes while it is made; a finished block counts half
            of that.
        name_of: returns the name of a row group in error messages.
    """

    def __init__(
        self,
        shard: Sequence[RowGroupPart],
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
        self._submitted: queue.Queue[tuple[Future[Block], int]] = queue.Queue()
        self._stopped = threading.Event()
        self._ventilator = load_ventilator()(
            self._request,
            [{"row_group": row_group, "rows": rows} for row_group, rows in shard],
            iterations=1,
            max_ventilation_queue_size=_MAX_ROW_GROUPS_HELD,
            ventilation_interval=_VENTILATION_INTERVAL_S,
        )
        self._threads = DaemonThreads(num_threads, "sparkdl-reader")
        self._ventilator.start()

    def __next__(self) -> Block:
        """Return the next block.

        Raises:
            DataError: if reading failed, took longer than the timeout, or the reader was closed.
        """
        deadline = time.monotonic() + self._timeout_s
        # A caller that asks for the next block no longer uses the previous one.
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
                    self._check_running()  # ``close`` completes the ventilator too, after it has set ``_stopped``
                    raise StopIteration from None
                if time.monotonic() > deadline:
                    raise timeout_error("the next row group", self._timeout_s) from None
        while not wait([future], timeout=_LIVENESS_S).done:
            self._check_running()
            if time.monotonic() > deadline:
                raise timeout_error(self._name_of(row_group), self._timeout_s)
        if future.cancelled():
            self._check_running()
        block = future.result()
        self._bytes_taken = self._bytes_of(row_group) // 2
        self._ventilator.processed_item()
        return block

    def close(self) -> None:
        """Ask the threads to end; pending row groups are not read. Calling it again does nothing."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._budget.close()
            self._threads.stop()
            self._ventilator.stop()

    def _request(self, row_group: int, rows: Rows) -> None:
        """Request one row group (called by Petastorm's ventilator thread)."""
        num_bytes = self._bytes_of(row_group)

        def read() -> Block:
            block = self._read(row_group, rows)
            self._budget.give_back(num_bytes - num_bytes // 2)
            return block

        if self._budget.take(num_bytes):
            self._submitted.put((self._threads.submit(read), row_group))

    def _check_running(self) -> None:
        if self._stopped.is_set():
            raise DataError("The feed was closed while an epoch was being read.")


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
