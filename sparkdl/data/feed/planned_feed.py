"""A feed that keeps the rows of each step when training continues on another number of ranks.

The order of the rows, and which of them form a step, depend on the number of ranks. Training that continues on another
number of ranks therefore keeps the plan of the ranks that it began with: the batches that these *planned ranks* have in
a step are concatenated and cut into parts for the actual ranks. The parts are equal, or follow the *shares* of the
ranks, which may change from one step to the next.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkdl.checks import check_counts, check_rank
from sparkdl.closing import Closing
from sparkdl.data.feed.feed import ParquetFeed
from sparkdl.data.files.threads import READ_AHEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from sparkdl.data.feed.sources import Source

Batch = dict[str, npt.NDArray[Any]]
"""Arrays of rows by column name; all arrays have the same number of rows."""


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


def parts_of_ranks(shares: Sequence[int], planned_ranks: int) -> list[list[BatchPart]]:
    """Return the parts that each rank takes of the planned ranks' batches, in order and in proportion to its share."""
    # Each of planned_ranks batches has as many units as there are shares, so that every border falls on a unit.
    units = sum(shares)
    return [
        [
            BatchPart(planned, max(first - planned * units, 0), min(last - planned * units, units), units)
            for planned in range(first // units, -(-last // units))
        ]
        for first, last in pairwise(planned_ranks * share for share in accumulate(shares, initial=0))
    ]


@dataclass(frozen=True)
class _Assignment:
    """The parts of all ranks from a step on.

    Attributes:
        start: epoch and step, from 0; a step that the epoch does not have stands for the first one of the next epoch.
        parts_of_ranks: parts that each rank takes of the planned ranks' batches.
    """

    start: tuple[int, int]
    parts_of_ranks: list[list[BatchPart]]


@dataclass
class _Stream:
    """The batches of a planned rank from a step on, and the exit stack that ends their reading."""

    start: int
    batches: Iterator[Batch]
    resources: ExitStack


def _join_parts(parts: Sequence[BatchPart], streams: Mapping[int, _Stream]) -> Batch:
    """Read a batch of the stream of each part's planned rank, and join the parts."""
    batches = []
    for part in parts:
        batch = next(streams[part.planned_rank].batches)
        rows = part.rows(num_rows(batch))
        batches.append(slice_batch(batch, rows.start, rows.stop))
    return join_batches(batches)


class PlannedFeed(Closing):
    """Batches of one rank, from rows that are planned for another number of ranks, or for the same number.

    In each step, all ranks together have the rows that ``planned_ranks`` feeds with ``batch_size`` have. With fewer
    ranks than planned, batches are larger in proportion; with more, they are smaller, and some have no rows if a step
    has fewer rows than there are ranks. On the planned number of ranks, batches are those of a :class:`ParquetFeed`.
    :meth:`divide` gives the ranks unequal parts.

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

    Attributes:
        steps_per_epoch: number of batches of every whole epoch, the same on all ranks.

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
        self._rank, self._planned_ranks = int(rank), int(planned_ranks)
        parts = parts_of_ranks([1] * int(world_size), self._planned_ranks)
        self._assignments: tuple[_Assignment, ...] = (_Assignment((0, 0), parts),)
        self._feed = ParquetFeed(
            source,
            rank=parts[self._rank][0].planned_rank,
            world_size=planned_ranks,
            num_threads=num_threads,
            read_ahead_bytes=read_ahead_bytes,
            **options,
        )
        self.steps_per_epoch = self._feed.steps_per_epoch
        self._next = (0, 0)
        """Epoch and step of the next batch."""

    def steps_in(self, epoch: int) -> int:
        """Return how many batches :meth:`epoch` yields: fewer than ``steps_per_epoch`` if the epoch was resumed."""
        return self._feed.steps_in(epoch)

    def rows_in_step(self, step: int, epoch: int | None = None) -> list[int]:
        """Return how many rows each rank has in a step.

        Args:
            step: number of the step, from 0, among those of :meth:`epoch`.
            epoch: number of the epoch; None for a whole epoch.
        """
        planned = self._feed.rows_in_step(step, epoch)
        assignment = self._assignments[-1] if epoch is None else self._assignment_at(epoch, step)
        return [
            sum(len(part.rows(planned[part.planned_rank])) for part in parts)
            for parts in assignment.parts_of_ranks
        ]

    def divide(self, shares: Sequence[int], *, epoch: int, step: int) -> None:
        """Divide the rows of the steps from a later one on in proportion to shares of the ranks.

        All ranks have to call it with the same arguments before any of them takes the batch of that step. Rows of
        further planned ranks are read ahead from the next batch on.

        Args:
            shares: share of each rank, at least 1. If they add up to the rows of a full step, they are the rows of the
                ranks.
            epoch: number of the epoch, from 0.
            step: number of the step, from 0, among those of :meth:`epoch`; a number that the epoch does not have stands
                for the first step of the next epoch. If an earlier call has named a later step, it is that one.
        """
        start = max((epoch, step), self._assignments[-1].start)
        assert start >= self._next, f"the batch of {start} is taken, the next one is that of {self._next}"
        earlier = (assignment for assignment in self._assignments if assignment.start < start)
        self._assignments = (*earlier, _Assignment(start, parts_of_ranks(shares, self._planned_ranks)))

    def _assignment_at(self, epoch: int, step: int) -> _Assignment:
        return next(
            assignment for assignment in reversed(self._assignments) if assignment.start <= (epoch, step)
        )

    def epoch(self, epoch: int) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch, or the rest of a resumed one, as :meth:`ParquetFeed.epoch` does.

        Raises:
            DataError: as :meth:`ParquetFeed.epoch` raises.
        """
        self._next = epoch, 0
        streams: dict[int, _Stream] = {}
        assignments: tuple[_Assignment, ...] = ()
        with ExitStack() as resources:
            for step in range(self.steps_in(epoch)):
                assignment = self._assignment_at(epoch, step)
                if self._assignments is not assignments or assignment.start == (epoch, step):
                    assignments = self._assignments
                    self._change_streams(streams, resources, epoch, step)
                joined = [_join_parts(assignment.parts_of_ranks[self._rank], streams)]
                self._next = epoch, step + 1
                yield joined.pop()  # which keeps no batch here while the next one is made
        self._next = epoch + 1, 0

    def _change_streams(
        self, streams: dict[int, _Stream], resources: ExitStack, epoch: int, step: int
    ) -> None:
        """Open the streams that this rank needs in this step or a later one, and close those that it does not."""
        upcoming = (
            assignment
            for assignment in self._assignments
            if (epoch, step) < assignment.start < (epoch, self.steps_in(epoch))
        )
        starts: dict[int, int] = {}
        for assignment in (self._assignment_at(epoch, step), *upcoming):
            for part in assignment.parts_of_ranks[self._rank]:
                starts.setdefault(part.planned_rank, max(assignment.start, (epoch, step))[1])
        for planned, stream in list(streams.items()):
            # One that is needed again, but not now, would have to take the batches in between.
            if starts.get(planned) not in (step, stream.start):
                streams.pop(planned).resources.close()
        for planned, start in starts.items():
            if planned not in streams:
                feed = self._feed.twin(planned)
                feed.resume(self._feed.state(start, epoch))
                stack = resources.enter_context(ExitStack())
                batches = feed.start_epoch(epoch, stack, num_streams=len(starts))
                streams[planned] = _Stream(start, batches, stack)

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
        earlier._feed = self._feed.twin()
        earlier._feed.seek(epoch, max(before, 0))
        earlier._assignments = (_Assignment((0, 0), self._assignments[-1].parts_of_ranks),)
        source = earlier if before >= 0 else earlier._feed  # a planned rank has rows in its first step
        with closing(source.epoch(epoch)) as batches:
            return max(before, 0), next(batches)

    def state(self, given: int | None = None, epoch: int | None = None) -> dict[str, Any]:
        """Return the position of the planned ranks, for :meth:`resume` on any number of ranks; the same on every rank.

        Args:
            given: number of batches that count as used, as for :meth:`ParquetFeed.state`.
            epoch: number of the epoch of these batches, as for :meth:`ParquetFeed.state`.
        """
        in_epoch, taken = self._next
        return self._feed.state(taken if given is None else given, in_epoch if epoch is None else epoch)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of ranks with the same plan; each step has the rows that it would have had there.

        If the plan or the shuffle buffers differ, the unread rows are divided again.

        Raises:
            ParamError: if it is not a state of a feed.
            DataError: as :meth:`ParquetFeed.resume` raises.
        """
        self._feed.resume(state)
        self._next = int(state["epoch"]), 0

    def close(self) -> None:
        """Stop all threads, as :meth:`ParquetFeed.close` does."""
        self._feed.close()  # all streams have its reader


def num_rows(batch: Batch) -> int:
    """Return how many rows a batch has."""
    return next((len(array) for array in batch.values()), 0)


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Return rows ``[start, stop)`` of a batch as views."""
    return {name: array[start:stop] for name, array in batch.items()}


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return the rows of several batches as one batch; a single batch is returned unchanged."""
    if len(batches) == 1:
        return batches[0]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
