"""The feed as a library: its sources, iteration, matrices, caches and row filters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetDataset, ParquetFeed, RowFilter, Store
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.store.store import write_manifest
from sparkdl.errors import DataError, FileVanishedError, ParamError, ShardingError

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


def ids(feed: ParquetFeed) -> np.ndarray:
    return np.concatenate([batch["id"] for batch in feed])


def test_a_feed_reads_a_folder_a_path_and_a_described_dataset_alike(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10, 3], [20]])
    for source in (dataset, dataset.url, Path(dataset.url), f"file://{dataset.url}"):
        with ParquetFeed(source, batch_size=7) as feed:
            assert list(next(iter(feed))) == ["id", "twice", "half", "is_even", "vector", "grid"]
            feed.set_epoch(0)
            np.testing.assert_array_equal(np.sort(ids(feed)), np.arange(33))


def test_store_is_a_source_only_if_it_holds_exactly_one_dataset(
    write_dataset: WriteDataset, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    with pytest.raises(DataError, match="holds no dataset"):
        ParquetFeed(store, batch_size=7)
    dataset = write_dataset([[10]])
    write_manifest(dataset, open_location(dataset.url))
    with ParquetFeed(store, batch_size=7) as feed:
        np.testing.assert_array_equal(np.sort(ids(feed)), np.arange(10))
    other = tmp_path / "other"
    other.mkdir()
    write_manifest(dataset, open_location(str(other)))
    with pytest.raises(DataError, match="holds 2 datasets .dataset, other."):
        ParquetFeed(store, batch_size=7)


def test_iterating_goes_from_epoch_to_epoch_and_set_epoch_chooses_one(write_dataset: WriteDataset) -> None:
    with ParquetFeed(write_dataset([[5] * 10]), columns=["id"], batch_size=7) as feed:
        assert len(feed) == feed.steps_per_epoch == 8
        by_number = [np.concatenate([batch["id"] for batch in feed.epoch(number)]) for number in range(3)]
        feed.set_epoch(0)
        for expected in by_number:
            np.testing.assert_array_equal(ids(feed), expected)
        feed.set_epoch(1)
        np.testing.assert_array_equal(ids(feed), by_number[1])
        with pytest.raises(ParamError, match="at least 0, got -1"):
            feed.set_epoch(-1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_columns_of_one_type_come_as_one_matrix(write_dataset: WriteDataset, shuffle: bool) -> None:
    columns = {"pair": ["id", "twice"], "label": "is_even", "id": "id", "one": ["half"]}
    with ParquetFeed(write_dataset([[5] * 4]), columns=columns, batch_size=7, shuffle=shuffle) as feed:
        for batch in feed:
            assert list(batch) == list(columns)
            assert batch["pair"].flags.c_contiguous
            np.testing.assert_array_equal(batch["pair"], np.stack([batch["id"], 2 * batch["id"]], axis=1))
            np.testing.assert_array_equal(batch["label"], batch["id"] % 2 == 0)
            np.testing.assert_array_equal(batch["one"], batch["id"][:, None] / 2)


def test_columns_of_several_types_make_no_matrix(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[5]])
    with pytest.raises(DataError, match="'id' holds int64 and 'half' float64"):
        ParquetFeed(dataset, columns={"pair": ["id", "half"]}, batch_size=5)
    with pytest.raises(DataError, match="'vector' arrays of float32"):
        ParquetFeed(dataset, columns={"pair": ["half", "vector"]}, batch_size=5)


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_cache_reads_no_file_again_and_changes_no_row(
    write_dataset: WriteDataset, cache: str, shuffle: bool, tmp_path: Path
) -> None:
    dataset = write_dataset([[10, 30], [20]])
    options = {"batch_size": 7, "shuffle": shuffle, "columns": ["id", "vector", "half"]}
    with ParquetFeed(dataset, **options) as feed:
        expected = [np.concatenate([batch["id"] for batch in feed.epoch(number)]) for number in range(3)]
    folder = tmp_path / "cache"
    folder.mkdir()
    with ParquetFeed(dataset, cache=cache, cache_folder=str(folder), **options) as feed:
        np.testing.assert_array_equal(ids(feed), expected[0])
        for path in Path(dataset.url).iterdir():
            path.unlink()
        for number in (1, 2):
            seen = []
            for batch in feed.epoch(number):
                np.testing.assert_array_equal(batch["vector"], np.outer(batch["id"], [1, 2, 3]))
                np.testing.assert_array_equal(batch["half"], batch["id"] / 2)
                seen.append(batch["id"].copy())
                # The caller's changes of a batch do not affect later batches.
                batch["id"][:] = batch["vector"][:] = -1
            np.testing.assert_array_equal(np.concatenate(seen), expected[number])
        assert bool(list(folder.iterdir())) == (cache == "disk")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_cache_in_memory_keeps_strings_and_arrays_of_any_length_and_counts_their_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shuffle: bool
) -> None:
    numbers = range(60)
    texts = [f"row {number} of many" for number in numbers]
    nested = [[[number] * (number % 4), [number]] for number in numbers]
    table = pa.table(
        {"text": texts, "list": [[number] * (number % 5) for number in numbers], "nested": nested}
    )
    pq.write_table(table.append_column("id", pa.array(numbers)), tmp_path / "a.parquet", row_group_size=20)
    least = sum(map(sys.getsizeof, texts)) + table["list"].nbytes + table["nested"].nbytes
    options = {
        "shapes": {"list": (None,), "nested": (2, None)},
        "batch_size": 7,
        "shuffle": shuffle,
        "cache": "memory",
    }
    with ParquetFeed(tmp_path, cache_limit_bytes=least, **options) as feed:
        assert len(ids(feed)) == 60
    assert "raise cache_limit_bytes" in caplog.text
    with ParquetFeed(tmp_path, cache_limit_bytes=least + 60 * 1000, **options) as feed:
        assert len(ids(feed)) == 60
        (tmp_path / "a.parquet").unlink()
        for _ in range(2):
            for batch in feed:
                for number, text, row, inner in zip(
                    batch["id"], batch["text"], batch["list"], batch["nested"], strict=True
                ):
                    assert text == texts[number]
                    assert row.tolist() == [number] * (number % 5)
                    assert [part.tolist() for part in inner] == nested[number]
                    row[:] = -1  # the caller's changes of a batch do not affect later batches
                    inner[1][:] = -1


def test_a_cache_on_disk_says_that_it_keeps_no_strings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "id": [0, 1]}), tmp_path / "a.parquet")
    with ParquetFeed(tmp_path, batch_size=2, cache="disk", cache_folder=str(tmp_path)) as feed:
        for _ in range(2):
            assert sorted(ids(feed)) == [0, 1]
    (record,) = caplog.records
    assert "read again in every epoch; cache='memory' keeps them" in record.message


def test_cache_keeps_rows_up_to_its_limit_and_warns_once(
    write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = write_dataset([[10]] * 5)
    files = sorted(Path(dataset.url).iterdir())
    options = {"columns": ["id"], "batch_size": 7, "shuffle": False, "num_threads": 1, "cache": "memory"}
    with ParquetFeed(dataset, cache_limit_bytes=2 * 80, **options) as feed:
        np.testing.assert_array_equal(ids(feed), np.arange(50))
        for file in files[:2]:
            file.unlink()
        np.testing.assert_array_equal(ids(feed), np.arange(50))
        files[2].unlink()
        with pytest.raises(FileVanishedError, match=files[2].name):
            ids(feed)
    (message,) = [record.message for record in caplog.records if "cache" in record.message]
    assert "raise cache_limit_bytes" in message


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_that_pass_a_filter_are_shared_exactly(
    write_dataset: WriteDataset, world_size: int, cache: str | None, shuffle: bool
) -> None:
    dataset = write_dataset([[10, 30], [1, 2], [20]])
    row_filter = RowFilter(["is_even", "twice"], lambda values: values["is_even"] & (values["twice"] > 30))
    counts, seen = [], []
    for rank in range(world_size):
        with ParquetFeed(
            dataset,
            columns=["id", "vector"],
            rank=rank,
            world_size=world_size,
            batch_size=4,
            row_filter=row_filter,
            cache=cache,
            shuffle=shuffle,
        ) as feed:
            batches = list(feed)
            assert [len(batch["id"]) for batch in batches] == [
                feed.rows_in_step(step)[rank] for step in range(feed.steps_per_epoch)
            ]
            for batch in batches:
                np.testing.assert_array_equal(batch["vector"], np.outer(batch["id"], [1, 2, 3]))
            seen += [batch["id"] for batch in batches]
            counts.append(sum(len(batch["id"]) for batch in batches))
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(16, 63, 2))
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("names", ["word", ["word"]])
def test_a_filter_may_look_at_strings_that_are_not_fed(tmp_path: Path, names: str | list[str]) -> None:
    pq.write_table(pa.table({"x": [1, 2, 3], "word": ["a", "b", "a"]}), tmp_path / "a.parquet")
    row_filter = RowFilter(names, lambda values: values["word"] == "a")
    with ParquetFeed(tmp_path, columns=["x"], batch_size=4, shuffle=False, row_filter=row_filter) as feed:
        assert next(iter(feed))["x"].tolist() == [1, 3]


def test_a_filter_that_cannot_work_is_named(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10]])

    def feed_of(columns: list[str], keep: object, **options: object) -> ParquetFeed:
        return ParquetFeed(
            dataset, columns=["id"], batch_size=4, row_filter=RowFilter(columns, keep), **options
        )

    with pytest.raises(DataError, match=r"part-00000.parquet, row group 0 failed: .* column 'idd'"):
        feed_of(["idd"], lambda values: values["idd"] > 0)
    with pytest.raises(DataError, match="one boolean per row"):
        feed_of(["id"], lambda values: values["id"])
    with pytest.raises(DataError, match="ZeroDivisionError"):
        feed_of(["id"], lambda values: 1 // 0)
    with pytest.raises(DataError, match="None of the 10 rows passes"):
        feed_of(["id"], lambda values: values["id"] < 0)
    with pytest.raises(ShardingError, match="3 rows cannot be shared by 4 ranks"):
        feed_of(["id"], lambda values: values["id"] < 3, world_size=4)
    with pytest.raises(DataError, match="row_filter is a str"):
        ParquetFeed(dataset, batch_size=4, row_filter="id > 3")


def test_row_filter_with_varying_results_is_an_error(write_dataset: WriteDataset) -> None:
    answers = iter([5, 4])
    row_filter = RowFilter(["id"], lambda values: values["id"] < next(answers))
    with (
        ParquetFeed(write_dataset([[10]]), columns=["id"], batch_size=4, row_filter=row_filter) as feed,
        pytest.raises(DataError, match="4 rows pass the row filter now, but 5 did"),
    ):
        list(feed)


def test_waiting_time_of_the_caller_is_counted(write_dataset: WriteDataset) -> None:
    with ParquetFeed(write_dataset([[50]]), columns=["id"], batch_size=10) as feed:
        assert feed.waited_s == 0
        next(iter(feed))
        assert feed.waited_s > 0
