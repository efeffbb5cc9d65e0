"""A randomly drawn share of the rows: exact in number, spread over the row groups, and the same for the same seed."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data import ParquetFeed, RowFilter
from sparkdl.data.dataset.row_choice import draw_rows, spread_rows
from sparkdl.estimators.fit.split import marked_rows
from tests.training.scenes.training_scenes import write_dataset


@given(
    row_counts=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    share=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63),
)
def test_drawn_rows_and_the_rest_divide_all_rows_evenly_over_row_groups(row_counts, share, seed):
    drawn = draw_rows(row_counts, share, seed=seed)
    rest = drawn.rest()
    assert sum(drawn.counts) == int(sum(row_counts) * share + 0.5)
    for row_group, count in enumerate(row_counts):
        assert abs(drawn.counts[row_group] - count * share) <= 1
        kept, others = drawn.rows_kept(None, row_group), rest.rows_kept(None, row_group)
        assert (len(kept), len(others)) == (drawn.counts[row_group], rest.counts[row_group])
        assert sorted([*kept, *others]) == list(range(count))
        assert list(kept) == sorted(kept)
        assert list(others) == sorted(others)


def test_drawn_rows_differ_between_seeds_and_between_row_groups():
    drawn, other = draw_rows([100, 100], 0.5, seed=1), draw_rows([100, 100], 0.5, seed=2)
    assert drawn == draw_rows([100, 100], 0.5, seed=1)
    assert list(drawn.rows_kept(None, 0)) != list(other.rows_kept(None, 0))
    assert list(drawn.rows_kept(None, 0)) != list(drawn.rows_kept(None, 1))


def rows_of(dataset, row_filter, world_size, epoch=0):
    rows = []
    for rank in range(world_size):
        with ParquetFeed(
            dataset, columns=["w"], rank=rank, world_size=world_size, batch_size=3, row_filter=row_filter
        ) as feed:
            rows += [float(value) for batch in feed.epoch(epoch) for value in batch["w"]]
    return rows


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_and_validation_feeds_divide_all_rows_without_overlap(tmp_path, world_size):
    dataset = write_dataset(tmp_path, 37)
    everything = rows_of(dataset, None, 1)
    drawn = draw_rows(dataset.row_counts, 0.3, seed=5)
    validated = rows_of(dataset, drawn, world_size)
    assert len(validated) == 11
    for epoch in (0, 1):
        trained = rows_of(dataset, drawn.rest(), world_size, epoch)
        assert sorted(validated + trained) == sorted(everything)


def test_marked_rows_are_counted_by_row_group(tmp_path):
    dataset = write_dataset(tmp_path, 37)
    marked, others = marked_rows(dataset, "validates")
    assert sum(marked.counts) + sum(others.counts) == 37
    assert [sum(pair) for pair in zip(marked.counts, others.counts, strict=True)] == list(dataset.row_counts)
    validated, trained = rows_of(dataset, marked, 2), rows_of(dataset, others, 2)
    assert sorted(validated + trained) == sorted(rows_of(dataset, None, 1))
    with ParquetFeed(dataset, columns=["w", "validates"], batch_size=37, shuffle=False) as feed:
        batch = next(iter(feed))
    assert sorted(validated) == sorted(batch["w"][batch["validates"]].tolist())
    assert np.bincount(np.flatnonzero(batch["validates"]) // 5, minlength=8).tolist() == list(marked.counts)


COLUMNS = [
    pa.array([1, 2, 3], pa.int32()),
    pa.array([1, None, 3], pa.int64()),
    pa.array([1.5, None, float("nan")], pa.float32()),
    pa.array([True, False, True]),
    pa.array([True, None, False]),
    pa.array(["a", None, "b"]),
    pa.array([b"a", b"", None]),
    pa.array([Decimal("1.20"), None]),
    pa.array([3, None, 5], pa.timestamp("us")),
    pa.array([3, None, 5], pa.timestamp("ns", "UTC")),
    pa.array([3, None], pa.date32()),
    pa.array([3, None], pa.duration("s")),
    pa.array([86_400_000, None], pa.date64()),
    pa.array([[1.0, None], None, []], pa.list_(pa.float64())),
    pa.array([["a"], [None, "b"]]),
    pa.array([{"x": 1}, None]),
    pa.array(["a", None, "a"]).dictionary_encode(),
    pa.array([], pa.int64()),
    pa.array([1, None, 3, 4], pa.int8()).slice(1, 2),
]


@pytest.mark.parametrize("values", COLUMNS, ids=lambda values: str(values.type))
def test_a_filter_gets_what_arrow_makes_of_a_column(values):
    given_to_filter = []

    def keep(columns):
        given_to_filter.append(columns["v"])
        return np.ones(len(values), bool)

    assert len(RowFilter(["v"], keep).rows_kept(pa.table({"v": values}))) == len(values)
    (array,), wanted = given_to_filter, values.to_numpy(zero_copy_only=False)
    assert array.dtype == wanted.dtype
    assert repr(array.tolist()) == repr(wanted.tolist())


@pytest.mark.parametrize("share", [None, 0.4])
def test_spread_rows_are_at_equal_distances_among_the_others(tmp_path, share):
    dataset = write_dataset(tmp_path, 137, rows_per_group=3)
    among = None if share is None else draw_rows(dataset.row_counts, share, seed=5)

    def rows(choice):
        with ParquetFeed(dataset, columns=["w"], batch_size=137, shuffle=False, row_filter=choice) as feed:
            return [float(value) for batch in feed.epoch(0) for value in batch["w"]]

    for count in (1, 12, 40, 1000):
        choice = spread_rows(dataset.row_counts, among, count)
        found, everything = rows(choice), rows(among)
        assert len(found) == min(count, len(everything)) == sum(choice.counts)
        places = [everything.index(value) for value in found]
        assert places == sorted(set(places))
        if count == 12:
            assert max(places) > 0.8 * len(everything)
            assert sum(number > 0 for number in choice.counts) <= 16
