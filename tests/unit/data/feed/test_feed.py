from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import Column, ParquetDataset, ParquetFeed, RowFilter, SequencePacker, scan_dataset
from sparkdl.errors import DataError, ParamError, ShardingError
from tests.collective.eventually import eventually

COLUMNS = ["vector", "id", "half", "grid", "is_even", "twice"]
WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


def read_epoch(
    dataset: ParquetDataset, world_size: int, epoch: int = 0, **options: object
) -> list[list[np.ndarray]]:
    """The ids of every batch of every rank; asserts that the other columns belong to them."""
    settings = {"columns": COLUMNS, "batch_size": 7, "seed": 3, **options}
    ids_of_ranks = []
    for rank in range(world_size):
        with ParquetFeed(dataset, rank=rank, world_size=world_size, **settings) as feed:
            batches = list(feed.epoch(epoch))
            assert len(batches) == feed.steps_per_epoch
            assert [len(batch["id"]) for batch in batches] == [
                feed.rows_in_step(step)[rank] for step in range(feed.steps_per_epoch)
            ]
        for batch in batches:
            number = batch["id"]
            assert list(batch) == COLUMNS
            np.testing.assert_array_equal(batch["twice"], 2 * number)
            np.testing.assert_array_equal(batch["half"], number / 2)
            np.testing.assert_array_equal(batch["is_even"], number % 2 == 0)
            np.testing.assert_array_equal(batch["vector"], np.outer(number, [1, 2, 3]))
            np.testing.assert_array_equal(batch["grid"].reshape(-1, 4), number[:, None] + np.arange(4))
        ids_of_ranks.append([batch["id"] for batch in batches])
    return ids_of_ranks


def joined(ids_of_ranks: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([ids for batches in ids_of_ranks for ids in batches])


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
@pytest.mark.parametrize(
    "options", [{"shuffle": False}, {}, {"shuffle_buffer_rows": 1}, {"shuffle_buffer_rows": 20}]
)
def test_every_row_is_read_once_by_any_number_of_ranks(
    write_dataset: WriteDataset, world_size: int, options: dict[str, object]
) -> None:
    dataset = write_dataset([[10, 3, 25], [1], [40, 2]])
    ids = joined(read_epoch(dataset, world_size, **options))
    np.testing.assert_array_equal(np.sort(ids), np.arange(81))


def test_without_shuffling_rows_come_in_the_order_of_the_files(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10, 3], [20]])
    np.testing.assert_array_equal(joined(read_epoch(dataset, 2, shuffle=False)), np.arange(33))


def test_shard_that_is_a_row_shorter_ends_with_an_empty_batch(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[15]])
    sizes = [[len(ids) for ids in batches] for batches in read_epoch(dataset, 2)]
    assert sizes == [[7, 0], [7, 1]]


def test_order_depends_on_seed_and_epoch_but_not_on_the_number_of_threads(
    write_dataset: WriteDataset,
) -> None:
    dataset = write_dataset([[9] * 10, [5] * 10])
    first = joined(read_epoch(dataset, 2, epoch=1, num_threads=1))
    np.testing.assert_array_equal(first, joined(read_epoch(dataset, 2, epoch=1, num_threads=4)))
    assert (first != joined(read_epoch(dataset, 2, epoch=2))).any()
    assert (first != joined(read_epoch(dataset, 2, epoch=1, seed=4))).any()


def test_a_buffer_that_holds_the_shard_shuffles_all_of_its_rows(write_dataset: WriteDataset) -> None:
    ids = joined(read_epoch(write_dataset([[1000]]), 1))
    assert np.corrcoef(ids, np.arange(1000))[0, 1] == pytest.approx(0, abs=0.15)


def test_columns_keep_their_dtype_and_shape_and_can_be_written(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[6, 6]])
    assert dataset.columns == (
        Column(name="id", dtype="int64"),
        Column(name="twice", dtype="int64"),
        Column(name="half", dtype="float64"),
        Column(name="is_even", dtype="bool"),
        Column(name="vector", dtype="float32", shape=(3,)),
        Column(name="grid", dtype="int32", shape=(2, 2)),
    )
    for shuffle in (False, True):
        with ParquetFeed(
            dataset, columns=COLUMNS, rank=0, world_size=1, batch_size=4, shuffle=shuffle
        ) as feed:
            for batch in feed.epoch(0):
                for name in COLUMNS:
                    column = dataset.column(name)
                    assert batch[name].dtype == column.dtype
                    assert batch[name].shape == (4, *column.shape)
                    assert batch[name].flags.writeable


