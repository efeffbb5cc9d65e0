"""Damaged, changed and vanished files: each has its own error that names file, row group and column."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkdl.data import ParquetDataset, ParquetFeed, RowFilter, scan_dataset
from sparkdl.data.dataset.arrow import ARE_CHECKED
from sparkdl.data.files.changed_files import WatchedFiles, version_of
from sparkdl.errors import (
    ColumnMismatchError,
    CorruptFileError,
    DataError,
    EmptyDatasetError,
    FileChangedError,
    FileVanishedError,
)

ROWS = 400  # number of rows of each of two files with two row groups
FIRST, SECOND = "part-0.parquet", "part-1.parquet"


def table_of(start: int) -> pa.Table:
    number = np.arange(start, start + ROWS)
    return pa.table(
        {
            "id": number,
            "x": np.random.default_rng(start).random(ROWS),
            "v": pa.array(np.stack([number, number], 1).tolist(), pa.list_(pa.float32())),
        }
    )


def write(path: Path, table: pa.Table, **options: object) -> None:
    checksums = {"write_page_checksum": True} if ARE_CHECKED else {}
    pq.write_table(
        table, path, **{"row_group_size": ROWS // 2, "use_dictionary": False, **checksums, **options}
    )


@pytest.fixture
def dataset(tmp_path: Path) -> ParquetDataset:
    for index, name in enumerate((FIRST, SECOND)):
        write(tmp_path / name, table_of(index * ROWS))
    return scan_dataset(str(tmp_path))


def read(dataset: ParquetDataset, **options: object) -> int:
    with ParquetFeed(dataset, **{"batch_size": 64, "shuffle": False, **options}) as feed:
        return sum(len(batch["id"]) for batch in feed.epoch(0))


def without_versions(dataset: ParquetDataset) -> ParquetDataset:
    """The dataset as described on a filesystem without modification times."""
    return replace(dataset, versions={})


def damage(path: Path, row_group: int, column: int, where: slice) -> None:
    """Overwrite a part of the pages of one column of one row group."""
    chunk = pq.read_metadata(path).row_group(row_group).column(column)
    content = bytearray(path.read_bytes())
    start = chunk.data_page_offset
    pages = content[start : start + chunk.total_compressed_size]
    pages[where] = bytes(byte ^ 0xFF for byte in pages[where])
    content[start : start + chunk.total_compressed_size] = pages
    status = path.stat()
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as after damage by a disk


SEEN_BY_CHECKSUMS = pytest.mark.skipif(not ARE_CHECKED, reason="this pyarrow knows no checksums of pages")


@pytest.mark.parametrize(
    "where",
    [
        slice(None),
        pytest.param(slice(100, 140), marks=SEEN_BY_CHECKSUMS),
        pytest.param(slice(-1, None), marks=SEEN_BY_CHECKSUMS),
    ],
)
@pytest.mark.parametrize("row_group", [0, 1])
def test_a_damaged_page_is_an_error_with_file_row_group_and_column(
    dataset: ParquetDataset, row_group: int, where: slice
) -> None:
    damage(Path(dataset.url) / SECOND, row_group, 1, where)
    with pytest.raises(
        CorruptFileError,
        match=rf"part-1\.parquet, row group {row_group}, column 'x' failed: .*write it again",
    ):
        read(dataset)
    assert read(dataset, columns=["id", "v"]) == 2 * ROWS, "other columns are as they were"


@SEEN_BY_CHECKSUMS
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_a_page_is_detected(dataset: ParquetDataset, data: st.DataObject) -> None:
    path = Path(dataset.url) / SECOND
    write(path, table_of(ROWS), compression="none")
    chunk = pq.read_metadata(path).row_group(1).column(0)
    end = chunk.data_page_offset + chunk.total_compressed_size
    position = data.draw(st.integers(end - 8 * ROWS // 2, end - 1))  # the values after the header of the page
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(content))
    with pytest.raises(CorruptFileError, match=r"part-1\.parquet, row group 1, column 'id'"):
        read(without_versions(dataset))


@pytest.mark.parametrize("length", [0, 3, 1000, -1, -60])
def test_a_file_that_was_cut_off_is_damaged(dataset: ParquetDataset, length: int) -> None:
    path = Path(dataset.url) / SECOND
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptFileError, match=r"part-1\.parquet, row group 0 failed: .*end of the file"):
        read(without_versions(dataset))
    with pytest.raises(CorruptFileError, match=r"part-1\.parquet cannot be read: .*Write it again"):
        scan_dataset(dataset.url)


def test_a_footer_that_makes_no_sense_is_damage(dataset: ParquetDataset) -> None:
    path = Path(dataset.url) / SECOND
    content = bytearray(path.read_bytes())
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[start : start + 20] = b"\xff" * 20
    path.write_bytes(bytes(content))
    with pytest.raises(CorruptFileError, match=r"part-1\.parquet cannot be read: .*Write it again"):
        scan_dataset(dataset.url)


def test_damaged_page_is_named_when_lengths_of_arrays_are_looked_up(dataset: ParquetDataset) -> None:
    damage(Path(dataset.url) / FIRST, 0, 2, slice(None))
    with pytest.raises(CorruptFileError, match=r"part-0\.parquet, row group 0, column 'v'"):
        scan_dataset(dataset.url)


def test_file_that_vanishes_or_changes_between_epochs_is_an_error(dataset: ParquetDataset) -> None:
    path = Path(dataset.url) / SECOND
    with ParquetFeed(dataset, batch_size=64) as feed:
        assert sum(1 for _ in feed.epoch(0)) == len(feed)
        write(path, table_of(7 * ROWS))  # the same number of rows and types
        with pytest.raises(FileChangedError, match=r"part-1\.parquet, row group \d failed"):
            list(feed.epoch(1))
        path.unlink()
        with pytest.raises(FileVanishedError, match=r"part-1\.parquet, row group \d failed"):
            list(feed.epoch(2))


def test_rewritten_file_is_detected_by_its_fsspec_details(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    watched = WatchedFiles(fsspec.filesystem("file").open, {})
    for _ in range(2):
        watched.open(str(path)).close()
    path.write_bytes(b"afterwards")
    with pytest.raises(FileChangedError, match="written again since it was first read"):
        watched.open(str(path))


def test_damaged_file_is_detected_on_filesystems_without_file_versions(dataset: ParquetDataset) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(dataset.url, "/changing", recursive=True)
    try:
        with ParquetFeed(scan_dataset("memory://changing"), batch_size=64, columns=["id"]) as feed:
            assert sum(len(batch["id"]) for batch in feed.epoch(0)) == 2 * ROWS
            memory.pipe_file("/changing/" + SECOND, b"PAR1")
            with pytest.raises(CorruptFileError, match=r"part-1\.parquet, row group"):
                list(feed.epoch(1))
    finally:
        memory.rm("/changing", recursive=True)


def other_type(table: pa.Table) -> pa.Table:
    return table.set_column(1, "x", table["x"].cast(pa.float32()))


def other_length(table: pa.Table) -> pa.Table:
    return table.set_column(2, "v", pa.array([[1.0, 2.0, 3.0]] * ROWS, pa.list_(pa.float32())))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (other_type, ColumnMismatchError, "0 failed: Column 'x' holds float here, but float64 elsewhere"),
        (other_length, ColumnMismatchError, "0 failed: Column 'v' .* 3 elements; .* have 2"),
        (lambda table: table.drop_columns(["x"]), FileChangedError, "0 failed: column 'x' is no longer"),
        (lambda table: table.slice(0, 300), FileChangedError, "1 failed: it has 100 rows now, but had 200"),
        (lambda table: table.slice(0, 200), FileChangedError, "1 failed: the file has only 1 row group now"),
        (
            lambda table: table.set_column(0, "id", pa.array([*range(399), None])),
            DataError,
            "1 failed: Column 'id' has 1 nulls",
        ),
    ],
)
def test_file_replaced_after_the_dataset_was_described_is_an_error_with_the_difference(
    dataset: ParquetDataset, change: Callable[[pa.Table], pa.Table], error: type[DataError], message: str
) -> None:
    write(Path(dataset.url) / SECOND, change(table_of(ROWS)))
    with pytest.raises(error, match=rf"part-1\.parquet, row group {message}"):
        read(without_versions(dataset))
    with pytest.raises(FileChangedError, match=r"part-1\.parquet, row group 0 failed: it was written again"):
        read(dataset)


def test_file_replaced_by_an_equal_one_before_it_was_opened_is_detected(dataset: ParquetDataset) -> None:
    with ParquetFeed(dataset, batch_size=64) as feed:
        state = feed.state()
    path = Path(dataset.url) / SECOND
    write(path, table_of(7 * ROWS))  # the same number of rows and types
    path.touch()
    with pytest.raises(FileChangedError, match=r"part-1\.parquet, row group 0 failed: it was written again"):
        read(dataset)
    with (
        ParquetFeed(dataset.url, batch_size=64) as feed,
        pytest.raises(DataError, match="changed: the files, which were written again or copied"),
    ):
        feed.resume(state)
    with ParquetFeed(without_versions(dataset), batch_size=64) as feed:
        feed.resume(state)  # without versions the change cannot be detected
        unversioned = {**state["of"], "the files, which were written again or copied": None}
        assert feed.state() == {**state, "of": unversioned}


def test_version_of_a_file_is_the_same_from_a_listing_and_from_the_file() -> None:
    class Opened:
        def __init__(self, **details: object) -> None:
            self.details = details

    listed = Opened(size=9, ETag='"abc"', LastModified="2026-01-01 00:00:00.123000+00:00")
    asked = Opened(size=9, ETag="abc", LastModified="2026-01-01 00:00:00+00:00")
    assert version_of(listed, "f") == version_of(asked, "f") != version_of(Opened(size=9, ETag="abd"), "f")
    assert version_of(Opened(size=9, mtime=1.5), "f") != version_of(Opened(size=9, mtime=2.5), "f")
    assert version_of(Opened(size=9), "f") != version_of(Opened(size=8), "f")
    assert version_of(object(), "f") is None


def test_columns_that_differ_between_files_are_named_with_both_files(dataset: ParquetDataset) -> None:
    path = Path(dataset.url) / SECOND
    write(path, other_type(table_of(ROWS)))
    with pytest.raises(
        ColumnMismatchError,
        match=r"'x' has the type double in /\S+/part-0\.parquet and float in /\S+/part-1\.parquet",
    ):
        scan_dataset(dataset.url)
    write(path, table_of(ROWS).drop_columns(["x"]))
    with pytest.raises(ColumnMismatchError, match=r"'x' is in /\S+/part-0\.parquet, but not in /\S+/part-1"):
        scan_dataset(dataset.url)


def test_a_type_that_cannot_be_fed_is_named_with_file_and_column(dataset: ParquetDataset) -> None:
    struct = pa.array([{"a": 1}] * ROWS, pa.struct([("a", pa.int32())]))
    for name in (FIRST, SECOND):
        write(Path(dataset.url) / name, table_of(0).set_column(1, "x", struct))
    with pytest.raises(DataError, match=r"/part-0\.parquet cannot be fed: Column 'x' has .* type struct"):
        scan_dataset(dataset.url)
    assert scan_dataset(dataset.url, ["v"]).columns[0].name == "v"
    with pytest.raises(DataError, match=r"no column 'z'. The columns are: id, x, v"):
        scan_dataset(dataset.url, ["z"])


def test_a_dataset_without_rows_is_an_error_of_its_own(dataset: ParquetDataset, tmp_path: Path) -> None:
    with pytest.raises(EmptyDatasetError, match="None of the 800 rows passes the row filter"):
        ParquetFeed(dataset, batch_size=64, row_filter=RowFilter(["x"], lambda values: values["x"] > 2))
    for name in (FIRST, SECOND):
        write(tmp_path / name, table_of(0).slice(0, 0))
    with pytest.raises(EmptyDatasetError, match="have no rows"):
        ParquetFeed(dataset.url, batch_size=64)
    for name in (FIRST, SECOND):
        (tmp_path / name).unlink()
    with pytest.raises(EmptyDatasetError, match="There are no Parquet files"):
        ParquetFeed(dataset.url, batch_size=64)


def test_counting_for_a_row_filter_names_the_damaged_column_too(dataset: ParquetDataset) -> None:
    damage(Path(dataset.url) / SECOND, 1, 1, slice(None))
    with pytest.raises(CorruptFileError, match=r"part-1\.parquet, row group 1, column 'x'"):
        ParquetFeed(dataset, batch_size=64, row_filter=RowFilter(["x"], lambda values: values["x"] > 0.5))


def test_a_file_written_again_after_its_rows_were_counted_is_noticed(dataset: ParquetDataset) -> None:
    with ParquetFeed(
        dataset, batch_size=64, row_filter=RowFilter(["id"], lambda values: values["id"] >= 0)
    ) as feed:
        write(Path(dataset.url) / SECOND, table_of(7 * ROWS))
        with pytest.raises(FileChangedError, match=r"part-1\.parquet, row group \d failed: it was written"):
            list(feed.epoch(0))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_not_reported_as_damaged(dataset: ParquetDataset) -> None:
    (Path(dataset.url) / SECOND).chmod(0)
    with pytest.raises(DataError, match=r"part-1\.parquet, row group 0 failed: PermissionError") as raised:
        read(dataset)
    assert type(raised.value) is DataError
