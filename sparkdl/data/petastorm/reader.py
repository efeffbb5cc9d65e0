"""Reads one rank's shard of one epoch through Petastorm's Reader, ventilator and Arrow worker.

Only Petastorm's own planning is replaced: the row groups, their ranges and their order come from the shard plan, so
that no folder is listed and no footer is read again in every epoch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.data.dataset.dataset import folder_values
from sparkdl.data.dataset.row_group_file import RowGroupFile
from sparkdl.data.files.changed_files import WatchedFiles
from sparkdl.data.files.filesystems import Location, open_location
from sparkdl.data.petastorm.containment import install
from sparkdl.data.petastorm.pool import OrderedThreadPool, results_in_order
from sparkdl.data.petastorm.worker import ColumnsWorker, PlannedDataset
from sparkdl.errors import DataError

install()
from petastorm.cache import NullCache
from petastorm.reader import Reader
from petastorm.unischema import Unischema, UnischemaField
from petastorm.workers_pool.ventilator import ConcurrentVentilator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sparkdl.data.dataset.blocks import Block, BlockLayout
    from sparkdl.data.dataset.dataset import ParquetDataset, Preparation
    from sparkdl.data.dataset.row_choice import RowChoice
    from sparkdl.data.feed.cache import BlockCache, FooterCache
    from sparkdl.data.feed.epoch_plan import RowGroupPart


_MAX_ROW_GROUPS_HELD = 64
# Petastorm's 0.01 s would limit the feed to a few hundred row groups per second.
_VENTILATION_INTERVAL_S = 0.001


class ShardReader(Reader):
    """Iterator over the blocks of a shard in the order of its plan, one for every row group.

    Args:
        dataset: dataset to read.
        layout: columns to read and their layout in blocks.
        shard: rows to read of each row group, numbered among those that pass the filter.
        row_counts: number of rows of every row group that pass the filter.
        num_threads: number of reader threads.
        read_ahead_bytes: upper bound of the bytes of decoded row groups, unless a single one takes more.
        timeout_s: seconds to wait for one row group.
        row_choice: selects the rows to read; by default all.
        footers: cache of parsed footers.
        cache: cache of decoded row groups; None for no cache.
        copies_cached: whether blocks from the cache are copied, so that the caller may write to them.
        preparation: computes the columns of the layout from those in the files; None if they are the same.
        files: detects files that change between this reader and others that share this object; None for a new one.
    """

    # Reader.__init__ is not called: it lists the folder and reads all footers, which planning has already done.
    def __init__(
        self,
        dataset: ParquetDataset,
        layout: BlockLayout,
        shard: Sequence[RowGroupPart],
        *,
        row_counts: Sequence[int],
        num_threads: int,
        read_ahead_bytes: int,
        timeout_s: float,
        footers: FooterCache,
        row_choice: RowChoice | None = None,
        cache: BlockCache | None = None,
        copies_cached: bool = True,
        preparation: Preparation | None = None,
        files: WatchedFiles | None = None,
    ) -> None:
        location = open_location(dataset.url)
        groups = dataset.row_groups
        self.schema = _schema_of(layout, row_choice, preparation)
        self.dataset = PlannedDataset(location, layout, row_choice, cache, copies_cached, preparation)
        self.ngram = None
        self.num_epochs = 1
        self.is_batched_reader = True
        self.last_row_consumed = False
        self.stopped = False
        self._results_queue_reader = ColumnsWorker.new_results_queue_reader()
        # Twice: the columns as Arrow decodes them, and the block that is made from them.
        row_bytes = 2 * layout.row_bytes + _bytes_beside(dataset, layout, row_choice, preparation)
        self._workers_pool = OrderedThreadPool(
            num_threads,
            timeout_s,
            read_ahead_bytes,
            lambda request: row_bytes * int(request["expected_rows"]),
            partial(_name_of, dataset, location),
        )
        watched = WatchedFiles(location.open_file) if files is None else files
        pieces = {
            row_group: _row_group_file(dataset, location, row_group, watched.open, footers)
            for row_group, _ in shard
        }
        requests = [
            {
                "piece_index": row_group,
                "worker_predicate": None,
                "shuffle_row_drop_partition": (0, 1),
                "rows": rows,
                "expected_rows": groups[row_group].num_rows,
                "expected_kept": row_counts[row_group],
            }
            for row_group, rows in shard
        ]
        self.ventilator = ConcurrentVentilator(
            self._workers_pool.ventilate,
            requests,
            iterations=1,
            randomize_item_order=False,
            max_ventilation_queue_size=_MAX_ROW_GROUPS_HELD,
            ventilation_interval=_VENTILATION_INTERVAL_S,
        )
        # In the order in which Petastorm's workers take them: filesystem, dataset, schema, ngram, row groups,
        # cache, transform, transformed schema, filters, whether to shuffle rows, seed.
        arguments = (
            location.filesystem,
            self.dataset,
            self.schema,
            None,
            pieces,
            NullCache(),
            None,
            self.schema,
            None,
            False,
            None,
        )
        self._workers_pool.start(ColumnsWorker, arguments, ventilator=self.ventilator)

    def __iter__(self) -> Iterator[Block]:
        """Return this reader, which is an iterator over the blocks."""
        return self

    def __next__(self) -> Block:
        """Return the next block.

        Raises:
            DataError: if it cannot be read, or the reader was closed.
        """
        if self.stopped:
            raise DataError("The feed was closed while an epoch was being read.")
        block: Block = super().__next__()
        return block

    def close(self) -> None:
        """Stop the reader threads; calling it again does nothing."""
        if not self.stopped:
            self.stop()


def kept_rows_counter(
    dataset: ParquetDataset,
    row_choice: RowChoice,
    *,
    footers: FooterCache,
    files: WatchedFiles,
    num_threads: int,
    timeout_s: float,
) -> Callable[[Iterable[int]], Iterator[int]]:
    """Return a function that counts the rows of row groups that pass a filter, reading only the filter's columns.

    Args:
        dataset: dataset to read.
        row_choice: filter whose passing rows are counted.
        footers: cache of parsed footers.
        files: detects files that change between counting and the readers that share this object.
        num_threads: number of threads that read row groups.
        timeout_s: seconds to wait for one row group.
    """
    location = open_location(dataset.url)

    def count(row_group: int) -> int:
        file = _row_group_file(dataset, location, row_group, files.open, footers)
        try:
            return len(row_choice.rows_kept(file.read(row_choice.columns), row_group))
        except Exception as error:
            raise file.error(error, row_choice.columns) from error

    return lambda row_groups: results_in_order(
        count,
        row_groups,
        num_threads=num_threads,
        timeout_s=timeout_s,
        name_of=partial(_name_of, dataset, location),
    )


def _name_of(dataset: ParquetDataset, location: Location, row_group: int) -> str:
    group = dataset.row_groups[row_group]
    return f"{location.name_of(f'{location.path}/{group.path}')}, row group {group.index}"


def _row_group_file(
    dataset: ParquetDataset,
    location: Location,
    row_group: int,
    open_file: Callable[[str], Any],
    footers: FooterCache,
) -> RowGroupFile:
    group = dataset.row_groups[row_group]
    path = f"{location.path}/{group.path}"
    return RowGroupFile(
        path, open_file, group.index, location.name_of(path), folder_values(group.path), footers.open
    )


def _bytes_beside(
    dataset: ParquetDataset,
    layout: BlockLayout,
    row_choice: RowChoice | None,
    preparation: Preparation | None,
) -> int:
    """Return the bytes per row of columns read only for a filter or transform, as far as the dataset describes them."""
    given = {column.name for column in layout.columns}
    read = {*(row_choice.columns if row_choice else ()), *(preparation.source_names if preparation else ())}
    return sum(column.row_bytes for column in dataset.columns if column.name in read - given)


def _schema_of(
    layout: BlockLayout, row_choice: RowChoice | None, preparation: Preparation | None
) -> Unischema:
    names = [column.name for column in layout.columns]
    if preparation is not None:
        names = list(preparation.source_names)
    if row_choice is not None:
        names += row_choice.columns
    # Petastorm only uses the names of the columns; Arrow and sparkdl handle their types.
    fields = [UnischemaField(name, np.object_, (), None, True) for name in dict.fromkeys(names)]
    return Unischema("sparkdl", fields)
