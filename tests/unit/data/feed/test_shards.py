from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data.feed.shards import (
    divide_rows,
    rows_per_rank,
    split_evenly,
    steps_per_epoch,
)
from sparkdl.errors import DataError, ShardingError

layouts = st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(lambda counts: sum(counts) > 0)
seeds = st.integers(-(2**63), 2**63 - 1)


@st.composite
def layouts_and_worlds(draw: st.DrawFn) -> tuple[list[int], int]:
    row_counts = draw(layouts)
    return row_counts, draw(st.integers(1, min(16, sum(row_counts))))


@given(case=layouts_and_worlds(), seed=seeds, epoch=st.integers(0, 1000), shuffle=st.booleans())
def test_every_row_belongs_to_exactly_one_rank(
    case: tuple[list[int], int], seed: int, epoch: int, shuffle: bool
) -> None:
    row_counts, world_size = case
    shards = divide_rows(row_counts, world_size, seed=seed, epoch=epoch, shuffle=shuffle)
    rows = [(row_group, row) for shard in shards for row_group, rows in shard for row in rows]
    assert sorted(rows) == [(group, row) for group, count in enumerate(row_counts) for row in range(count)]


@given(row_counts=layouts, world_size=st.integers(1, 16), seed=seeds, epoch=st.integers(0, 1000))
def test_shards_differ_by_at_most_one_row_and_none_has_empty_ranges(
    row_counts: list[int], world_size: int, seed: int, epoch: int
) -> None:
    shards = divide_rows(row_counts, world_size, seed=seed, epoch=epoch, shuffle=True)
    sizes = [sum(len(rows) for _, rows in shard) for shard in shards]
    assert len(shards) == world_size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == split_evenly(sum(row_counts), world_size)
    assert all(len(rows) > 0 for shard in shards for _, rows in shard)


@given(case=layouts_and_worlds(), batch_size=st.integers(1, 20))
def test_steps_hold_every_row_and_only_the_last_one_is_smaller(
    case: tuple[list[int], int], batch_size: int
) -> None:
    row_counts, world_size = case
    num_rows = sum(row_counts)
    steps = steps_per_epoch(num_rows, world_size, batch_size)
    shards = rows_per_rank(num_rows, world_size)
    assert sum(shards) == num_rows
    assert (steps - 1) * batch_size < max(shards) <= steps * batch_size
    assert min(shards) >= (steps - 1) * batch_size


def test_order_changes_with_the_seed_and_with_the_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [
            row_group for row_group, _ in divide_rows([1] * 50, 1, seed=seed, epoch=epoch, shuffle=True)[0]
        ]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_order_of_row_groups_stays_the_same_in_every_release() -> None:
    shard = divide_rows([1] * 8, 1, seed=7, epoch=2, shuffle=True)[0]
    assert [row_group for row_group, _ in shard] == [6, 4, 0, 5, 7, 1, 3, 2]


def test_row_group_on_a_border_is_sliced() -> None:
    assert divide_rows([10], 3, seed=0, epoch=0, shuffle=False) == [
        [(0, range(3))],
        [(0, range(3, 6))],
        [(0, range(6, 10))],
    ]


def test_ranks_share_one_order_of_row_groups_whatever_their_number() -> None:
    def order(world_size: int) -> list[int]:
        shards = divide_rows([4, 3, 6, 1, 2], world_size, seed=1, epoch=5, shuffle=True)
        return list(dict.fromkeys(row_group for shard in shards for row_group, _ in shard))

    assert order(1) == order(2) == order(16)


def test_fewer_rows_than_ranks_is_an_error_that_says_how_many_ranks_can_work() -> None:
    with pytest.raises(ShardingError, match=r"3 rows .* 4 ranks.*Lower .* \(.*\) to 3\."):
        rows_per_rank(3, 4)
    with pytest.raises(DataError, match="0 rows"):
        rows_per_rank(0, 1)
