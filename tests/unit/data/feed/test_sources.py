"""The sources that a feed accepts, and its errors for everything else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetFeed, scan_dataset
from sparkdl.data.feed.sources import find_dataset
from sparkdl.errors import DataError, FileVanishedError, ParamError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for index in range(2):
        pq.write_table(pa.table({"x": np.arange(10) + 10 * index}), folder / f"p{index}.parquet")
    return folder


def test_a_single_file_is_a_source(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(folder)
    for source in (folder / "p1.parquet", f"file://{folder}/p1.parquet", "p1.parquet"):
        with ParquetFeed(source, batch_size=20, shuffle=False) as feed:
            (batch,) = feed
        np.testing.assert_array_equal(batch["x"], np.arange(10, 20))
    named_like_a_file = tmp_path / "spark.parquet"
    folder.rename(named_like_a_file)
    assert find_dataset(named_like_a_file, None).num_rows == 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"There is nothing at .*/nowhere\. Fix the path"),
        ("nowhere.parquet", r"There is nothing at .*/nowhere\.parquet\. Fix the path"),
        ("rows/*.parquet", r"/\*\.parquet is a pattern, and a folder is needed.*paths="),
        ("notes.txt", r"notes\.txt is a file, and a folder is needed.*paths=\['notes\.txt'\]"),
        ("empty", r"no Parquet files in .*/empty: the folder is empty"),
        (
            "others",
            r"no Parquet files in .*/others: names have to end in \.parquet, and there are part-0\. .*paths=",
        ),
    ],
)
def test_error_for_a_source_without_parquet_files_says_what_is_there_instead(
    folder: Path, name: str, message: str
) -> None:
    (folder.parent / "notes.txt").write_text("text")
    (folder.parent / "empty").mkdir()
    (folder.parent / "others").mkdir()
    (folder.parent / "others" / "_SUCCESS").touch()
    os.link(folder / "p0.parquet", folder.parent / "others" / "part-0")
    for read in (lambda url: ParquetFeed(url, batch_size=4), scan_dataset):
        with pytest.raises(DataError, match=message):
            read(f"{folder.parent}/{name}")
    assert scan_dataset(f"{folder.parent}/others", paths=["part-0"]).num_rows == 10


def ids_in(source: Path) -> list[int]:
    with ParquetFeed(source, batch_size=7, shuffle=False) as feed:
        return [number for batch in feed for number in batch["x"].tolist()]


def test_rows_behind_links_and_in_partition_folders_of_any_name_are_read(
    folder: Path, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    for subfolder in ("_year=1/_day=2", ".hidden", "_hidden"):
        (table / subfolder).mkdir(parents=True)
        os.link(folder / "p0.parquet", table / subfolder / "a.parquet")
    (table / "link").symlink_to(folder)
    (table / "z.parquet").symlink_to(folder / "p1.parquet")
    assert ids_in(table) == [*range(10), *range(20), *range(10, 20)]


def test_a_folder_below_a_source_that_cannot_be_listed_is_an_error(folder: Path) -> None:
    (folder / "again").symlink_to(folder)
    with pytest.raises(DataError, match="symbolic link leads back"):
        scan_dataset(str(folder))


def test_a_file_without_rows_may_have_other_columns(folder: Path) -> None:
    pq.write_table(pa.table({}), folder / "a.parquet")
    pq.write_table(pa.table({"x": pa.nulls(0)}), folder / "p00.parquet")
    assert ids_in(folder) == [*range(20)]


def test_a_named_file_that_does_not_exist_is_named(folder: Path) -> None:
    with pytest.raises(FileVanishedError, match=r"There is no Parquet file .*/p7\.parquet. Fix its name"):
        scan_dataset(str(folder), paths=["p7.parquet"])


@pytest.mark.parametrize("name", ["nowhere", "rows/p0.parquet"])
def test_a_cache_folder_that_cannot_be_used_is_named(folder: Path, name: str) -> None:
    with pytest.raises(ParamError, match=rf"cache_folder '.*/{name}' cannot be written: .*Give a folder"):
        ParquetFeed(folder, batch_size=4, cache="disk", cache_folder=f"{folder.parent}/{name}")


@pytest.mark.parametrize("source", [["a.parquet"], 3, None])
def test_unsupported_source_is_refused_with_its_type(source: object) -> None:
    with pytest.raises(ParamError, match=rf"got {type(source).__name__}\. .*paths="):
        ParquetFeed(source, batch_size=4)  # type: ignore[arg-type]
