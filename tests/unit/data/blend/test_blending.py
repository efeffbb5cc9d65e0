from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data import BlendedFeed, Mixture, ParquetDataset, ParquetFeed
from sparkdl.data.blend.row_stream import Feed
from sparkdl.data.feed.planned_feed import Batch
from sparkdl.data.feed.shards import rows_per_rank, steps_per_epoch
from sparkdl.errors import DataError, ParamError

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


class NumberedFeed:
    """A feed of rows ``epoch * 1000 + i`` of a shard of ``num_rows`` rows, divided like ParquetFeed does."""

    def __init__(self, num_rows: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.num_rows, self.batch_size, self.rank, self.world_size = num_rows, batch_size, rank, world_size
        self.closed = False

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.num_rows, self.world_size, self.batch_size)

    def rows_in_step(self, step: int) -> list[int]:
        before = step * self.batch_size
        shards = rows_per_rank(self.num_rows, self.world_size)
        return [min(max(rows - before, 0), self.batch_size) for rows in shards]

    def epoch(self, epoch: int) -> Iterator[Batch]:
        rows = rows_per_rank(self.num_rows, self.world_size)
        numbers = 1000 * epoch + sum(rows[: self.rank]) + np.arange(rows[self.rank])
        for step in range(self.steps_per_epoch):
            part = numbers[step * self.batch_size : (step + 1) * self.batch_size]
            yield {"row": part, "vector": np.outer(part, [1.0, 2.0])}

    def close(self) -> None:
        self.closed = True


def endless_rows(feed: Feed) -> Iterator[int]:
    epoch = 0
    while True:
        for batch in feed.epoch(epoch):
            yield from batch["row"].tolist()
        epoch += 1


def rows_by_source(batches: Sequence[Batch], sources: int) -> list[list[int]]:
    return [
        [int(row) for batch in batches for row in batch["row"][batch["source"] == source]]
        for source in range(sources)
    ]


Layout = list[tuple[int, int, int]]
"""Rows, batch size and weight of each feed of a blend."""

layouts = st.lists(
    st.tuples(st.integers(3, 30), st.integers(1, 8), st.integers(1, 9)), min_size=1, max_size=4
)


def feeds_of(layout: Layout, rank: int = 0, world_size: int = 1) -> dict[str, NumberedFeed]:
    return {
        f"set{index}": NumberedFeed(rows, size, rank=rank, world_size=world_size)
        for index, (rows, size, _) in enumerate(layout)
    }


def blend_of(layout: Layout, rank: int = 0, world_size: int = 1, **options: Any) -> BlendedFeed:
    weights = {f"set{index}": weight for index, (_, _, weight) in enumerate(layout)}
    return BlendedFeed(feeds_of(layout, rank, world_size), weights, source_column="source", **options)


@settings(deadline=None)
@given(layouts, st.integers(1, 20), st.integers(0, 99), st.integers(1, 3), st.data())
def test_rows_of_every_feed_come_in_its_order_and_in_the_shares_of_the_mixture(
    layout: Layout, batch_size: int, seed: int, world_size: int, data: st.DataObject
) -> None:
    mixture = Mixture([weight for _, _, weight in layout], seed=seed).draw(8 * batch_size)
    rank = data.draw(st.integers(0, world_size - 1))
    blend = blend_of(layout, rank, world_size, batch_size=batch_size, seed=seed, num_steps=8)
    batches = list(blend)
    assert [len(batch["row"]) for batch in batches] == [batch_size] * 8
    assert blend.rows_of_ranks == [batch_size] * world_size
    np.testing.assert_array_equal(np.concatenate([batch["source"] for batch in batches]), mixture)
    for batch in batches:
        np.testing.assert_array_equal(batch["vector"], np.outer(batch["row"], [1, 2]))
    feeds = feeds_of(layout, rank, world_size).values()
    for rows, feed in zip(rows_by_source(batches, len(layout)), feeds, strict=True):
        assert rows == list(islice(endless_rows(feed), len(rows)))


@settings(deadline=None)
@given(layouts, st.none() | st.integers(1, 20), st.integers(0, 12), st.sampled_from(["repeat", "stop"]))
def test_blend_resumed_anywhere_continues_with_the_next_batch(
    layout: Layout, batch_size: int | None, taken: int, at_end: str
) -> None:
    whole, first, resumed = (
        blend_of(layout, batch_size=batch_size, at_end=at_end, num_steps=12) for _ in range(3)
    )
    begun = list(islice(first, taken))
    resumed.resume(json.loads(json.dumps(first.state())))
    for expected, batch in zip(whole, [*begun, *resumed], strict=True):
        for name, values in expected.items():
            np.testing.assert_array_equal(batch[name], values)


@settings(deadline=None)
@given(layouts, st.none() | st.integers(1, 20), st.integers(1, 3))
def test_blend_that_stops_ends_on_all_ranks_before_a_dataset_repeats(
    layout: Layout, batch_size: int | None, world_size: int
) -> None:
    sizes = []
    for rank in range(world_size):
        blend = blend_of(layout, rank, world_size, batch_size=batch_size, at_end="stop")
        batches = list(blend)
        assert len(batches) == len(blend)
        assert not list(blend)
        for index, rows in enumerate(rows_by_source(batches, len(layout))):
            assert max(rows, default=0) < 1000, "of the first epoch"
            assert len(rows) <= max(rows_per_rank(layout[index][0], world_size))
        sizes.append([len(batch["row"]) for batch in batches])
    if batch_size is None:
        assert len({len(sizes_of_rank) for sizes_of_rank in sizes}) == 1
    else:
        assert sizes == [sizes[0]] * world_size


