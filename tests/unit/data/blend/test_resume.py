"""Blends that are interrupted and resumed with other numbers of ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data import BlendedFeed, Mixture, ParquetDataset, ParquetFeed
from sparkdl.errors import DataError, ParamError
from tests.unit.data.feed.test_resume import dataset_of

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]

WEIGHTS = {"a": 3, "b": 1}


def datasets_of(folder: str, row_counts: Sequence[Sequence[int]]) -> dict[str, ParquetDataset]:
    """Datasets by name with rows numbered from 0, in row groups of the given sizes."""
    datasets = {}
    for name, counts in zip(WEIGHTS, row_counts, strict=True):
        Path(folder, name).mkdir()
        datasets[name] = dataset_of(Path(folder, name), counts)
    return datasets


def blend_of(
    datasets: dict[str, ParquetDataset], rank: int = 0, world_size: int = 1, **options: Any
) -> BlendedFeed:
    feeds = {
        name: ParquetFeed(
            dataset, rank=rank, world_size=world_size, batch_size=5, seed=3, shuffle_buffer_rows=4
        )
        for name, dataset in datasets.items()
    }
    return BlendedFeed(feeds, WEIGHTS, seed=1, source_column="source", **options)


def take(
    datasets: dict[str, ParquetDataset], world_size: int, steps: int | None, state: Any, **options: Any
) -> tuple[list[list[np.ndarray]], list[dict[str, Any]], dict[str, Any]]:
    """Read steps; return the rows of all ranks by source, the batches of rank 0, and the common state of all ranks."""
    rows: list[list[np.ndarray]] = [[] for _ in datasets]
    states, batches_of_ranks = [], []
    for rank in range(world_size):
        with blend_of(datasets, rank, world_size, **options) as blend:
            if state is not None:
                blend.resume(json.loads(json.dumps(state)))
            planned = len(blend) - blend.state()["steps_done"] if options["at_end"] == "stop" else steps
            batches = []
            for batch in islice(blend, steps):
                assert blend.rows_of_ranks[rank] == len(batch["id"])
                batches.append(batch)
            assert len(batches) == (planned if steps is None else min(steps, planned))
            states.append(blend.state())
        batches_of_ranks.append(batches)
        for batch in batches:
            for source, had in enumerate(rows):
                had.append(batch["id"][batch["source"] == source])
    assert all(state == states[0] for state in states)
    assert len({len(batches) for batches in batches_of_ranks}) == 1
    return rows, batches_of_ranks[0], states[0]


row_groups = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda counts: sum(counts) >= 4)
handed = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=3)
batch_sizes = st.none() | st.integers(1, 7)


@settings(max_examples=15, deadline=None)
@given(row_groups, row_groups, batch_sizes, handed)
def test_blend_that_repeats_gives_every_row_once_per_epoch_after_any_changes_of_ranks(
    of_a: list[int], of_b: list[int], batch_size: int | None, groups: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        datasets = datasets_of(folder, [of_a, of_b])
        state: Any = None
        seen: list[list[np.ndarray]] = [[], []]
        for world_size, steps in groups:
            rows, _, state = take(datasets, world_size, steps, state, batch_size=batch_size, at_end="repeat")
            for had, new in zip(seen, rows, strict=True):
                had.extend(new)
        # A single rank ends the epochs that any rank has begun, in their order.
        had_before = [
            max([of["epoch"] + 1, *(epoch + 1 for epoch, _ in of.get("later", []))])
            for of in state["feeds"].values()
        ]
        lengths = [sum(of_a), sum(of_b)]
        missing = [
            epochs * length - sum(map(len, had))
            for epochs, length, had in zip(had_before, lengths, seen, strict=True)
        ]
        with blend_of(datasets, batch_size=batch_size) as blend:
            blend.resume(state)
            rest: list[list[int]] = [[], []]
            while any(len(rows) < count for rows, count in zip(rest, missing, strict=True)):
                batch = next(iter(blend))
                for source, rows_of_source in enumerate(rest):
                    rows_of_source.extend(batch["id"][batch["source"] == source].tolist())
        for epochs, length, had, new, count in zip(had_before, lengths, seen, rest, missing, strict=True):
            counts = np.bincount(np.concatenate([*had, new[:count]]).astype(int), minlength=length)
            assert counts.tolist() == [epochs] * length


@settings(max_examples=30, deadline=None)
@given(row_groups, row_groups, batch_sizes, handed)
def test_blend_that_stops_repeats_no_row_and_ends_with_a_dataset_after_any_changes_of_ranks(
    of_a: list[int], of_b: list[int], batch_size: int | None, groups: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        datasets = datasets_of(folder, [of_a, of_b])
        state: Any = None
        seen: list[list[np.ndarray]] = [[], []]
        for world_size, steps in [*((size, steps) for size, steps in groups), (1, None)]:
            rows, _, state = take(datasets, world_size, steps, state, batch_size=batch_size, at_end="stop")
            for had, new in zip(seen, rows, strict=True):
                had.extend(new)
        left = []
        for had, length in zip(seen, (sum(of_a), sum(of_b)), strict=True):
            counts = np.bincount(np.concatenate([[], *had]).astype(int), minlength=length)
            assert counts.max() <= 1
            left.append(int((counts == 0).sum()))
        assert min(left) == 0, "one rank alone reads a dataset to its end"


@pytest.mark.parametrize("batch_size", [6, None])
def test_feeds_drawn_in_each_step_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, batch_size: int | None
) -> None:
    datasets = datasets_of(str(tmp_path), [[30], [20]])
    options: dict[str, Any] = {"batch_size": batch_size, "at_end": "repeat"}
    _, first, state = take(datasets, 2, 3, None, **options)
    _, second, state = take(datasets, 3, 4, state, **options)
    _, third, state = take(datasets, 1, 2, state, **options)
    sources = [batch["source"] for batch in (*first, *second, *third)]
    assert state["steps_done"] == len(sources) == 9
    expected = Mixture(list(WEIGHTS.values()), seed=1).draw(9 * (batch_size or 1))
    found = np.concatenate(sources) if batch_size else np.array([source[0] for source in sources])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("batch_size", [6, None])
def test_state_of_a_blend_with_another_seed_is_refused_and_the_blend_keeps_its_position(
    tmp_path: Path, batch_size: int | None
) -> None:
    datasets = datasets_of(str(tmp_path), [[30], [20]])

    def blend(seed: int) -> BlendedFeed:
        feeds = {
            "a": ParquetFeed(datasets["a"], batch_size=4),
            "b": ParquetFeed(datasets["b"], batch_size=4, seed=seed),
        }
        return BlendedFeed(feeds, WEIGHTS, batch_size=batch_size)

    with blend(0) as first, blend(1) as other, blend(1) as whole:
        list(islice(first, 3))
        expected = [batch["id"].tolist() for batch in islice(whole, 4)]
        assert [batch["id"].tolist() for batch in islice(other, 2)] == expected[:2]
        with pytest.raises(DataError, match="feed 'b' .*seed was 0 and is 1"):
            other.resume(first.state())
        assert [batch["id"].tolist() for batch in islice(other, 2)] == expected[2:]


def test_invalid_state_of_a_blend_is_refused_with_the_reason(tmp_path: Path) -> None:
    with blend_of(datasets_of(str(tmp_path), [[30], [20]]), batch_size=4) as blend:
        good = blend.state()
        for bad, message in (
            ({}, r"not a state of a blend: \{\}\. .*format"),
            (None, "not a state of a blend: None"),
            ({key: good[key] for key in good if key != "drawn"}, "It lacks drawn"),
            ({**good, "feeds": {**good["feeds"], "b": {}}}, "feed 'b' of the blend .*not a state of a feed"),
            ({**good, "blend": {**good["blend"], "at_end": "stop"}}, "this blend is repeat, .* with stop"),
        ):
            with pytest.raises(ParamError, match=message):
                blend.resume(bad)


def test_feeds_with_different_world_sizes_cannot_be_blended(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10]])
    feeds = {name: ParquetFeed(dataset, batch_size=2, world_size=int(name)) for name in "23"}
    with pytest.raises(ParamError, match=r"same world_size, but these have \{'2': 2, '3': 3\}"):
        BlendedFeed(feeds, {"2": 1, "3": 1}, batch_size=4)


def test_one_feed_may_have_two_names_in_a_blend_and_keeps_its_own_position(
    write_dataset: WriteDataset,
) -> None:
    with ParquetFeed(write_dataset([[10, 3], [20]]), columns=["id"], batch_size=5) as feed:
        expected = [batch["id"].tolist() for batch in feed]
        feed.seek(2, 3)
        before = feed.state()
        blend = BlendedFeed({"a": feed, "b": feed}, {"a": 1, "b": 1}, batch_size=10, source_column="source")
        batch = next(iter(blend))
        for source in (0, 1):
            assert batch["id"][batch["source"] == source].tolist() == expected[0]
        assert feed.state() == before
        assert feed.waited_s > 0