def test_batches_of_a_plain_feed_are_views_of_the_row_group_as_arrow_decoded_it(
    write_dataset: WriteDataset,
) -> None:
    dataset = write_dataset([[40]])
    names = ["vector", "id", "twice"]
    with ParquetFeed(dataset, columns=names, batch_size=10, shuffle=False) as feed:
        batches = list(feed.epoch(0))
    for name in names:
        starts = [batch[name].__array_interface__["data"][0] for batch in batches]
        assert np.diff(starts).tolist() == [10 * batches[0][name].strides[0]] * 3, name
    # Columns of the same number type share one matrix; a column of arrays uses Arrow's memory.
    assert batches[0]["twice"].strides == (16,)
    del batches[1:], batches[0]["id"], batches[0]["twice"]
    before = pa.total_allocated_bytes()
    del batches[0]["vector"]
    # A reader thread that the feed has asked to end may still hold memory for a moment.
    assert eventually(lambda: before - pa.total_allocated_bytes() >= 40 * 3 * 4)


def test_batches_of_a_shuffled_feed_are_views_of_the_rows_that_left_the_buffer_together(
    write_dataset: WriteDataset,
) -> None:
    dataset = write_dataset([[64] * 4])
    with ParquetFeed(dataset, columns=["vector"], batch_size=8, shuffle_buffer_rows=256) as feed:
        batches = list(feed.epoch(0))
    starts = [batch["vector"].__array_interface__["data"][0] for batch in batches]
    assert np.diff(starts[:4]).tolist() == [8 * 12] * 3  # 32 of 256 rows leave the buffer at once


@pytest.mark.parametrize("closes_feed", [False, True])
@pytest.mark.parametrize(("shuffle", "kinds"), [(False, {"reader"}), (True, {"reader", "shuffler"})])
def test_closing_epochs_or_their_feed_ends_their_threads(
    write_dataset: WriteDataset, shuffle: bool, kinds: set[str], closes_feed: bool
) -> None:
    dataset = write_dataset([[5] * 200])
    before = set(threading.enumerate())
    feed = ParquetFeed(dataset, columns=["id"], batch_size=2, shuffle=shuffle, shuffle_buffer_rows=50)
    epochs = [feed.epoch(0), feed.epoch(1)]
    for epoch in epochs:
        next(epoch)
    threads = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("sparkdl-")]
    assert len(threads) == (6 if shuffle else 4)
    assert {thread.name.split("-")[1].split("_")[0] for thread in threads} == kinds
    for closed in [feed] if closes_feed else epochs:
        closed.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    if closes_feed:
        for epoch in epochs:
            with pytest.raises(DataError, match="closed"):
                list(epoch)
        with pytest.raises(ParamError, match="closed"):
            next(feed.epoch(2))


@pytest.mark.parametrize("values", [[1, None, 3], [[1.0], [None], [2.0]], [[1.0], None, [2.0]]])
def test_a_null_is_an_error_of_its_column(tmp_path: Path, values: list[object]) -> None:
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet")
    dataset = scan_dataset(str(tmp_path))
    assert dataset.column("x").num_nulls == 1
    with (
        ParquetFeed(dataset, columns=["x"], rank=0, world_size=1, batch_size=2) as feed,
        pytest.raises(DataError, match=r"a\.parquet, row group 0.*'x' has 1 nulls\..*leave their rows out"),
    ):
        list(feed.epoch(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"batch_size": "8"}, "batch_size must be a whole number, got '8'"),
        ({"rank": 2, "world_size": 2}, r"rank must be in \[0, 2\), got 2"),
        ({"rank": -1}, "rank must be at least 0, got -1"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"columns": 3}, "A feed needs columns, each named once; got 3"),
        ({"columns": []}, r"each named once; got \[\]"),
        ({"columns": "id"}, "each named once; got 'id'"),
        ({"columns": ["id", "id"]}, "each named once; got"),
        ({"columns": ["id", 3]}, r"each named once; got \['id', 3\]"),
        ({"columns": {"x": 3}}, r"each named once; got \{'x': 3\}"),
        ({"cache": "ram"}, "cache must be 'memory', 'disk' or None, got 'ram'"),
        *(
            (
                {"read_timeout_s": timeout},
                rf"read_timeout_s must be a positive number of seconds, .*; got {re.escape(repr(timeout))}",
            )
            for timeout in (float("inf"), float("nan"), 1e300, 0, -1.0, True, "60", None)
        ),
    ],
)
def test_wrong_arguments_are_named(
    write_dataset: WriteDataset, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ParamError, match=message):
        ParquetFeed(write_dataset([[5]]), **{"columns": ["id"], "batch_size": 2, **options})


