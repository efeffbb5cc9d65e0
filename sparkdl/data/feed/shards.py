"""Divides row groups among the ranks for a whole epoch, and computes the number of steps.

:mod:`~sparkdl.data.feed.epoch_plan` divides the rest of an interrupted epoch with the functions of this module.
They are pure functions of row counts, with the same result on the *driver* and on every *rank*, so that no shard has to
be sent to a rank. Every row belongs to exactly one rank in every epoch, shards differ by at most one row, and all ranks
take the same number of steps, because a rank that stopped early would leave the others waiting in an allreduce for
ever.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.data.dataset.row_choice import random_bits
from sparkdl.errors import ShardingError, count_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def divide_rows(
    row_counts: Sequence[int], world_size: int, *, seed: int, epoch: int, shuffle: bool
) -> list[list[tuple[int, range]]]:
    """Divide the rows of all row groups among the ranks for one epoch.

    The row groups are put in an order that depends only on (seed, epoch). Of the N rows in that order, rank r of W
    reads ``[r * N // W, (r + 1) * N // W)``; a row group on a border is sliced and read by both neighbours.

    Args:
        row_counts: number of rows of every row group.
        world_size: number of ranks.
        seed: any integer.
        epoch: number of the epoch, from 0.
        shuffle: whether to shuffle the row groups; otherwise they stay in their order.

    Returns:
        The row groups of every rank by their numbers, and the rows of each, in reading order; some ranks have none if
        there are fewer rows than ranks.
    """
    num_rows = sum(row_counts)
    order: Sequence[int] = range(len(row_counts))
    if shuffle:
        # Raw bits, because NumPy guarantees the same ones in every version, but not the same Generator.permutation.
        order = np.argsort(random_bits(seed, epoch).random_raw(len(row_counts)), kind="stable").tolist()
    shards: list[list[tuple[int, range]]] = [[] for _ in range(world_size)]
    rank, end_of_rank, position = 0, num_rows // world_size, 0
    for row_group in order:
        start, count = 0, row_counts[row_group]
        while start < count:
            while position == end_of_rank:
                rank += 1
                end_of_rank = (rank + 1) * num_rows // world_size
            stop = min(count, start + end_of_rank - position)
            shards[rank].append((row_group, range(start, stop)))
            position += stop - start
            start = stop
    return shards


def rows_per_rank(num_rows: int, world_size: int) -> list[int]:
    """Return how many rows each rank reads per epoch; they differ by at most one.

    Raises:
        ShardingError: if there are fewer rows than ranks.
    """
    if num_rows < world_size:
        remedy = (
            f"Lower the number of ranks (numWorkers of an estimator, world_size of a feed) to {num_rows}."
            if num_rows
            else "Train on data that has rows."
        )
        raise ShardingError(
            f"{count_of(num_rows, 'row')} cannot be shared by {world_size} ranks: each rank needs at least "
            f"one. {remedy}"
        )
    return split_evenly(num_rows, world_size)


def split_evenly(num_rows: int, world_size: int) -> list[int]:
    """Return how many of ``num_rows`` rows each rank gets; some ranks get none if there are fewer rows than ranks."""
    borders = [rank * num_rows // world_size for rank in range(world_size + 1)]
    return [stop - start for start, stop in itertools.pairwise(borders)]


def steps_per_epoch(num_rows: int, world_size: int, batch_size: int) -> int:
    """Return the number of steps that every rank takes in an epoch, which is that of the largest shard.

    Raises:
        ShardingError: if there are fewer rows than ranks.
    """
    return -(-max(rows_per_rank(num_rows, world_size)) // batch_size)
