"""Delta tables that are read in place: the rows of their newest version, unless their files hold others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from sparkdl.data import ParquetFeed, scan_dataset
from sparkdl.data.dataset.footers import urls_for_spark
from sparkdl.errors import DataError

deltalake = pytest.importorskip("deltalake", reason="deltalake, of the extra delta, is not installed")


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A table whose folder has files with rows that were deleted, and one of an earlier version."""
    folder = str(tmp_path / "a table")
    deltalake.write_deltalake(folder, pa.table({"a": [1.0, 2.0, 3.0]}))
    deltalake.write_deltalake(folder, pa.table({"a": [4.0, 5.0]}), mode="append")
    deltalake.DeltaTable(folder).delete("a = 2.0")
    return folder


def fed(url: str) -> list[float]:
    with ParquetFeed(url, batch_size=10, shuffle=False) as feed:
        return [float(value) for batch in feed.epoch(0) for value in batch["a"]]


def test_feed_reads_the_rows_of_the_newest_version(table: str) -> None:
    assert sorted(fed(table)) == [1.0, 3.0, 4.0, 5.0]
    deltalake.write_deltalake(table, pa.table({"a": [6.0]}), mode="overwrite")
    assert fed(table) == [6.0]
    assert len(list(Path(table).glob("*.parquet"))) > len(urls_for_spark(table)) == 1
    assert Path(urls_for_spark(table)[0]).is_file()


def test_files_of_partitions_are_read_without_the_values_in_folder_names(tmp_path: Path) -> None:
    folder = str(tmp_path / "table")
    deltalake.write_deltalake(folder, pa.table({"a": [1.0, 2.0], "p": ["x y", "z%"]}), partition_by=["p"])
    assert sorted(fed(folder)) == [1.0, 2.0]
    with pytest.raises(DataError, match="Column 'p' is a partition column"):
        scan_dataset(folder, columns=["p"])
    with pytest.raises(DataError, match="Its columns p are not in its files. Read it with Spark"):
        urls_for_spark(folder)


def with_action(folder: str, **changes: object) -> None:
    """Change the newest file's entry in the log."""
    log = max((Path(folder) / "_delta_log").glob("*.json"))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            line["add"] |= changes
    log.write_text("\n".join(map(json.dumps, lines)))


def test_tables_whose_files_hold_other_rows_or_names_are_refused(tmp_path: Path) -> None:
    mapped = str(tmp_path / "mapped")
    deltalake.write_deltalake(
        mapped, pa.table({"a": [1.0]}), configuration={"delta.columnMapping.mode": "name"}
    )
    with pytest.raises(
        DataError, match=r"a Delta table, .* It has column mapping.* Read it with Spark, spark\.read"
    ):
        fed(mapped)
    vectors = str(tmp_path / "vectors")
    deltalake.write_deltalake(
        vectors, pa.table({"a": [1.0]}), configuration={"delta.enableDeletionVectors": "true"}
    )
    assert fed(vectors) == [1.0]
    vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 1, "sizeInBytes": 34}
    with_action(vectors, deletionVector=vector | {"cardinality": 1})
    with pytest.raises(DataError, match="deletion vectors|deltalake cannot read its log"):
        fed(vectors)


def test_folders_inside_and_around_tables_are_refused(table: str) -> None:
    (Path(table) / "inside").mkdir()
    for url in (str(Path(table) / "inside"), str(Path(table).parent)):
        with pytest.raises(DataError, match="is a Delta table"):
            scan_dataset(url)


def test_without_deltalake_the_error_says_what_to_install(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(
        DataError, match=r"deltalake, which cannot be imported.*extra 'delta'.*Read it with Spark"
    ):
        scan_dataset(table)