def test_unknown_columns_and_too_many_ranks_are_refused_with_what_is_possible(
    write_dataset: WriteDataset,
) -> None:
    dataset = write_dataset([[5]])
    with pytest.raises(DataError, match=r"no column 'idd'. The columns are: id, twice"):
        ParquetFeed(dataset, columns=["idd"], batch_size=2)
    with pytest.raises(ShardingError, match=r"\(numWorkers .*, world_size of a feed\) to 5\."):
        ParquetFeed(dataset, world_size=6, batch_size=2)


def test_integers_of_numpy_are_accepted_as_arguments(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[40, 60]])
    counts = {
        "batch_size": 8,
        "world_size": 2,
        "rank": 1,
        "seed": 3,
        "num_threads": 1,
        "shuffle_buffer_rows": 50,
        "read_ahead_bytes": 1 << 20,
        "cache_limit_bytes": 1 << 20,
        "read_timeout_s": 60,
    }
    found = []
    for kind in (int, np.int64):
        given = {name: kind(count) for name, count in counts.items()}
        with ParquetFeed(dataset, columns=["id"], cache="memory", **given) as feed:
            ids = [batch["id"].tolist() for batch in feed]
            found.append((ids, json.dumps(feed.state(given=kind(1)))))
    assert found[0] == found[1]


def test_lists_of_any_length_are_read_from_plain_files_with_the_shapes_argument(tmp_path: Path) -> None:
    tokens = [[], [1], [2, 3], [], [4, 5, 6]]
    grids = [[[float(n)] * n, [0.0] * n] for n in range(5)]
    pq.write_table(pa.table({"tokens": tokens, "grid": grids, "id": range(5)}), tmp_path / "a.parquet")
    with (
        ParquetFeed(tmp_path, columns=["tokens"], batch_size=5) as feed,
        pytest.raises(DataError, match=r"of 0 to 3 elements; .* shapes=\{'tokens': \(None,\)\}"),
    ):
        list(feed)
    with (
        ParquetFeed(tmp_path, columns=["grid"], batch_size=5) as feed,
        pytest.raises(DataError, match=r"of 0 to 4 elements; .* shapes=\{'grid': \(2, None\)\}"),
    ):
        list(feed)
    shapes = {"tokens": (None,), "grid": (2, None)}
    with ParquetFeed(tmp_path, shapes=shapes, batch_size=5, shuffle=False) as feed:
        (batch,) = feed
    for name, expected in (("tokens", tokens), ("grid", grids)):
        assert batch[name].dtype == object
        assert [
            [*map(np.ndarray.tolist, row)] if name == "grid" else row.tolist() for row in batch[name]
        ] == expected
    packer = SequencePacker(6, batch_size=1)
    with ParquetFeed(tmp_path, columns=["tokens"], shapes=shapes, batch_size=2, shuffle=False) as feed:
        (packed,) = packer.pack(batch["tokens"] for batch in feed)
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 5, 6]]


def test_shapes_that_fit_no_column_are_refused(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[5]])
    for shapes, message in (
        ({"half": (None,)}, r"\(None,\) for column 'half', which is not an array"),
        ({"grid": (None,)}, r"\(None,\) for column 'grid', which has 2 levels of arrays"),
        ({"vector": 3}, "3 for column 'vector', which is an array"),
        ({"vector": (-1,)}, r"\(-1,\) for column 'vector'"),
    ):
        with pytest.raises(ParamError, match=message):
            ParquetFeed(dataset.url, shapes=shapes, batch_size=2)
    with pytest.raises(DataError, match="There is no column 'tokens'"):
        ParquetFeed(dataset.url, shapes={"tokens": (None,)}, batch_size=2)
    with pytest.raises(ParamError, match=r"shapes of its columns: id \(\), .*vector \(3,\)"):
        ParquetFeed(dataset, shapes={"vector": (3,)}, batch_size=2)
    with ParquetFeed(dataset.url, columns=["id"], shapes={"vector": (3,)}, batch_size=2) as feed:
        assert list(next(iter(feed))) == ["id"]


