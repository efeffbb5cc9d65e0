"""Epochs that are interrupted and resumed, over random layouts of row groups, ranks, batches and buffers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data import ParquetDataset, ParquetFeed, PlannedFeed, RowFilter, scan_dataset
from sparkdl.data.feed.epoch_plan import as_indices
from sparkdl.data.feed.state import EpochSchedule, Progress
from sparkdl.errors import DataError, ParamError

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]
State = dict[str, Any]

layouts = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda counts: sum(counts) >= 16)
buffers = st.sampled_from([1, 2, 7, 16, 33, 64, 1000])


@dataclass(frozen=True)
class Group:
    """Ranks that read ``steps`` steps of an epoch together; all remaining steps when None."""

    world_size: int
    batch_size: int
    buffer_rows: int
    steps: int | None


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    steps = [*draw(st.lists(st.integers(0, 6), max_size=3)), None]
    return [
        Group(draw(st.integers(1, 16)), draw(st.integers(1, 9)), draw(buffers), steps_of_group)
        for steps_of_group in steps
    ]


def dataset_of(folder: Path, row_counts: Sequence[int]) -> ParquetDataset:
    """Rows numbered from 0, in row groups of these sizes."""
    start = 0
    with pq.ParquetWriter(folder / "a.parquet", pa.schema([("id", pa.int64())])) as writer:
        for count in row_counts:
            writer.write_table(pa.table({"id": np.arange(start, start + count)}))
            start += count
    return scan_dataset(str(folder))


def take_steps(
    feeds: Iterable[ParquetFeed | PlannedFeed], state: State | None, steps: int | None, epoch: int = 0
) -> tuple[list[list[np.ndarray]], State]:
    """The ids of each rank by step, and the state afterwards, which must be the same on all ranks."""
    batches_of_ranks, states = [], []
    for rank, feed in enumerate(feeds):
        with feed:
            if state is not None:
                feed.resume(json.loads(json.dumps(state)))
            is_over = feed.state()["epoch"] > epoch  # earlier ranks have read all rows
            planned = [
                feed.rows_in_step(step, epoch)[rank] for step in range(0 if is_over else feed.steps_in(epoch))
            ]
            batches: list[np.ndarray] = []
            for batch in feed.epoch(epoch) if planned and steps != 0 else ():
                batches.append(batch["id"])
                if len(batches) == steps:
                    break
            states.append(feed.state())
        assert [len(batch) for batch in batches] == planned[: len(batches)]
        batches_of_ranks.append(batches)
    assert all(state == states[0] for state in states)
    return batches_of_ranks, states[0]


def take(
    dataset: ParquetDataset, group: Group, state: State | None, epoch: int, **options: object
) -> tuple[list[list[np.ndarray]], State]:
    feeds = [
        ParquetFeed(
            dataset,
            rank=rank,
            world_size=group.world_size,
            batch_size=group.batch_size,
            shuffle_buffer_rows=group.buffer_rows,
            **options,
        )
        for rank in range(group.world_size)
    ]
    for feed in feeds:
        feed.set_epoch(epoch)
    return take_steps(feeds, state, group.steps, epoch)


@settings(max_examples=40, deadline=None)
@given(row_counts=layouts, groups=groups(), shuffle=st.booleans(), epoch=st.integers(0, 5))
def test_every_row_comes_once_when_an_epoch_resumes_with_other_numbers_of_ranks(
    row_counts: list[int], groups: list[Group], shuffle: bool, epoch: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = dataset_of(Path(folder), row_counts)
        state, seen = None, []
        for group in groups:
            batches_of_ranks, state = take(dataset, group, state, epoch, shuffle=shuffle, seed=3)
            seen += [batch for batches in batches_of_ranks for batch in batches]
        assert state["epoch"] == epoch + 1
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(sum(row_counts)))


@settings(max_examples=40, deadline=None)
@given(
    row_counts=layouts,
    world_size=st.integers(1, 16),
    batch_sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    steps=st.integers(1, 8),
    buffer_rows=buffers,
    shuffle=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_epoch_resumed_on_the_same_number_of_ranks_gives_the_rows_of_an_uninterrupted_one(
    row_counts: list[int],
    world_size: int,
    batch_sizes: list[int],
    steps: int,
    buffer_rows: int,
    shuffle: bool,
    epoch: int,
) -> None:
    options = {"shuffle": shuffle, "seed": -5}
    with tempfile.TemporaryDirectory() as folder:
        dataset = dataset_of(Path(folder), row_counts)
        whole, _ = take(dataset, Group(world_size, batch_sizes[0], buffer_rows, None), None, epoch, **options)
        state, seen = None, [[] for _ in range(world_size)]
        for index, batch_size in enumerate(batch_sizes):
            is_last = index == len(batch_sizes) - 1
            group = Group(world_size, batch_size, buffer_rows, None if is_last else steps)
            batches_of_ranks, state = take(dataset, group, state, epoch, **options)
            for rank, batches in enumerate(batches_of_ranks):
                seen[rank] += batches
        for rank in range(world_size):
            np.testing.assert_array_equal(np.concatenate(seen[rank]), np.concatenate(whole[rank]))


@settings(max_examples=300, deadline=None)
@given(
    row_counts=st.lists(st.integers(0, 3000), min_size=1, max_size=12).filter(
        lambda counts: sum(counts) >= 16
    ),
    hands=st.lists(
        st.tuples(st.integers(1, 16), st.sampled_from([0, 1, 10, 100, 700, 5000]), st.integers(0, 2000)),
        min_size=1,
        max_size=4,
    ),
    epoch=st.integers(0, 10),
)
def test_plans_pass_on_exactly_the_rows_that_were_not_taken(
    row_counts: list[int], hands: list[tuple[int, int, int]], epoch: int
) -> None:
    """Without reading files: the unread rows of a plan are the same set for all ranks, of the announced size."""
    progress = Progress(epoch=epoch)
    shuffle = hands[0][1] > 0
    left_before = {(group, row) for group, count in enumerate(row_counts) for row in range(count)}
    for world_size, buffer_rows, num_given in hands:
        schedule = EpochSchedule(
            row_counts,
            world_size=world_size,
            buffer_rows=max(buffer_rows, 1) if shuffle else 0,
            seed=1,
            shuffle=shuffle,
        )
        schedule.resume(progress)
        plan = schedule.plan_of(epoch)
        unread = [
            plan.unread(
                rank, shard, buffer_rows=max(buffer_rows, 1) if shuffle else 0, num_taken=plan.num_taken
            )
            for rank, shard in enumerate(plan.shards())
        ]
        rows = [(group, int(row)) for parts in unread for group, rows in parts for row in as_indices(rows)]
        assert len(rows) == sum(plan.rows_to_come())
        assert len(set(rows)) == len(rows)
        assert set(rows) <= left_before
        assert all(len(rows) for parts in unread for _, rows in parts)
        left_before = set(rows)
        progress = schedule.progress(epoch, num_given)
        if progress.epoch > epoch:
            break


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_epoch_resumes_with_a_row_filter_and_an_empty_or_filled_cache(
    write_dataset: WriteDataset, tmp_path: Path, world_size: int, shuffle: bool, cache: str
) -> None:
    dataset = write_dataset([[30, 11], [25], [40, 2]])
    options = {
        "shuffle": shuffle,
        "row_filter": RowFilter(["id", "is_even"], lambda values: values["is_even"] | (values["id"] < 20)),
    }
    kept = [number for number in range(108) if number % 2 == 0 or number < 20]
    caching = {"cache": cache, "cache_folder": str(tmp_path), "columns": ["id"], **options}
    begun, state = take(dataset, Group(2, 5, 16, 3), None, 1, **options)
    expected, _ = take(dataset, Group(world_size, 4, 16, None), state, 1, **options)
    left = [np.concatenate(batches) for batches in expected]
    before = [row for batches in begun for batch in batches for row in batch]
    np.testing.assert_array_equal(np.sort(np.concatenate([*left, before])), kept)
    for num_epochs in (0, 1):  # an empty cache, and one filled by an epoch
        for rank in range(world_size):
            with ParquetFeed(
                dataset, rank=rank, world_size=world_size, batch_size=4, shuffle_buffer_rows=16, **caching
            ) as feed:
                for _ in range(num_epochs):
                    assert sum(len(batch["id"]) for batch in feed) == sum(
                        feed.rows_in_epoch(0)[rank : rank + 1]
                    )
                feed.resume(json.loads(json.dumps(state)))
                np.testing.assert_array_equal(np.concatenate([batch["id"] for batch in feed]), left[rank])


def test_row_groups_whose_rows_were_all_used_are_not_read_again(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10]] * 10)
    feed = ParquetFeed(dataset, columns=["id"], batch_size=10, shuffle=False)
    with feed:
        batches = iter(feed)
        for _ in range(4):
            next(batches)
        state = feed.state()
    for index in range(4):
        (Path(dataset.url) / f"part-{index:05d}.parquet").unlink()
    with ParquetFeed(dataset, columns=["id"], batch_size=10, shuffle=False) as feed:
        feed.resume(state)
        np.testing.assert_array_equal(np.concatenate([batch["id"] for batch in feed]), np.arange(40, 100))


def test_a_resumed_epoch_has_its_own_length_and_the_next_one_is_whole(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[25]])
    with ParquetFeed(dataset, columns=["id"], batch_size=10) as feed:
        batches = iter(feed)
        next(batches)
        state = feed.state()
        assert len(feed) == 3
        feed.resume(state)
        assert len(feed) == 2
        assert feed.rows_in_step(1, epoch=0) == [5]
        assert sum(len(batch["id"]) for batch in feed) == 15
        assert len(feed) == 3
        assert sum(len(batch["id"]) for batch in feed) == 25


def test_state_can_exclude_batches_taken_ahead_of_their_use(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[25]])
    with ParquetFeed(dataset, columns=["id"], batch_size=5) as feed:
        batches = iter(feed)
        next(batches)
        state = feed.state()
        next(batches)
        assert feed.state() != state
        assert feed.state(given=1) == state


def test_state_is_small_json_and_at_the_end_of_an_epoch_names_the_next_epoch(
    write_dataset: WriteDataset,
) -> None:
    dataset = write_dataset([[25, 25]])
    with ParquetFeed(dataset, columns=["id"], batch_size=10) as feed:
        first = feed.state()
        for index, _ in enumerate(feed):
            if index == 4:  # while the last batch is in use
                at_the_end = feed.state()
        assert feed.state() == at_the_end
        assert (first["epoch"], at_the_end["epoch"]) == (0, 1)
        assert len(json.dumps(at_the_end)) < 1000


def test_state_of_other_files_or_settings_is_refused_with_the_difference(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[25], [25]])
    with ParquetFeed(dataset, columns=["id"], batch_size=10) as feed:
        state = feed.state()
    smaller = ParquetDataset(url=dataset.url, columns=dataset.columns, row_groups=dataset.row_groups[:1])
    with pytest.raises(DataError, match="files was 2 and is 1; .* rows was 50 and is 25"):
        ParquetFeed(smaller, columns=["id"], batch_size=10).resume(state)
    swapped = ParquetDataset(url=dataset.url, columns=dataset.columns, row_groups=dataset.row_groups[::-1])
    with pytest.raises(DataError, match="changed: the names of the files"):
        ParquetFeed(swapped, columns=["id"], batch_size=10).resume(state)
    with pytest.raises(DataError, match="seed was 0 .* 1; shuffle was True .* False"):
        ParquetFeed(dataset, columns=["id"], batch_size=10, seed=1, shuffle=False).resume(state)


def test_a_feed_without_an_identity_continues_on_rows_that_were_written_again(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, again = (dataset_of(tmp_path / name, [25]) for name in "ab")
    options: dict[str, Any] = {"batch_size": 10, "shuffle": False}
    with ParquetFeed(first, has_identity=False, **options) as feed, closing(iter(feed)) as batches:
        next(batches)
        state = json.loads(json.dumps(feed.state()))
    with ParquetFeed(again, has_identity=False, **options) as feed:
        feed.resume(state)
        assert [batch["id"].tolist() for batch in feed] == [[*range(10, 20)], [*range(20, 25)]]
    with ParquetFeed(again, **options) as feed, pytest.raises(DataError, match="seed was not there and is 0"):
        feed.resume(state)


@pytest.mark.parametrize("shuffle", [True, False])
def test_feed_seeks_to_any_batch_of_a_whole_epoch_after_it_resumed(
    write_dataset: WriteDataset, shuffle: bool
) -> None:
    dataset = write_dataset([[25, 4], [25]])
    with ParquetFeed(dataset, columns=["id"], batch_size=10, shuffle=shuffle) as feed:
        feed.set_epoch(1)
        states, expected = [feed.state()], []
        for batch in feed:
            expected.append(batch["id"].tolist())
            states.append(feed.state())
        feed.resume(states[2])
        for step in (4, 1, 0, 5, 1):
            feed.seek(1, step)
            assert len(feed) == 6 - step
            assert feed.state() == states[step]
            assert [batch["id"].tolist() for batch in feed] == expected[step:]
        with pytest.raises(ParamError, match="has 6 batches, counted from 0; got step 6"):
            feed.seek(1, 6)


def test_invalid_state_of_a_feed_is_refused_with_the_reason(write_dataset: WriteDataset) -> None:
    with ParquetFeed(write_dataset([[25]]), columns=["id"], batch_size=10) as feed:
        good = feed.state()
        for bad, message in (
            ({}, r"not a state of a feed: \{\}\. .*format, epoch"),
            (None, "not a state of a feed: None"),
            ("x", "not a state of a feed: x"),
            ({key: good[key] for key in good if key != "epoch"}, "It lacks epoch"),
        ):
            with pytest.raises(ParamError, match=message):
                feed.resume(bad)
            assert feed.state() == good
        for call, message in (
            (lambda: feed.state(given=-1), "given must be at least 0, got -1"),
            (lambda: feed.set_epoch(-1), "epoch must be at least 0, got -1"),
            (lambda: feed.set_epoch(0.5), "epoch must be a whole number, got 0.5"),
            (lambda: next(feed.epoch(-1)), "epoch must be at least 0, got -1"),
            (lambda: feed.seek(-1), "epoch must be at least 0, got -1"),
            (lambda: feed.rows_in_step(-1), "step must be at least 0, got -1"),
            (lambda: feed.seek(0, -1), "step must be at least 0, got -1"),
        ):
            with pytest.raises(ParamError, match=message):
                call()
