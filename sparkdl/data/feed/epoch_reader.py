"""Reads the rows of an epoch for a feed, with threads that decode row groups, a thread that shuffles rows, and a cache.

:mod:`sparkdl.data.feed.state` decides which rows are read, and in which order.
"""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa

from sparkdl.data.dataset.blocks import own_objects, slice_rows, take_rows
from sparkdl.data.dataset.dataset import folder_values
from sparkdl.data.dataset.row_choice import count_rows
from sparkdl.data.dataset.row_group_file import RowGroupFile
from sparkdl.data.feed.batches import rows_at_once, shuffle_blocks
from sparkdl.data.feed.cache import FooterCache
from sparkdl.data.feed.epoch_plan import taken_by
from sparkdl.data.feed.shard_reader import ShardReader, timeout_error
from sparkdl.data.files.changed_files import WatchedFiles
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.files.threads import DaemonThreads, ReadAhead
from sparkdl.errors import DataError, EmptyDatasetError, FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import ExitStack

    from sparkdl.collective import Communicator
    from sparkdl.data.dataset.blocks import Block, BlockLayout
    from sparkdl.data.dataset.dataset import ParquetDataset, Preparation
    from sparkdl.data.dataset.row_choice import RowChoice
    from sparkdl.data.feed.cache import BlockCache
    from sparkdl.data.feed.epoch_plan import EpochPlan, Rows
    from sparkdl.data.files.filesystems import Location

_MAX_SHUFFLED_AHEAD = 16

RELEASE_BYTES = 64 << 20
"""Number of decoded bytes between two releases of memory."""


