"""The feed of a *rank* that joins the same rows in each step as the ranks did for which the rows were planned.

The order of the rows and which of them come together follow from the number of ranks. A training that continues with
other ranks therefore keeps the plan of those that it began with: the batches that these *planned ranks* have in a step,
put one behind another, are cut into equal parts for the ranks that are there.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sparkdl.data.checks import check_counts
from sparkdl.data.feed.feed import ParquetFeed
from sparkdl.data.files.threads import READ_AHEAD_BYTES
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from types import TracebackType

    from sparkdl.data.feed.sources import Source

Batch: TypeAlias = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Part:
    """What a rank takes of each batch of a planned rank.

    Attributes:
        planned_rank: whose batch it is.
        start: where the part begins, in parts of the batch.
        stop: where it ends.
        of: so many parts are all of the batch.
    """

    planned_rank: int
    start: int
    stop: int
    of: int

    def rows(self, num_rows: int) -> range:
        """Return the rows that are taken of a batch of so many; all parts of it together are all of its rows."""
        return range(num_rows * self.start // self.of, num_rows * self.stop // self.of)


def parts_of_rank(rank: int, world_size: int, planned_ranks: int) -> list[Part]:
    """Return what a rank takes of the planned ranks' batches, which are shared equally and in their order."""
    # Each of planned_ranks batches has world_size parts, of which each of world_size ranks takes planned_ranks.
    first, last = rank * planned_ranks, (rank + 1) * planned_ranks
    return [
        Part(
            planned,
            max(first - planned * world_size, 0),
            min(last - planned * world_size, world_size),
            world_size,
        )
        for planned in range(first // world_size, -(-last // world_size))
    ]


class PlannedFeed:
    """Batches of one rank, of rows that are planned for another number of ranks, or for as many.

    All ranks together have in each step the rows that ``planned_ranks`` feeds of ``batch_size`` have. With fewer ranks
    than planned, a batch is so many times larger; with more, it is smaller, and without rows where a step has fewer
    rows than there are ranks. On as many ranks it gives what a :class:`ParquetFeed` gives.

    A rank reads all rows of the planned ranks whose batches it has a part of. It has a shuffle buffer for each of
    them, as it was planned, and shares threads and ``read_ahead_bytes`` among them.

    Args:
        source: as of a :class:`ParquetFeed`.
        rank: this rank.
        world_size: number of ranks.
        planned_ranks: number of ranks that the rows are planned for.
        num_threads: threads that read row groups, of all planned ranks together; one each at least.
        read_ahead_bytes: as of a :class:`ParquetFeed`, for all planned ranks together.
        options: what else a :class:`ParquetFeed` takes: ``batch_size``, which is that of a planned rank, and so on.

    Raises:
        ParamError: if a number is out of range.
        SparkdlError: whatever a :class:`ParquetFeed` raises.
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
        check_counts(least=0, rank=rank)
        if rank >= world_size:
            raise ParamError(f"rank must be in [0, {world_size}), got {rank}.")
        self._rank = int(rank)
        self._parts_of_ranks = [
            parts_of_rank(each, int(world_size), int(planned_ranks)) for each in range(world_size)
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
        """Batches of every whole epoch, the same number on all ranks."""
        return self._feeds[0].steps_per_epoch

    def steps_in(self, epoch: int) -> int:
        """Return how many batches :meth:`epoch` gives: fewer than ``steps_per_epoch`` where it was resumed."""
        return self._feeds[0].steps_in(epoch)

    def rows_in_step(self, step: int, epoch: int | None = None) -> list[int]:
        """Return how many rows each rank has in a step.

        Args:
            step: number of the step, from 0, among those that :meth:`epoch` gives.
            epoch: number of the epoch; by default a whole one.
        """
        planned = self._feeds[0].rows_in_step(step, epoch)
        return [
            sum(len(part.rows(planned[part.planned_rank])) for part in parts)
            for parts in self._parts_of_ranks
        ]

    def epoch(self, epoch: int) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch, or what is left of it, as :meth:`ParquetFeed.epoch` does.

        Raises:
            DataError: as there.
        """
        parts = self._parts_of_ranks[self._rank]
        with ExitStack() as stack:
            streams = [stack.enter_context(closing(feed.epoch(epoch))) for feed in self._feeds]
            for batches in zip(*streams, strict=True):
                yield _joined([_part_of(batch, part) for batch, part in zip(batches, parts, strict=True)])

    def batch_before(self, epoch: int, step: int) -> tuple[int, Batch]:
        """Return a step, from 0, and the batch with rows that this rank had in it, the last before a step of an epoch.

        Where there was none, as steps have fewer rows than there are ranks, it is one of other ranks' rows.

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
        """Return where the planned ranks stand, for :meth:`resume` on any number of ranks; the same on each of them.

        Args:
            given: as of :meth:`ParquetFeed.state`.
            epoch: likewise.
        """
        return self._feeds[0].state(given, epoch)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue where other ranks stood that had the same plan, with the rows that would have come in each step.

        After ranks with another plan, or other buffers, the unread rows are divided again.

        Raises:
            ParamError: if it is no state of a feed.
            DataError: as :meth:`ParquetFeed.resume` raises.
        """
        for feed in self._feeds:
            feed.resume(state)

    def close(self) -> None:
        """End all threads, as :meth:`ParquetFeed.close` does."""
        self._feeds[0].close()  # the others read through it

    def __enter__(self) -> PlannedFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _part_of(batch: Batch, part: Part) -> Batch:
    num_rows = len(next(iter(batch.values())))
    rows = part.rows(num_rows)
    if len(rows) == num_rows:
        return batch
    return {name: values[rows.start : rows.stop] for name, values in batch.items()}


def _joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