@pytest.mark.parametrize("options", [{"shuffle": False}, {}, {"shapes": {"x": (None,)}}])
def test_lists_that_are_all_empty_are_rows_without_elements(tmp_path: Path, options: dict[str, Any]) -> None:
    lists = pa.array([[]] * 50, pa.list_(pa.float32()))
    pq.write_table(pa.table({"x": lists, "id": range(50)}), tmp_path / "a.parquet", row_group_size=20)
    with ParquetFeed(tmp_path, batch_size=7, shuffle_buffer_rows=9, **options) as feed:
        batches = list(feed)
    assert sorted(row for batch in batches for row in batch["id"].tolist()) == list(range(50))
    for batch in batches:
        assert [row.shape for row in batch["x"]] == [(0,)] * len(batch["id"])


def test_partition_column_is_left_out_and_named_when_it_is_requested(tmp_path: Path) -> None:
    for value in (1, 2):
        folder = tmp_path / f"k={value}"
        folder.mkdir()
        pq.write_table(pa.table({"id": [value]}), folder / "a.parquet")
    with ParquetFeed(tmp_path, batch_size=2, shuffle=False) as feed:
        assert {name: rows.tolist() for name, rows in next(iter(feed)).items()} == {"id": [1, 2]}
    with pytest.raises(
        DataError, match=r"'k' is a partition column: .* folder names \(k=1/a\.parquet\).*materialize"
    ):
        ParquetFeed(tmp_path, columns=["id", "k"], batch_size=2)


def test_files_with_short_and_with_long_offsets_have_the_same_columns(tmp_path: Path) -> None:
    """pandas 3 and polars write the second form, pandas 2 and Spark the first."""
    values: dict[str, list[Any]] = {
        "word": ["a", "bc"],
        "data": [b"x", b"yz"],
        "vector": [[1.0, 2.0], [3.0, 4.0]],
        "words": [["a", "b"], ["b", "c"]],
    }
    short = pa.schema(
        {
            "word": pa.string(),
            "data": pa.binary(),
            "vector": pa.list_(pa.float64()),
            "words": pa.list_(pa.string()),
        }
    )
    long = pa.schema(
        {
            "word": pa.large_string(),
            "data": pa.large_binary(),
            "vector": pa.large_list(pa.float64()),
            "words": pa.large_list(pa.large_string()),
        }
    )
    for number, schema in enumerate((short, long)):
        pq.write_table(pa.table(values, schema), tmp_path / f"part-{number}.parquet")
    with ParquetFeed(str(tmp_path), batch_size=4, shuffle=False) as feed:
        (batch,) = feed.epoch(0)
    assert {name: batch[name].tolist() for name in values} == {
        name: rows * 2 for name, rows in values.items()
    }


def test_categories_of_pandas_are_fed_as_their_values(tmp_path: Path) -> None:
    times = [pd.Timestamp("2020-01-01 12:00"), pd.Timestamp("2021-06-01")]
    values: dict[str, Any] = {
        "number": [7, 8, 7, 7],
        "word": ["b", "a", "b", "b"],
        "data": [b"x", b"y", b"x", b"x"],
        "time": [times[0], times[1], times[0], times[0]],
        "flag": [True, False, True, True],
    }
    frame = pd.DataFrame({name: pd.Categorical(items) for name, items in values.items()})
    words = pa.array(
        [["a", "b"], ["b", "b"], ["a", "a"], ["b", "a"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))
    )
    table = pa.Table.from_pandas(frame).append_column("words", words)
    pq.write_table(table, tmp_path / "part-0.parquet")
    plain = pd.DataFrame(values).assign(words=words.to_pylist())
    plain.to_parquet(tmp_path / "part-1.parquet")
    with ParquetFeed(str(tmp_path), batch_size=8, shuffle=False) as feed:
        (batch,) = feed.epoch(0)
    for name, items in {**values, "words": words.to_pylist()}.items():
        expected = np.array(items * 2, batch[name].dtype)
        np.testing.assert_array_equal(batch[name], expected)
    chosen = RowFilter(["word"], lambda columns: columns["word"] == "a")
    with ParquetFeed(str(tmp_path), columns=["number"], batch_size=8, row_filter=chosen) as feed:
        assert next(feed.epoch(0))["number"].tolist() == [8, 8]
