"""Reads the rows of an epoch for a feed, with threads that decode row groups, a thread that shuffles rows, and a cache.

:mod:`sparkdl.data.feed.state` decides which rows are read, and in which order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkdl.data.dataset.row_choice import count_rows
from sparkdl.data.feed.batches import rows_at_once, shuffled_blocks
from sparkdl.data.feed.cache import BlockCache, FooterCache
from sparkdl.data.feed.epoch_plan import taken_by
from sparkdl.data.feed.shard_reader import ShardReader, chosen_rows_counter
from sparkdl.data.files.changed_files import WatchedFiles
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.files.threads import ReadAhead
from sparkdl.errors import EmptyDatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack

    from sparkdl.collective import Communicator
    from sparkdl.data.dataset.blocks import Block, BlockLayout
    from sparkdl.data.dataset.dataset import ParquetDataset, Preparation
    from sparkdl.data.dataset.row_choice import RowChoice
    from sparkdl.data.feed.epoch_plan import RowGroupPart
    from sparkdl.data.feed.state import EpochSlice

_MAX_SHUFFLED_AHEAD = 16


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Options for reading; see :class:`sparkdl.data.ParquetFeed`.

    Attributes:
        num_threads: number of threads that read row groups.
        read_ahead_bytes: upper bound of the bytes that wait to be used.
        timeout_s: seconds to wait for one row group.
        buffer_rows: number of rows in the shuffle buffer; 0 without shuffling.
        cache: ``"memory"``, ``"disk"`` or None.
        cache_limit_bytes: upper bound of the bytes of the cache.
        cache_folder: folder for the cache's files; None for the system's folder for temporary files.
    """

    num_threads: int
    read_ahead_bytes: int
    timeout_s: float
    buffer_rows: int
    cache: str | None
    cache_limit_bytes: int
    cache_folder: str | None

    def shared_by(self, num_streams: int) -> ReadingOptions:
        """Return the options of each of several streams that share the threads, at least one each, and the bytes."""
        return replace(
            self,
            num_threads=max(1, self.num_threads // num_streams),
            read_ahead_bytes=max(1, self.read_ahead_bytes // num_streams),
        )


class EpochReader:
    """Opens readers for the epochs of one feed, and closes them.

    Args:
        dataset: dataset to read.
        layout: layout of the blocks that are yielded.
        row_choice: selects the rows to read; None for all.
        preparation: computes the columns of the layout from those in the files; None if they are the same.
        options: options for reading.

    Attributes:
        is_closed: whether this is closed, so that epochs can no longer be read.
        waited_s: seconds that callers have waited for batches; the callers add to it.
    """

    def __init__(
        self,
        dataset: ParquetDataset,
        layout: BlockLayout,
        *,
        row_choice: RowChoice | None,
        preparation: Preparation | None,
        options: ReadingOptions,
    ) -> None:
        self._dataset, self._layout, self._options = dataset, layout, options
        self._choice, self._preparation = row_choice, preparation
        self._footers = FooterCache()
        self._files: WatchedFiles | None = None
        self._cache = (
            BlockCache(options.cache, options.cache_limit_bytes, options.cache_folder)
            if options.cache
            else None
        )
        self._readers: set[ShardReader] = set()
        self._shufflers: set[ReadAhead[Block]] = set()
        self.is_closed = False
        self.waited_s = 0.0

    def count_rows(self, communicator: Communicator | None) -> tuple[int, ...]:
        """Return how many rows of every row group are selected; with a communicator each rank counts its part.

        Raises:
            EmptyDatasetError: if no row passes the filter.
            DataError: if a file cannot be read.
        """
        if self._choice is None:
            return self._dataset.row_counts
        if self._choice.counts is not None:
            return self._choice.counts
        timeout_s = self._options.timeout_s
        if communicator is not None:  # the other ranks wait for the counts, and cannot name the file
            timeout_s = min(timeout_s, communicator.timeout_s / 2)
        count = chosen_rows_counter(
            self._dataset,
            self._choice,
            footers=self._footers,
            files=self._watched_files(),
            num_threads=self._options.num_threads,
            timeout_s=timeout_s,
        )
        counts = count_rows(len(self._dataset.row_groups), count, communicator)
        if not sum(counts):
            raise EmptyDatasetError(
                f"None of the {self._dataset.num_rows} rows passes the row filter; there is nothing to feed."
            )
        return counts

    def blocks(
        self,
        part: EpochSlice,
        rank: int,
        row_counts: Sequence[int],
        stack: ExitStack,
        *,
        num_streams: int = 1,
    ) -> Iterator[Block]:
        """Start to read a rank's rows in a slice of an epoch, and return their blocks in training order.

        Closing ``stack`` stops the reading. Of threads and ``read_ahead_bytes`` it takes one part of ``num_streams``.
        """
        plan, shard = part.plan, part.plan.shards()[rank]
        num_rows = sum(len(rows) for _, rows in shard)
        taken = min(taken_by(rank, part.num_taken), num_rows)
        options = self._options.shared_by(num_streams)
        buffer_rows = options.buffer_rows
        unread = plan.unread(rank, shard, buffer_rows=buffer_rows, num_taken=taken)
        if not unread:
            return iter(())
        reader = self._open(unread, row_counts, options)
        self._readers.add(reader)
        stack.callback(self._readers.discard, reader)
        if not buffer_rows:
            stack.callback(reader.close)
            return iter(reader)
        order = plan.order(rank, num_rows, buffer_rows)
        shuffled = shuffled_blocks(iter(reader), self._layout, order, taken)
        block_bytes = max(1, rows_at_once(self._layout, order) * self._layout.row_bytes)
        num_ahead = min(_MAX_SHUFFLED_AHEAD, max(1, options.read_ahead_bytes // 4 // block_bytes))
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
        if self._cache is not None:
            self._cache.close()

    def _open(
        self, shard: list[RowGroupPart], row_counts: Sequence[int], options: ReadingOptions
    ) -> ShardReader:
        shuffles = options.buffer_rows > 0
        return ShardReader(
            self._dataset,
            self._layout,
            shard,
            row_counts=row_counts,
            num_threads=options.num_threads,
            # A quarter is reserved for shuffled rows.
            read_ahead_bytes=options.read_ahead_bytes * 3 // 4 if shuffles else options.read_ahead_bytes,
            timeout_s=options.timeout_s,
            footers=self._footers,
            row_choice=self._choice,
            cache=self._cache,
            copies_cached=not shuffles,
            preparation=self._preparation,
            files=self._watched_files(),
        )

    def _watched_files(self) -> WatchedFiles:
        if self._files is None:
            location = open_location(self._dataset.url)
            versions = self._dataset.versions
            described = {f"{location.path}/{path}": version for path, version in versions.items()}
            self._files = WatchedFiles(location.open_file, described)
        return self._files
