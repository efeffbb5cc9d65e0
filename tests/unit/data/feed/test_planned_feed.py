"""Feeds planned for another number of ranks: each step has the rows of the plan."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data import ParquetDataset, ParquetFeed, PlannedFeed, RowFilter
from sparkdl.data.feed.planned_feed import parts_of_ranks
from sparkdl.errors import ParamError
from tests.unit.data.feed.test_resume import buffers, dataset_of, layouts, take_steps

if TYPE_CHECKING:
    from collections.abc import Callable


@settings(max_examples=30, deadline=None)
@given(
    row_counts=layouts,
    planned_ranks=st.integers(1, 6),
    batch_size=st.integers(1, 9),
    buffer_rows=buffers,
    shuffle=st.booleans(),
    groups=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 4)), max_size=3),
)
def test_step_has_the_rows_of_the_planned_ranks_after_any_changes_of_ranks(
    row_counts: list[int],
    planned_ranks: int,
    batch_size: int,
    buffer_rows: int,
    shuffle: bool,
    groups: list[tuple[int, int]],
) -> None:
    options = {"batch_size": batch_size, "shuffle_buffer_rows": buffer_rows, "shuffle": shuffle, "seed": 3}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        dataset = dataset_of(Path(folder), row_counts)
        feeds = [
            stack.enter_context(ParquetFeed(dataset, rank=rank, world_size=planned_ranks, **options))
            for rank in range(planned_ranks)
        ]
        expected = [
            np.concatenate([batch["id"] for batch in batches])
            for batches in zip(*(feed.epoch(0) for feed in feeds), strict=True)
        ]
        seen, state = [], None
        for world_size, steps in [*groups, (1 + sum(row_counts) % 5, None)]:
            planned = [
                PlannedFeed(dataset, rank=rank, world_size=world_size, planned_ranks=planned_ranks, **options)
                for rank in range(world_size)
            ]
            taken, state = take_steps(planned, state, steps)
            seen += zip(*taken, strict=True)
        assert state["epoch"] == 1
        assert len(seen) == len(expected)
        for ranks, rows in zip(seen, expected, strict=True):
            np.testing.assert_array_equal(np.concatenate(ranks), rows)


@settings(deadline=None)
@given(
    shares=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    planned_ranks=st.integers(1, 12),
    rows=st.lists(st.integers(0, 40), min_size=12),
)
def test_rows_of_a_planned_batch_are_divided_by_shares_and_without_overlap(
    shares: list[int], planned_ranks: int, rows: list[int]
) -> None:
    parts = parts_of_ranks(shares, planned_ranks)
    taken = [
        (part.planned_rank, row)
        for of_rank in parts
        for part in of_rank
        for row in part.rows(rows[part.planned_rank])
    ]
    assert taken == [(planned, row) for planned in range(planned_ranks) for row in range(rows[planned])]
    for share, of_rank in zip(shares, parts, strict=True):
        of_full_batches = sum(len(part.rows(1200)) for part in of_rank)
        assert of_full_batches == pytest.approx(1200 * planned_ranks * share / sum(shares), abs=2)


@given(planned_ranks=st.integers(1, 5), batch_size=st.integers(1, 9), data=st.data())
def test_shares_that_add_up_to_the_rows_of_a_step_are_the_rows_of_the_ranks(
    planned_ranks: int, batch_size: int, data: st.DataObject
) -> None:
    borders = data.draw(st.sets(st.integers(1, planned_ranks * batch_size)))
    shares = np.diff(sorted({0, planned_ranks * batch_size, *borders})).tolist()
    parts = parts_of_ranks(shares, planned_ranks)
    assert [sum(len(part.rows(batch_size)) for part in of_rank) for of_rank in parts] == shares


@settings(max_examples=40, deadline=None)
@given(
    row_counts=layouts,
    planned_ranks=st.integers(1, 5),
    batch_size=st.integers(1, 6),
    buffer_rows=buffers,
    resumed_after=st.integers(0, 4),
    changes=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 6), st.lists(st.integers(1, 9), min_size=3, max_size=3)),
        max_size=4,
    ),
)
def test_step_has_the_rows_of_the_planned_ranks_whenever_the_shares_change(
    row_counts: list[int],
    planned_ranks: int,
    batch_size: int,
    buffer_rows: int,
    resumed_after: int,
    changes: list[tuple[int, int, list[int]]],
) -> None:
    """The ranks have two epochs, the first one maybe resumed; each change is announced some steps ahead."""
    options = {"batch_size": batch_size, "shuffle_buffer_rows": buffer_rows, "planned_ranks": planned_ranks}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        dataset = dataset_of(Path(folder), row_counts)
        alone, *feeds = [
            stack.enter_context(PlannedFeed(dataset, rank=rank, world_size=world_size, **options))
            for rank, world_size in [(0, 1), (0, 3), (1, 3), (2, 3)]
        ]
        state = alone.state(min(resumed_after, alone.steps_per_epoch), 0)
        done = 0
        for feed in (alone, *feeds):
            feed.resume(state)
        for epoch in (state["epoch"], state["epoch"] + 1):
            taken = zip(alone.epoch(epoch), *(feed.epoch(epoch) for feed in feeds), strict=True)
            for step, (expected, *batches) in enumerate(taken):
                np.testing.assert_array_equal(
                    np.concatenate([batch["id"] for batch in batches]), expected["id"]
                )
                for feed in feeds:
                    assert feed.rows_in_step(step, epoch) == [len(batch["id"]) for batch in batches]
                for _, ahead, shares in (change for change in changes if change[0] == done):
                    for feed in feeds:
                        feed.divide(shares, epoch=epoch, step=step + 1 + ahead)
                done += 1
            assert {feed.state()["epoch"] for feed in feeds} == {epoch + 1}


def test_rows_follow_the_shares_and_other_planned_ranks_are_no_longer_read(
    write_dataset: Callable[..., ParquetDataset],
) -> None:
    options: dict[str, Any] = {"world_size": 2, "planned_ranks": 2, "batch_size": 6, "seed": 2}
    with PlannedFeed(write_dataset([[60]]), rank=1, **options) as feed:
        rows = []
        for step, batch in enumerate(feed.epoch(0)):
            rows.append((len(batch["id"]), len(feed._feed._reader._readers)))
            if step == 0:
                feed.divide([3, 9], epoch=0, step=2)
                feed.divide([8, 4], epoch=0, step=3)
                feed.divide([2, 2], epoch=0, step=1)  # not before the others
    # The first planned rank is read ahead before step 2; from step 3 on, the latest shares count.
    assert rows == [(6, 1), (6, 2), (9, 2), (6, 1), (6, 1)]


def test_planned_feed_on_the_planned_number_of_ranks_equals_a_plain_feed(
    write_dataset: Callable[..., ParquetDataset],
) -> None:
    options = {"rank": 1, "world_size": 2, "batch_size": 4, "shuffle_buffer_rows": 16}
    dataset = write_dataset([[7, 20, 3], [11]])
    with ParquetFeed(dataset, **options) as feed, PlannedFeed(dataset, planned_ranks=2, **options) as planned:
        assert planned.steps_per_epoch == feed.steps_per_epoch
        for epoch in range(2):
            for one, other in zip(feed.epoch(epoch), planned.epoch(epoch), strict=True):
                assert one.keys() == other.keys()
                for name, values in one.items():
                    np.testing.assert_array_equal(values, other[name])
            assert planned.state() == feed.state()


def test_planned_batches_join_and_filter_columns_of_every_kind_and_may_be_modified(
    write_dataset: Callable[..., ParquetDataset],
) -> None:
    dataset = write_dataset([[9, 9], [9, 9]])
    keep = RowFilter(["id"], lambda values: values["id"] % 3 != 0)
    options: dict[str, Any] = {"batch_size": 4, "row_filter": keep, "cache": "memory", "seed": 5}
    seen: list[int] = []
    with PlannedFeed(dataset, rank=0, world_size=1, planned_ranks=3, **options) as feed:
        for _ in range(2):
            for batch in feed.epoch(0):
                rows = batch["id"]
                np.testing.assert_array_equal(batch["twice"], 2 * rows)
                np.testing.assert_array_equal(batch["vector"][:, 2], 3 * rows)
                np.testing.assert_array_equal(batch["grid"][:, 1, 1], rows + 3)
                seen += rows.tolist()
                for values in batch.values():
                    values[...] = 0
    assert sorted(seen) == sorted(2 * [row for row in range(36) if row % 3])


def test_lists_of_differing_lengths_and_strings_are_joined(tmp_path: Path) -> None:
    table = pa.table(
        {"name": [str(row) for row in range(20)], "tokens": [[row] * (row % 4) for row in range(20)]}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=6)
    found = {}
    with PlannedFeed(
        str(tmp_path), shapes={"tokens": (None,)}, rank=0, world_size=1, planned_ranks=2, batch_size=3
    ) as feed:
        for batch in feed.epoch(0):
            found |= {
                name: tokens.tolist() for name, tokens in zip(batch["name"], batch["tokens"], strict=True)
            }
    assert found == {str(row): [row] * (row % 4) for row in range(20)}


def test_batch_before_a_step_is_the_last_one_with_rows_of_this_rank(
    write_dataset: Callable[..., ParquetDataset],
) -> None:
    dataset = write_dataset([[5, 4]])  # two planned ranks have 4 and 5 rows: 2 and 2, 2 and 2, 0 and 1
    options: dict[str, Any] = {"world_size": 3, "planned_ranks": 2, "seed": 1}
    with PlannedFeed(dataset, rank=0, batch_size=2, **options) as feed:
        assert [feed.rows_in_step(step) for step in range(3)] == [[1, 1, 2], [1, 1, 2], [0, 0, 1]]
        batches = [batch["id"].tolist() for batch in feed.epoch(1)]
        for step, before in [(1, 0), (2, 1), (3, 1)]:
            index, batch = feed.batch_before(1, step)
            assert (index, batch["id"].tolist()) == (before, batches[before])
        assert feed.state()["epoch"] == 2  # the position of the feed is unchanged
    with PlannedFeed(dataset, rank=0, batch_size=1, **options) as feed:
        assert all(not feed.rows_in_step(step)[0] for step in range(5))
        index, batch = feed.batch_before(0, 3)
        assert (index, len(batch["id"])) == (0, 1)


def test_numbers_out_of_range_are_refused(write_dataset: Callable[..., ParquetDataset]) -> None:
    dataset = write_dataset([[5]])
    for changes, said in [
        ({"rank": 2}, r"rank must be in \[0, 2\), got 2"),
        ({"planned_ranks": 0}, "planned_ranks must be at least 1, got 0"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
    ]:
        with pytest.raises(ParamError, match=said):
            PlannedFeed(
                dataset, **{"rank": 0, "world_size": 2, "planned_ranks": 3, "batch_size": 1, **changes}
            )
