"""A feed that keeps the rows of each step when training continues on another number of ranks.

The order of the rows, and which of them form a step, depend on the number of ranks. Training that continues on another
number of ranks therefore keeps the plan of the ranks that it began with: the batches that these *planned ranks* have in
a step are concatenated and cut into equal parts for the actual ranks.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.data.checks import check_counts, check_rank
from sparkdl.data.feed.feed import ParquetFeed
from sparkdl.data.feed.row_stream import Batch, join_batches, num_rows, slice_batch
from sparkdl.data.files.threads import READ_AHEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from types import TracebackType

    from sparkdl.data.feed.sources import Source


@dataclass(frozen=True)
class BatchPart:
    """The part of each batch of a planned rank that a rank takes.

    Attributes:
        planned_rank: planned rank of the batch.
        start: start of the part, in units of ``1 / of`` of the batch.
        stop: end of the part, in the same unit.
        of: number of units in the batch.
    """

    planned_rank: int
    start: int
    stop: int
    of: int

    def rows(self, num_rows: int) -> range:
        """Return the rows of the part in a batch of ``num_rows``; all parts of a batch together are all of its rows."""
        return range(num_rows * self.start // self.of, num_rows * self.stop // self.of)


def parts_of_rank(rank: int, world_size: int, planned_ranks: int) -> list[BatchPart]:
    """Return the parts that a rank takes of the planned ranks' batches, which are shared equally and in order."""
    # Each of planned_ranks batches has world_size units, and each of world_size ranks takes planned_ranks units.
    first, last = rank * planned_ranks, (rank + 1) * planned_ranks
    return [
        BatchPart(
            planned,
            max(first - planned * world_size, 0),
            min(last - planned * world_size, world_size),
            world_size,
        )
        for planned in range(first // world_size, -(-last // world_size))
    ]


class PlannedFeed:
    """Batches of one rank, from rows that are planned for another number of ranks, or for the same number.

    In each step, all ranks together have the rows that ``planned_ranks`` feeds with ``batch_size`` have. With fewer
    ranks than planned, batches are larger in proportion; with more, they are smaller, and some have no rows if a step
    has fewer rows than there are ranks. On the planned number of ranks, batches are those of a :class:`ParquetFeed`.

    A rank reads all rows of the planned ranks of whose batches it takes a part. It has a shuffle buffer of the planned
    size for each of them, and divides its threads and ``read_ahead_bytes`` among them.

    Args:
        source: data to read, as for :class:`ParquetFeed`.
        rank: rank of this process.
        world_size: number of ranks.
        planned_ranks: number of ranks for which the rows are planned.
        num_threads: number of threads that read row groups, for all planned ranks together; at least one for each.
        read_ahead_bytes: upper bound as for :class:`ParquetFeed`, for all planned ranks together.
        options: other arguments of :class:`ParquetFeed`, such as ``batch_size``, which is that of a planned rank.

    Raises:
        ParamError: if a number is out of range.
        SparkdlError: the errors of :class:`ParquetFeed`.
    """

    def __init__(
        self,
        source: Source,
        *,
        rank: int,
        world_size: int,
        planned_ranks: int,
        num_threads: int = 2,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        **options: Any,
    ) -> None:
        check_counts(
            least=1,
            world_size=world_size,
            planned_ranks=planned_ranks,
            num_threads=num_threads,
            read_ahead_bytes=read_ahead_bytes,
        )
        check_rank(rank, world_size)
        self._rank = int(rank)
        self._parts_of_ranks = [
            parts_of_rank(number, int(world_size), int(planned_ranks)) for number in range(world_size)
        ]
        parts = self._parts_of_ranks[rank]
        first = ParquetFeed(
            source,
            rank=parts[0].planned_rank,
            world_size=planned_ranks,
            num_threads=max(1, num_threads // len(parts)),
            read_ahead_bytes=max(1, read_ahead_bytes // len(parts)),
            **options,
        )
        self._feeds = [first, *(first.twin(part.planned_rank) for part in parts[1:])]

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of every whole epoch, the same on all ranks."""
        return self._feeds[0].steps_per_epoch

    def steps_in(self, epoch: int) -> int:
        """Return how many batches :meth:`epoch` yields: fewer than ``steps_per_epoch`` if the epoch was resumed."""
        return self._feeds[0].steps_in(epoch)

    def rows_in_step(self, step: int, epoch: int | None = None) -> list[int]:
        """Return how many rows each rank has in a step.

        Args:
            step: number of the step, from 0, among those of :meth:`epoch`.
            epoch: number of the epoch; None for a whole epoch.
        """
        planned = self._feeds[0].rows_in_step(step, epoch)
        return [
            sum(len(part.rows(planned[part.planned_rank])) for part in parts)
            for parts in self._parts_of_ranks
        ]

    def epoch(self, epoch: int) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch, or the rest of a resumed one, as :meth:`ParquetFeed.epoch` does.

        Raises:
            DataError: as :meth:`ParquetFeed.epoch` raises.
        """
        parts = self._parts_of_ranks[self._rank]
        with ExitStack() as stack:
            streams = [stack.enter_context(closing(feed.epoch(epoch))) for feed in self._feeds]
            for batches in zip(*streams, strict=True):
                yield join_batches(
                    [_part_of(batch, part) for batch, part in zip(batches, parts, strict=True)]
                )

    def batch_before(self, epoch: int, step: int) -> tuple[int, Batch]:
        """Return the last step before ``step`` in which this rank had rows, and the batch of this rank in that step.

        If there is none, because steps have fewer rows than there are ranks, these are step 0 and the batch of a
        planned rank, with rows of other ranks.

        Args:
            epoch: number of the epoch, from 0.
            step: number of the step, from 0, of the whole epoch.
        """
        before = min(step, self.steps_per_epoch) - 1
        while before >= 0 and not self.rows_in_step(before)[self._rank]:
            before -= 1
        earlier = copy(self)
        earlier._feeds = [feed.twin() for feed in self._feeds]
        source = earlier if before >= 0 else earlier._feeds[0]  # a planned rank has rows in its first step
        for feed in earlier._feeds:
            feed.seek(epoch, max(before, 0))
        with closing(source.epoch(epoch)) as batches:
            return max(before, 0), next(batches)

    def state(self, given: int | None = None, epoch: int | None = None) -> dict[str, Any]:
        """Return the position of the planned ranks, for :meth:`resume` on any number of ranks; the same on every rank.

        Args:
            given: number of batches that count as used, as for :meth:`ParquetFeed.state`.
            epoch: number of the epoch of these batches, as for :meth:`ParquetFeed.state`.
        """
        return self._feeds[0].state(given, epoch)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of ranks with the same plan; each step has the rows that it would have had there.

        If the plan or the shuffle buffers differ, the unread rows are divided again.

        Raises:
            ParamError: if it is not a state of a feed.
            DataError: as :meth:`ParquetFeed.resume` raises.
        """
        for feed in self._feeds:
            feed.resume(state)

    def close(self) -> None:
        """Stop all threads, as :meth:`ParquetFeed.close` does."""
        self._feeds[0].close()  # the other feeds share its reader

    def __enter__(self) -> PlannedFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _part_of(batch: Batch, part: BatchPart) -> Batch:
    rows = part.rows(num_rows(batch))
    return batch if len(rows) == num_rows(batch) else slice_batch(batch, rows.start, rows.stop)
