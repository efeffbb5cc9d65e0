"""Folders of tables whose log says which files and rows are valid are refused, wherever a folder is read."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetFeed, scan_dataset
from sparkdl.data.dataset.footers import urls_for_spark
from sparkdl.data.petastorm.containment import install
from sparkdl.errors import DataError

LOGS = {
    "_delta_log/00000000000000000000.json": "a Delta table",
    ".hoodie/hoodie.properties": "a Hudi table",
    "metadata/v2.metadata.json": "an Iceberg table",
    "metadata/00001-5f0e.gz.metadata.json": "an Iceberg table",
    "_spark_metadata/0": "what a stream of Spark wrote",
}
DATA = "data/day=1/part-0.parquet"


def write_table(folder: Path, log: str) -> Path:
    for name in (log, DATA):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / log).write_text("{}")
    pq.write_table(pa.table({"y": [1, 2, 3]}), folder / DATA)
    return folder


def feed(url: str) -> Any:
    return ParquetFeed(url, batch_size=2)


def batch_reader(url: str) -> Any:
    install()
    from petastorm import make_batch_reader

    return make_batch_reader(f"file://{url}", workers_count=1)


@pytest.mark.parametrize("read", [feed, scan_dataset, urls_for_spark, batch_reader])
@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("part", ["", "data", "data/day=1"])
def test_a_folder_of_a_table_with_a_log_is_refused(tmp_path: Path, read: Any, log: str, part: str) -> None:
    table = write_table(tmp_path / "table", log)
    with pytest.raises(DataError, match=rf"{table} is {LOGS[log]}, and its log .*spark\.read.*paths=\["):
        read(str(table / part))


@pytest.mark.parametrize("log", LOGS)
def test_a_folder_that_holds_such_a_table_is_refused(tmp_path: Path, log: str) -> None:
    table = write_table(tmp_path / "lake" / "table", log)
    for read in (feed, urls_for_spark):
        with pytest.raises(DataError, match=f"{table} is {LOGS[log]}"):
            read(str(tmp_path / "lake"))
    for pattern in ("*", "t*", "{table,other}"):
        with pytest.raises(DataError, match=f"{table} is {LOGS[log]}"):
            urls_for_spark(str(tmp_path / "lake" / pattern))


def test_files_that_are_named_are_read_as_they_are(tmp_path: Path) -> None:
    table = write_table(tmp_path, next(iter(LOGS)))
    assert scan_dataset(str(table), paths=[DATA]).num_rows == 3
    with feed(str(table / DATA)) as rows:
        assert len(rows) == 2
    assert urls_for_spark(str(table / DATA)) == [str(table / DATA)]


def test_folders_with_such_names_and_other_content_are_data(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "metadata", "metadata/notes.json")
    assert scan_dataset(str(folder)).num_rows == 3


def test_tables_on_object_stores_are_refused() -> None:
    root = f"memory://{uuid.uuid4().hex}/table"
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file(f"{root}/_delta_log/00000000000000000000.json", b"{}")
    with filesystem.open(f"{root}/{DATA}", "wb") as file:
        pq.write_table(pa.table({"y": [1]}), file)
    for part in ("", "/data/day=1"):
        with pytest.raises(DataError, match="is a Delta table"):
            feed(f"{root}{part}")
