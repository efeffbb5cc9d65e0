"""The compatibility module must be invisible to all code but Petastorm; each test runs in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetDataset
from sparkdl.data.petastorm.former_parquet import FormerParquetDataset, accepts
from tests.unit.data.petastorm.unischema_folders import write_scenes

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=Path(__file__).parents[4],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ranks_need_neither_pyspark_nor_torch(write_dataset: WriteDataset, tmp_path: Path) -> None:
    code = """
import sys
sys.modules["pyspark"] = sys.modules["torch"] = None
from sparkdl.data import ParquetFeed
for url, column in zip(sys.argv[1:], ["vector", "image"]):
    with ParquetFeed(url, columns=["id", column], batch_size=8) as feed:
        print(sum(int(batch["id"].sum()) for batch in feed))
"""
    unischema = write_scenes(tmp_path / "scenes", [[5, 3], [4]])  # the schema names types of pyspark
    found = run_python(code, write_dataset([[10, 3], [20]]).url, unischema)
    assert found.split() == [str(sum(range(33))), str(sum(range(12)))]


def test_importing_the_data_floor_loads_neither_petastorm_nor_pyarrow() -> None:
    code = """
import sys
from sparkdl.data import Column, ParquetDataset, Store
print([name for name in ("petastorm", "pyarrow", "pyspark", "torch") if name in sys.modules])
"""
    assert run_python(code) == "[]"


def test_plain_files_are_read_without_pandas_and_without_petastorms_package(
    write_dataset: WriteDataset,
) -> None:
    code = """
import sys
from sparkdl.data import ParquetFeed, RowFilter
keep = RowFilter(["id"], lambda columns: columns["id"] >= 1)
with ParquetFeed(sys.argv[1], batch_size=8, row_filter=keep) as feed:
    print(sum(int(batch["id"].sum()) for batch in feed))
print([name for name in ("pandas", "petastorm", "sparkdl.data.petastorm") if name in sys.modules])
"""
    assert run_python(code, write_dataset([[10, 3], [20]]).url).split("\n") == [str(sum(range(33))), "[]"]


def test_petastorm_imported_before_the_facades_is_a_clear_error(tmp_path: Path) -> None:
    code = """
import sys, types
from sparkdl.data import ParquetFeed
sys.modules["petastorm"] = types.ModuleType("petastorm")
try:
    list(ParquetFeed(sys.argv[1], batch_size=8))
except Exception as error:
    print(type(error).__name__, error)
"""
    assert "petastorm was imported before" in run_python(code, write_scenes(tmp_path / "scenes", [[3]]))


def test_petastorms_process_pool_works_through_the_facades(write_dataset: WriteDataset) -> None:
    code = """
import sys
from sparkdl.data.petastorm.containment import install
install()
from petastorm import make_batch_reader
if __name__ == "__main__":
    with make_batch_reader(f"file://{sys.argv[1]}", workers_count=1, reader_pool_type="process") as reader:
        print(sum(int(batch.id.sum()) for batch in reader))
"""
    assert run_python(code, write_dataset([[10, 3], [20]]).url).splitlines()[-1] == str(sum(range(33)))


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([("day", "=", "2")], {2}),
        ([("day", ">", 1), ("day", "<=", 3)], {2, 3}),
        ([[("day", "in", [1])], [("day", "not in", [1, 2])]], {1, 3}),
        ([("other", "=", 5)], {1, 2, 3}),
        ([("day", "in", [])], set()),
    ],
)
def test_partition_filters_choose_folders(filters: object, expected: set[int]) -> None:
    assert {day for day in (1, 2, 3) if accepts(filters, {"day": day})} == expected


def test_partition_filter_with_an_unsuitable_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="'in' cannot be used with the value 1"):
        accepts([("day", "in", 1)], {"day": 1})
    with pytest.raises(ValueError, match="Unknown filter operator"):
        accepts([("day", "like", "1")], {"day": 1})


def test_folders_behind_links_are_visited(tmp_path: Path) -> None:
    for name in ("table/k=1", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        pq.write_table(pa.table({"x": [1]}), tmp_path / name / "a.parquet")
    (tmp_path / "table" / "k=2").symlink_to(tmp_path / "elsewhere")
    pieces = FormerParquetDataset(str(tmp_path / "table")).pieces
    assert [piece.path.removeprefix(str(tmp_path)) for piece in pieces] == [
        "/table/k=1/a.parquet",
        "/table/k=2/a.parquet",
    ]