@dataclass(kw_only=True, eq=False)
class EpochReader:
    """Reads the row groups of one feed: counts their rows, opens readers for its epochs, and closes them.

    Args:
        dataset: dataset to read.
        layout: layout of the blocks that are yielded.
        row_choice: selects the rows to read; None for all.
        preparation: computes the columns of the layout from those in the files; None if they are the same.
        num_threads: number of threads that read row groups.
        read_ahead_bytes: upper bound of the bytes that wait to be used.
        timeout_s: seconds to wait for one row group.
        buffer_rows: number of rows in the shuffle buffer; 0 without shuffling.
        cache: cache of the blocks of whole row groups; None for no cache.

    Attributes:
        row_counts: number of selected rows of every row group, once :meth:`count_rows` has returned them.
        is_closed: whether this is closed, so that epochs can no longer be read.
        waited_s: seconds that callers have waited for batches; the callers add to it.
    """

    dataset: ParquetDataset
    layout: BlockLayout
    row_choice: RowChoice | None
    preparation: Preparation | None
    num_threads: int
    read_ahead_bytes: int
    timeout_s: float
    buffer_rows: int
    cache: BlockCache | None
    row_counts: tuple[int, ...] = field(default=(), init=False)
    is_closed: bool = field(default=False, init=False)
    waited_s: float = field(default=0.0, init=False)
    _decoded_bytes: ClassVar[int] = 0
    """Since the last release by any reader of the process: all share Arrow's allocator."""

    def __post_init__(self) -> None:
        self._footers = FooterCache()
        yielded = [column.name for column in self.layout.columns]
        read = yielded if self.preparation is None else self.preparation.source_names
        self._names = list(dict.fromkeys([*read, *(self.row_choice.columns if self.row_choice else ())]))
        # Twice: the columns as Arrow decodes them, and the block that is made from them. Columns that are read only for
        # a filter or transform count as far as the dataset describes them.
        beside = set(self._names).difference(yielded)
        self._row_bytes = 2 * self.layout.row_bytes + sum(
            column.row_bytes for column in self.dataset.columns if column.name in beside
        )
        self._readers: set[ShardReader] = set()
        self._shufflers: set[ReadAhead[Block]] = set()

    @cached_property
    def _location_and_files(self) -> tuple[Location, WatchedFiles]:
        """The dataset's location, opened with the credentials of the first read, and its files."""
        location, versions = open_location(self.dataset.url), self.dataset.versions
        described = {f"{location.path}/{path}": version for path, version in versions.items()}
        return location, WatchedFiles(location.open_file, described)

    def count_rows(self, communicator: Communicator | None) -> tuple[int, ...]:
        """Return how many rows of every row group are selected; with a communicator each rank counts its part.

        Raises:
            EmptyDatasetError: if no row passes the filter.
            DataError: if a file cannot be read.
        """
        choice = self.row_choice
        if choice is None:
            self.row_counts = self.dataset.row_counts
            return self.row_counts
        if choice.counts is not None:
            self.row_counts = choice.counts
            return self.row_counts
        timeout_s = self.timeout_s
        if communicator is not None:  # the other ranks wait for the counts, and cannot name the file
            timeout_s = min(timeout_s, communicator.timeout_s / 2)

        def count(row_group: int) -> int:
            file = self._file(row_group)
            try:
                return len(choice.rows_kept(file.read(choice.columns), row_group))
            except Exception as error:
                raise file.error(error, choice.columns) from error

        def count_in_threads(row_groups: Iterable[int]) -> Iterator[int]:
            _ = self._location_and_files  # before several threads ask for them
            counters = DaemonThreads(self.num_threads, "sparkdl-counter")
            try:
                futures = [(row_group, counters.submit(count, row_group)) for row_group in row_groups]
                for row_group, future in futures:
                    if not wait([future], timeout=timeout_s).done:
                        raise timeout_error(self._file(row_group).where, timeout_s)
                    yield future.result()
            finally:
                counters.stop()

        self.row_counts = count_rows(len(self.dataset.row_groups), count_in_threads, communicator)
        if not sum(self.row_counts):
            raise EmptyDatasetError(
                f"None of the {self.dataset.num_rows} rows passes the row filter. Change the filter."
            )
        return self.row_counts

    def blocks(
        self, plan: EpochPlan, rank: int, stack: ExitStack, *, num_streams: int = 1
    ) -> Iterator[Block]:
        """Start to read a rank's rows of an epoch, and return their blocks in training order.

        Closing ``stack`` stops the reading. If ``num_streams`` epochs are read at once, each uses its part of the
        threads (at least one) and of ``read_ahead_bytes``.
        """
        shard = plan.shards()[rank]
        num_rows = sum(len(rows) for _, rows in shard)
        taken = min(taken_by(rank, plan.num_taken), num_rows)
        buffer_rows = self.buffer_rows
        unread = plan.unread(rank, shard, buffer_rows=buffer_rows, num_taken=taken)
        if not unread:
            return iter(())
        _ = self._location_and_files  # before several threads ask for them
        ahead_bytes = max(1, self.read_ahead_bytes // num_streams)
        reader = ShardReader(
            unread,
            self._read,
            num_threads=max(1, self.num_threads // num_streams),
            timeout_s=self.timeout_s,
            # A quarter is reserved for shuffled rows.
            budget_bytes=ahead_bytes * 3 // 4 if buffer_rows else ahead_bytes,
            bytes_of=lambda row_group: self._row_bytes * self.dataset.row_groups[row_group].num_rows,
            name_of=lambda row_group: self._file(row_group).where,
        )
        self._readers.add(reader)
        stack.callback(self._readers.discard, reader)
        if not buffer_rows:
            stack.callback(reader.close)
            return iter(reader)
        order = plan.order(rank, num_rows, buffer_rows)
        shuffled = shuffle_blocks(iter(reader), self.layout, order, taken)
        block_bytes = max(1, rows_at_once(self.layout, order) * self.layout.row_bytes)
        num_ahead = min(_MAX_SHUFFLED_AHEAD, max(1, ahead_bytes // 4 // block_bytes))
        ahead = ReadAhead(shuffled, num_ahead, "sparkdl-shuffler")
        self._shufflers.add(ahead)
        stack.callback(self._shufflers.discard, ahead)
        stack.callback(ahead.close)
        stack.callback(reader.close)  # first, as the shuffler may be waiting for it
        return iter(ahead)

    def close(self) -> None:
        """Stop all threads except those that wait for a Store, and clear the cache, including its files."""
        self.is_closed = True
        for reader in list(self._readers):
            reader.close()
        for shuffler in list(self._shufflers):  # after the readers, for which they may have waited
            shuffler.close()
        if self.cache is not None:
            self.cache.close()

    def _file(self, row_group: int) -> RowGroupFile:
        group = self.dataset.row_groups[row_group]
        location, files = self._location_and_files
        path = f"{location.path}/{group.path}"
        name, values = location.name_of(path), folder_values(group.path)
        return RowGroupFile(path, files.open, group.index, name, values, self._footers.open)

    def _read(self, row_group: int, rows: Rows) -> Block:
        """Read some rows of a row group as one block, on a reader thread.

        Args:
            row_group: number of the row group in the dataset.
            rows: rows to read, numbered among those that pass the filter.

        Raises:
            DataError: if the file cannot be read or differs from what was planned; see
                :meth:`sparkdl.data.dataset.row_group_file.RowGroupFile.error`.
        """
        file = self._file(row_group)

        def read_table() -> pa.Table:
            table = file.read(self._names)
            self._release_memory(table.nbytes)
            expected = self.dataset.row_groups[row_group].num_rows
            if table.num_rows != expected:
                raise FileChangedError(
                    f"it has {table.num_rows} rows now, but had {expected} when the dataset was described"
                )
            return table

        try:
            return self._block(row_group, rows, read_table)
        except Exception as error:
            raise file.error(error, self._names) from error

    def _release_memory(self, num_bytes: int) -> None:
        """Count decoded bytes, and release unused memory of Arrow after every :data:`RELEASE_BYTES` if it is mimalloc.

        If one thread decodes into memory and another thread frees it, mimalloc keeps this memory for the first thread.
        Lists of 784 floats under a limit of 128 MiB took up to 410 MiB that way, and 266 to 306 MiB with these
        releases, for 15 to 20 % more processor time. jemalloc, which ranks are started with, does not need this.
        """
        EpochReader._decoded_bytes += num_bytes  # threads may lose a summand, which only delays the release
        if EpochReader._decoded_bytes >= RELEASE_BYTES:
            EpochReader._decoded_bytes = 0
            if (pool := pa.default_memory_pool()).backend_name == "mimalloc":
                pool.release_unused()

    def _block(self, row_group: int, rows: Rows, read_table: Callable[[], pa.Table]) -> Block:
        if self.cache is None and self.row_choice is None and isinstance(rows, range):
            # Sliced before packing, which copies if there are many columns.
            return self._pack(read_table().slice(rows.start, len(rows)))
        if self.cache is None:
            block = self._choose_rows(row_group, read_table())
        else:
            block = self.cache.get(row_group, lambda: self._choose_rows(row_group, read_table()))
        selected = (
            slice_rows(block, rows.start, rows.stop) if isinstance(rows, range) else take_rows(block, rows)
        )
        if self.cache is None:
            return selected
        # Shuffling copies the rows, but not the objects that they refer to.
        return [
            own_objects(array) if array.dtype.hasobject else array if self.buffer_rows else array.copy()
            for array in selected
        ]

    def _choose_rows(self, row_group: int, table: pa.Table) -> Block:
        """Return all rows that pass the filter as a block."""
        if self.row_choice is None:
            return self._pack(table)
        chosen, expected = self.row_choice.rows_kept(table, row_group), self.row_counts[row_group]
        if len(chosen) != expected:
            raise DataError(
                f"{len(chosen)} rows pass the row filter now, but {expected} did when they were counted; a filter must "
                "give the same answer for the same rows every time"
            )
        if np.array_equal(chosen, np.arange(table.num_rows)):
            return self._pack(table)
        if self.preparation is not None:  # which costs more than leaving the rows out first
            return self._pack(table.take(chosen))
        return take_rows(self._pack(table), chosen)

    def _pack(self, table: pa.Table) -> Block:
        if self.preparation is not None:
            table = self.preparation.apply(table, [column.name for column in self.layout.columns])
        return self.layout.pack(table)
