"""Divides the unread rows of an epoch among the ranks.

:mod:`~sparkdl.data.feed.shards` divides the rows of row groups among ranks; this module applies that to an epoch that
may have been interrupted. An epoch begins with all rows divided among the ranks. If it continues with another number
of ranks, the unread rows are divided again; each such part of an epoch is a *stretch*. The plan is computed from row
counts only, so that every rank computes the same plan without communication and without reading a row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from sparkdl.data.dataset.row_choice import random_bits
from sparkdl.data.feed.batches import Indices, ShuffleOrder, remaining_positions
from sparkdl.data.feed.shards import divide_rows, split_evenly

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Rows: TypeAlias = range | Indices
"""Numbers of rows inside a row group, ascending."""

RowGroupPart: TypeAlias = tuple[int, Rows]
"""Position of a row group in ``ParquetDataset.row_groups``, and rows of this row group."""

Taken: TypeAlias = int | tuple[int, ...]
"""Number of rows that each rank has had: one number for all ranks, or one per rank."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A part of an epoch that one group of ranks processed together.

    Attributes:
        world_size: number of ranks.
        buffer_rows: number of rows in the shuffle buffer of a rank; 0 without shuffling.
        num_taken: number of rows that each rank has had of its shard, all of them if it has fewer; or one number per
            rank.
    """

    world_size: int
    buffer_rows: int
    num_taken: Taken


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The part of an epoch that a feed yields: the rows that earlier stretches left, divided among ranks.

    Attributes:
        row_counts: number of rows of every row group, including rows that have been read.
        world_size: number of ranks among which the rows are divided.
        seed: any integer.
        epoch: number of the epoch, from 0.
        shuffle: whether row groups, and then rows, are shuffled.
        stretches: stretches of the epoch before this plan.
        left: unread rows by row group, for the row groups that were read in part.
        num_taken: number of rows that each rank has already had of its shard.
    """

    row_counts: Sequence[int]
    world_size: int
    seed: int
    epoch: int
    shuffle: bool
    stretches: tuple[Stretch, ...] = ()
    left: Mapping[int, Indices] = field(default_factory=dict)
    num_taken: Taken = 0

    def rows_of_ranks(self) -> list[int]:
        """Return how many rows each rank has; they differ by at most one."""
        return split_evenly(sum(self._counts_left()), self.world_size)

    def rows_to_come(self) -> list[int]:
        """Return how many rows each rank still gets."""
        shards = enumerate(self.rows_of_ranks())
        return [max(rows - taken_by(rank, self.num_taken), 0) for rank, rows in shards]

    def taken_after(self, given: Taken) -> Taken:
        """Return how many rows each rank has had of its shard after so many more, or after all that are left."""
        if isinstance(given, int) and isinstance(self.num_taken, int):
            return self.num_taken + given
        return tuple(
            min(taken_by(rank, self.num_taken) + taken_by(rank, given), rows)
            for rank, rows in enumerate(self.rows_of_ranks())
        )

    def shards(self) -> list[list[RowGroupPart]]:
        """Return the rows of every rank in the order in which it reads them."""
        shards = divide_rows(
            self._counts_left(), self.world_size, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle
        )
        return [
            [
                (row_group, self.left[row_group][rows.start : rows.stop] if row_group in self.left else rows)
                for row_group, rows in shard
            ]
            for shard in shards
        ]

    def order(self, rank: int, num_rows: int, buffer_rows: int) -> ShuffleOrder:
        """Return the order in which a rank's shard of ``num_rows`` rows leaves its shuffle buffer."""
        key = (self.seed, self.epoch, rank, *([len(self.stretches)] if self.stretches else []))
        return ShuffleOrder(num_rows, buffer_rows, random_bits(*key))

    def unread(
        self, rank: int, shard: Sequence[RowGroupPart], *, buffer_rows: int, num_taken: int
    ) -> list[RowGroupPart]:
        """Return the rows that a rank still has to read of its shard after it has had ``num_taken`` of them."""
        num_rows = sum(len(rows) for _, rows in shard)
        num_taken = min(num_taken, num_rows)
        if not num_taken:
            return list(shard)
        scattered, rest = np.empty(0, np.int64), num_taken
        if self.shuffle:
            scattered, rest = remaining_positions(self.order(rank, num_rows, buffer_rows), num_taken)
        return _at_positions(shard, scattered, rest)

    def after(self, taken: Stretch, world_size: int) -> EpochPlan:
        """Return the plan that divides the rows left by a stretch of this plan among ``world_size`` ranks."""
        assert taken.world_size == self.world_size, "a stretch is of the plan that its ranks followed"
        rows_left: defaultdict[int, list[Rows]] = defaultdict(list)
        for rank, shard in enumerate(self.shards()):
            num_taken = taken_by(rank, taken.num_taken)
            unread = self.unread(rank, shard, buffer_rows=taken.buffer_rows, num_taken=num_taken)
            for row_group, rows in unread:
                rows_left[row_group].append(rows)
        nothing = np.empty(0, np.int64)
        left = {
            row_group: np.sort(np.concatenate([nothing, *map(as_indices, rows_left[row_group])]))
            for row_group, count in enumerate(self.row_counts)
            if sum(map(len, rows_left[row_group])) < count
        }
        return replace(self, world_size=world_size, stretches=(*self.stretches, taken), left=left)

    def _counts_left(self) -> list[int]:
        counts = list(self.row_counts)
        for row_group, rows in self.left.items():
            counts[row_group] = len(rows)
        return counts


def taken_by(rank: int, taken: Taken) -> int:
    """Return how many rows a rank has had."""
    return taken if isinstance(taken, int) else taken[rank]


def as_indices(rows: Rows) -> Indices:
    """Return numbers of rows as an array."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def _at_positions(shard: Sequence[RowGroupPart], scattered: Indices, rest: int) -> list[RowGroupPart]:
    """Return the rows of a shard at the positions ``scattered``, and all rows from position ``rest`` on."""
    parts: list[RowGroupPart] = []
    start = 0
    for row_group, rows in shard:
        stop = start + len(rows)
        if start >= rest:
            parts.append((row_group, rows))
        else:
            low, high = np.searchsorted(scattered, [start, stop])
            wanted = scattered[low:high] - start
            after = rows[max(rest - start, 0) :]
            if not len(wanted):
                kept: Rows = after
            else:
                kept = np.concatenate([as_indices(rows)[wanted], as_indices(after)])
            if len(kept):
                parts.append((row_group, kept))
        start = stop
    return parts
