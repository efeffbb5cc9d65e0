"""The feed of one *rank*: its shard of a Parquet dataset as batches of NumPy arrays, epoch after epoch.

Reader threads decode row groups ahead of the training loop, within a bound; what comes out depends on (seed,
epoch), the rank and the world size alone, never on threads or timing. Moving batches to torch and to devices
is the caller's part.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkdl.data.batches import file_order_batches, shuffled_batches
from sparkdl.data.blocks import BlockLayout
from sparkdl.data.shards import plan_shards, random_bits, rows_in_step, rows_per_rank, steps_per_epoch
from sparkdl.errors import DataError, ParamError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from sparkdl.data.dataset import ParquetDataset
    from sparkdl.data.petastorm.reader import ShardReader

SHUFFLE_BUFFER_BYTES = 64 << 20
"""How much memory the rows of the shuffle buffer take at most by default."""

SHUFFLE_BUFFER_ROWS = 1 << 16
"""How many rows the shuffle buffer holds at most by default: more of them leave the processor's cache."""


class ParquetFeed:
    """Batches of one rank's rows.

    Args:
        dataset: the dataset, the same on every rank.
        columns: names of the columns to read; batches hold them in this order.
        rank: this rank.
        world_size: number of ranks.
        batch_size: rows per batch and rank.
        shuffle: whether to shuffle the row groups in every epoch, and then the rows in a buffer; otherwise
            rows come in the order of the files.
        seed: any integer; the same on every rank.
        num_threads: threads that read row groups; ``num_threads + 2`` row groups are held at most, or 32 MiB
            of smaller ones.
        shuffle_buffer_rows: rows among which the next batch is drawn; by default 65,536, or as
            many as fit in 64 MiB.
        read_timeout_s: seconds to wait for one row group before the read is given up.

    Raises:
        DataError: if a column does not exist.
        ShardingError: if there are fewer rows than ranks.
        ParamError: if a number is out of range.
    """

    def __init__(
        self,
        dataset: ParquetDataset,
        *,
        columns: Sequence[str],
        rank: int,
        world_size: int,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        num_threads: int = 2,
        shuffle_buffer_rows: int | None = None,
        read_timeout_s: float = 600.0,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("num_threads", num_threads)):
            if value < 1:
                raise ParamError(f"{name} must be at least 1, got {value}.")
        if not 0 <= rank < world_size:
            raise ParamError(f"rank must be in [0, {world_size}), got {rank}.")
        if not columns or len(set(columns)) != len(columns):
            raise DataError(f"A feed needs columns, each named once; got {list(columns)}.")
        self._layout = BlockLayout([dataset.column(name) for name in columns])
        self._num_rows = rows_per_rank(dataset.num_rows, world_size)[rank]
        if shuffle_buffer_rows is None:
            fitting = SHUFFLE_BUFFER_BYTES // max(1, self._layout.row_bytes)
            shuffle_buffer_rows = min(fitting, SHUFFLE_BUFFER_ROWS)
        self._buffer_rows = max(shuffle_buffer_rows, batch_size)
        self._dataset = dataset
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._num_threads, self._read_timeout_s = num_threads, read_timeout_s
        self._readers: set[ShardReader] = set()
        self._closed = False

    @property
    def steps_per_epoch(self) -> int:
        """Batches of every epoch, the same number on all ranks."""
        return steps_per_epoch(self._dataset.num_rows, self._world_size, self._batch_size)

    def rows_in_step(self, step: int) -> list[int]:
        """Return how many rows each rank has in a step, from 0: ``batch_size`` in all but the last."""
        return rows_in_step(self._dataset.num_rows, self._world_size, self._batch_size, step)

    def epoch(self, epoch: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield the ``steps_per_epoch`` batches of an epoch; reading ahead begins with the first ``next``.

        Args:
            epoch: number of the epoch, from 0.

        Yields:
            By column name an array of shape ``(rows, *column.shape)`` and the column's dtype, writable,
            perhaps strided, and the caller's to keep. The last batch has no rows where this shard is a row
            shorter than others.

        Raises:
            DataError: if a file cannot be read, or holds something else than the dataset says; it names file
                and row group.
        """
        if self._closed:
            raise ParamError("The feed is closed; make a new one.")
        with closing(self._open_reader(epoch)) as reader:
            self._readers.add(reader)
            try:
                blocks = iter(reader)
                if self._shuffle:
                    random = np.random.Generator(random_bits(self._seed, epoch, self._rank))
                    batches = shuffled_batches(
                        blocks,
                        self._layout,
                        total_rows=self._num_rows,
                        batch_size=self._batch_size,
                        buffer_rows=self._buffer_rows,
                        random=random,
                    )
                else:
                    batches = file_order_batches(blocks, self._batch_size)
                nothing = self._layout.allocate(0)
                for _ in range(self.steps_per_epoch):
                    yield self._layout.unpack(next(batches, nothing))
            finally:
                self._readers.discard(reader)

    def close(self) -> None:
        """End the reader threads; epochs that are under way cannot go on. Calling it again does nothing."""
        self._closed = True
        for reader in list(self._readers):
            reader.close()

    def __enter__(self) -> ParquetFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_reader(self, epoch: int) -> ShardReader:
        # Here and not above: who plans or describes an epoch without reading it needs no Petastorm.
        from sparkdl.data.petastorm.reader import ShardReader

        shards = plan_shards(
            self._dataset.row_counts, self._world_size, seed=self._seed, epoch=epoch, shuffle=self._shuffle
        )
        return ShardReader(
            self._dataset,
            self._layout,
            shards[self._rank],
            num_threads=self._num_threads,
            timeout_s=self._read_timeout_s,
        )
