"""Reads one rank's shard of one epoch through Petastorm's Reader, ventilator and Arrow worker.

Only what Petastorm finds out by itself is replaced: the row groups, their ranges and order come from the
shard plan, so that no folder is listed and no footer read again in every epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparkdl.data.filesystems import open_location
from sparkdl.data.petastorm.columns_worker import ColumnsWorker, PlannedDataset
from sparkdl.data.petastorm.containment import install
from sparkdl.data.petastorm.legacy_parquet import ParquetDatasetPiece
from sparkdl.data.petastorm.ordered_pool import OrderedThreadPool
from sparkdl.errors import DataError

install()
from petastorm.cache import NullCache
from petastorm.reader import Reader
from petastorm.unischema import Unischema, UnischemaField
from petastorm.workers_pool.ventilator import ConcurrentVentilator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sparkdl.data.blocks import Block, BlockLayout
    from sparkdl.data.dataset import ParquetDataset
    from sparkdl.data.shards import RowRange

_READ_AHEAD_BYTES = 32 << 20
_MAX_ROW_GROUPS_HELD = 64
# Petastorm's 0.01 s would bound the feed to a few hundred row groups per second.
_VENTILATION_INTERVAL_S = 0.001


class ShardReader(Reader):
    """Gives the blocks of a shard in the order of its plan, one for every row range.

    Args:
        dataset: the dataset.
        layout: the columns to read and how they are laid out.
        shard: the row ranges.
        num_threads: reader threads; ``num_threads + 2`` row groups are held at most, or 32 MiB of smaller
            ones.
        timeout_s: seconds to wait for one row group.
    """

    # Reader.__init__ lists the folder and reads all footers, which the plan has done; it is not called.
    def __init__(
        self,
        dataset: ParquetDataset,
        layout: BlockLayout,
        shard: Sequence[RowRange],
        *,
        num_threads: int,
        timeout_s: float,
    ) -> None:
        location = open_location(dataset.url)
        groups = dataset.row_groups
        self.schema = _schema_of(layout)
        self.dataset = PlannedDataset(location.filesystem, layout)
        self.ngram = None
        self.num_epochs = 1
        self.is_batched_reader = True
        self.last_row_consumed = False
        self.stopped = False
        self._results_queue_reader = ColumnsWorker.new_results_queue_reader()
        self._workers_pool = OrderedThreadPool(num_threads, timeout_s)
        pieces = {
            part.row_group: ParquetDatasetPiece(
                f"{location.path}/{groups[part.row_group].path}",
                location.open_file,
                row_group=groups[part.row_group].index,
            )
            for part in shard
        }
        requests = [
            {
                "piece_index": part.row_group,
                "worker_predicate": None,
                "shuffle_row_drop_partition": (0, 1),
                "row_range": (part.start, part.stop),
                "expected_rows": groups[part.row_group].num_rows,
            }
            for part in shard
        ]
        self.ventilator = ConcurrentVentilator(
            self._workers_pool.ventilate,
            requests,
            iterations=1,
            randomize_item_order=False,
            max_ventilation_queue_size=_row_groups_held(dataset, layout, num_threads),
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
        """Return the blocks."""
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
        """End the reader threads; calling it again does nothing."""
        if not self.stopped:
            self.stop()


def _row_groups_held(dataset: ParquetDataset, layout: BlockLayout, num_threads: int) -> int:
    """Two more than there are threads, and more of them where row groups are small."""
    mean_bytes = max(1, layout.row_bytes * dataset.num_rows // len(dataset.row_groups))
    return max(num_threads + 2, min(_MAX_ROW_GROUPS_HELD, _READ_AHEAD_BYTES // mean_bytes))


def _schema_of(layout: BlockLayout) -> Unischema:
    fields = [
        UnischemaField(column.name, np.dtype(column.dtype).type, column.shape, None, False)
        for column in layout.columns
    ]
    return Unischema("sparkdl", fields)
