"""The compatibility module must be invisible to all code but Petastorm; each test runs in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sparkdl.data import ParquetDataset

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]

READ = """
from sparkdl.data import ParquetFeed, scan_dataset
def read(url):
    dataset = scan_dataset(url)
    with ParquetFeed(dataset, columns=["id", "vector"], rank=0, world_size=1, batch_size=8) as feed:
        return sum(len(batch["id"]) for batch in feed.epoch(0))
"""


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


def test_other_users_of_pyarrow_and_numpy_see_no_change(write_dataset: WriteDataset) -> None:
    code = (
        READ
        + """
import builtins, importlib, importlib.util, sys
import numpy.typing  # a name of numpy once it is imported, in older versions
was_there = importlib.util.find_spec("pyarrow.filesystem") is not None  # up to pyarrow 15
names = ["builtins", "numpy", "pandas", "pyarrow", "pyarrow.parquet", "pyarrow.fs", "pyarrow.types",
         "pyarrow.compute", "pyarrow.dataset", "pyarrow.orc", "pyarrow.feather"]
modules = {name: importlib.import_module(name) for name in names}
before = {name: dict(vars(module)) for name, module in modules.items()}
directory = {name: dir(module) for name, module in modules.items()}
keys = set(sys.modules)
assert read(sys.argv[1]) == 33
import petastorm.reader
for name, module in modules.items():
    assert sys.modules[name] is module, name
    assert dir(module) == directory[name], name
    changed = [key for key, value in vars(module).items() if before[name].get(key) is not value]
    assert not changed, (name, changed)
from sparkdl.data.petastorm.containment import Facade
assert not [name for name, module in sys.modules.items() if isinstance(module, Facade)]
new = {name for name in set(sys.modules) - keys if name.split(".")[0] in {"numpy", "pyarrow", "pandas"}}
assert all(sys.modules[name].__spec__ is not None for name in new), new
assert was_there or not new & {"pyarrow.filesystem", "pyarrow.hdfs"}
assert (importlib.util.find_spec("pyarrow.filesystem") is not None) == was_there
print("contained")
"""
    )
    assert run_python(code, write_dataset([[10, 3], [20]]).url) == "contained"


def test_ranks_need_neither_pyspark_nor_torch(write_dataset: WriteDataset) -> None:
    code = (
        READ
        + """
import sys
sys.modules["pyspark"] = sys.modules["torch"] = None
print(read(sys.argv[1]))
"""
    )
    assert run_python(code, write_dataset([[10, 3], [20]]).url) == "33"


def test_importing_the_data_floor_loads_neither_petastorm_nor_pyarrow() -> None:
    code = """
import sys
from sparkdl.data import Column, ParquetDataset, Store
print([name for name in ("petastorm", "pyarrow", "pyspark", "torch") if name in sys.modules])
"""
    assert run_python(code) == "[]"


def test_petastorm_imported_before_the_facades_is_a_clear_error(write_dataset: WriteDataset) -> None:
    code = (
        READ
        + """
import sys, types
sys.modules["petastorm"] = types.ModuleType("petastorm")
try:
    read(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
"""
    )
    assert "petastorm was imported before" in run_python(code, write_dataset([[10]]).url)


def test_petastorms_own_reader_works_through_the_facades(write_dataset: WriteDataset) -> None:
    code = """
import sys
from sparkdl.data.petastorm.containment import install
install()
from petastorm import make_batch_reader
with make_batch_reader(f"file://{sys.argv[1]}", workers_count=1, shuffle_row_groups=False) as reader:
    print(sum(int(batch.id.sum()) for batch in reader))
"""
    assert run_python(code, write_dataset([[10, 3], [20]]).url).splitlines()[-1] == str(sum(range(33)))


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
    from sparkdl.data.dataset.legacy_parquet import accepts

    assert {day for day in (1, 2, 3) if accepts(filters, {"day": day})} == expected


def test_partition_filter_with_an_unsuitable_value_is_an_error() -> None:
    from sparkdl.data.dataset.legacy_parquet import accepts

    with pytest.raises(ValueError, match="'in' cannot be used with the value 1"):
        accepts([("day", "in", 1)], {"day": 1})
    with pytest.raises(ValueError, match="Unknown filter operator"):
        accepts([("day", "like", "1")], {"day": 1})