def test_a_blend_of_one_dataset_that_stops_reads_all_of_its_rows() -> None:
    blend = BlendedFeed({"only": NumberedFeed(25, 4)}, {"only": 1}, batch_size=10, at_end="stop")
    assert [len(batch["row"]) for batch in blend] == [10, 10, 5]


@pytest.mark.parametrize("batch_size", [4, None])
def test_blend_of_parquet_feeds_can_be_resumed_at_any_step_forwards_and_backwards(
    write_dataset: WriteDataset, batch_size: int | None
) -> None:
    dataset = write_dataset([[10, 3], [20], [30]])

    def blend() -> BlendedFeed:
        options = {"columns": ["id"], "rank": 1, "world_size": 2}
        feeds = {
            "a": ParquetFeed(dataset, batch_size=5, seed=1, **options),
            "b": ParquetFeed(dataset, batch_size=6, shuffle=False, **options),
        }
        return BlendedFeed(feeds, {"a": 3, "b": 2}, batch_size=batch_size, num_steps=20)

    with blend() as whole:
        states, expected = [whole.state()], []
        for batch in whole:
            expected.append(batch["id"].tolist())
            states.append(json.loads(json.dumps(whole.state())))
    with blend() as again:
        for taken in (5, 5, 7, 3, 19, 12, 0, 5, *range(21)):
            again.resume(states[taken])
            assert [batch["id"].tolist() for batch in islice(again, 3)] == expected[taken : taken + 3]
    for taken in (0, 1, 7, 20):
        with blend() as fresh:
            fresh.resume(states[taken])
            assert [batch["id"].tolist() for batch in fresh] == expected[taken:]


def test_rows_before_the_resumed_row_are_not_read(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10], [10], [10]])

    def blend() -> BlendedFeed:
        feed = ParquetFeed(dataset, columns=["id"], batch_size=5, shuffle=False)
        return BlendedFeed({"a": feed}, {"a": 1}, batch_size=7)

    with blend() as first:
        list(islice(first, 3))
        state = first.state()
    (Path(dataset.url) / "part-00000.parquet").unlink()
    with blend() as resumed:
        resumed.resume(state)
        assert next(iter(resumed))["id"].tolist() == list(range(21, 28))


def test_whole_batches_may_have_columns_of_their_own() -> None:
    class Images(NumberedFeed):
        def epoch(self, epoch: int) -> Iterator[Batch]:
            return ({"image": batch["vector"]} for batch in super().epoch(epoch))

    blend = BlendedFeed(
        {"rows": NumberedFeed(5, 2), "images": Images(9, 3)}, {"rows": 1, "images": 1}, num_steps=6
    )
    kinds = []
    for batch in blend:
        kinds.append((next(iter(batch)), len(next(iter(batch.values())))))
        assert sum(blend.rows_of_ranks) == kinds[-1][1]
    assert sorted(kinds) == [("image", 3)] * 3 + [("row", 1)] + [("row", 2)] * 2


def test_feeds_with_different_columns_cannot_share_a_batch() -> None:
    class Narrow(NumberedFeed):
        def epoch(self, epoch: int) -> Iterator[Batch]:
            return ({**batch, "vector": batch["vector"][:, 0]} for batch in super().epoch(epoch))

    blend = BlendedFeed({"a": NumberedFeed(5, 2), "b": Narrow(5, 2)}, {"a": 1, "b": 1}, batch_size=4)
    with pytest.raises(
        DataError,
        match=r"'a' and 'b' cannot .* one has vector: float64\[2\], the other vector: float64\. Read",
    ):
        next(iter(blend))


@pytest.mark.parametrize("batch_size", [None, 2])
def test_feed_without_rows_is_an_error_and_not_an_endless_wait(batch_size: int | None) -> None:
    class Empty(NumberedFeed):
        def epoch(self, epoch: int) -> Iterator[Batch]:
            return iter(())

    blend = BlendedFeed({"nothing": Empty(1, 1)}, {"nothing": 1}, batch_size=batch_size)
    with pytest.raises(DataError, match="'nothing' has no"):
        next(iter(blend))


def test_a_state_of_other_settings_or_other_data_is_refused() -> None:
    feeds = {"a": NumberedFeed(7, 2), "b": NumberedFeed(7, 2)}
    first = BlendedFeed(feeds, {"a": 1, "b": 2}, batch_size=4)
    list(islice(first, 3))
    with pytest.raises(ParamError, match=r"weights of this blend is \[2.0, 2.0\], .* \[1.0, 2.0\]"):
        BlendedFeed(feeds, {"a": 2, "b": 2}, batch_size=4).resume(first.state())
    smaller = {"a": NumberedFeed(3, 2), "b": NumberedFeed(3, 2)}
    with pytest.raises(DataError, match="'a' .* step 2 with 2 rows in epoch 0"):
        BlendedFeed(smaller, {"a": 1, "b": 2}, batch_size=4).resume(first.state())


def test_a_blend_without_end_has_no_length_and_closes_its_feeds() -> None:
    feed = NumberedFeed(7, 2)
    with (
        BlendedFeed({"a": feed}, {"a": 1}, batch_size=4) as blend,
        pytest.raises(TypeError, match="num_steps"),
    ):
        len(blend)
    assert feed.closed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"b": 1}}, r"The feeds are \['a'\], but weights are given for \['b'\]"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"at_end": "rewind"}, "at_end must be 'repeat' or 'stop', got 'rewind'"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        BlendedFeed(**{"feeds": {"a": NumberedFeed(7, 2)}, "weights": {"a": 1}, **options})


def test_a_column_of_the_name_of_the_source_column_is_refused() -> None:
    blend = BlendedFeed({"a": NumberedFeed(7, 2)}, {"a": 1}, source_column="row")
    with pytest.raises(ParamError, match="have a column 'row' of their own"):
        next(iter(blend))
