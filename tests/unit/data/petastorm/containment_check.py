"""Checks, under any CPython, that only Petastorm's own modules see the changes that make Petastorm run.

    python tests/unit/data/petastorm/containment_check.py URL_OF_PLAIN_FILES URL_OF_UNISCHEMA_DATASET

Prints the interpreter's version and the number of rows read, and nothing else.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))

WATCHED = (
    "builtins",
    "numpy.typing",  # becomes an attribute of numpy when it is imported, in older versions
    "numpy",
    "pandas",
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.feather",
    "pyarrow.fs",
    "pyarrow.orc",
    "pyarrow.parquet",
    "pyarrow.types",
)
REMOVED = [name for name in ("pyarrow.filesystem", "pyarrow.hdfs") if importlib.util.find_spec(name) is None]
"""Modules that Petastorm imports, and that pyarrow only has up to version 15."""


def read_by_every_way(plain: str, unischema: str) -> int:
    """Read with the feed (with predicate and transform) and with both readers of Petastorm; return the row count."""
    from sparkdl.data import ParquetFeed
    from sparkdl.data.petastorm.containment import install

    install()
    from petastorm import make_batch_reader, make_reader
    from petastorm.predicates import in_lambda
    from petastorm.transform import TransformSpec

    rows = 0
    for url in (plain, unischema):
        with ParquetFeed(
            url,
            columns=["id"],
            batch_size=4,
            row_filter=in_lambda(["id"], lambda number: number > 1),
            transform=TransformSpec(),
        ) as feed:
            rows += sum(len(batch["id"]) for batch in feed)
    with make_batch_reader(f"file://{plain}", schema_fields=["id"], workers_count=1) as reader:
        rows += sum(len(batch.id) for batch in reader)
    if importlib.util.find_spec("pyspark") is not None:  # Petastorm's own unpickling needs its types
        with make_reader(f"file://{unischema}", schema_fields=["id", "matrix"], workers_count=1) as reader:
            assert sum(1 for _ in reader) == 12
    return rows


def snapshot(module: ModuleType) -> tuple[list[str], dict[str, Any]]:
    return dir(module), dict(vars(module))


def main(plain: str, unischema: str) -> None:
    watched = {name: importlib.import_module(name) for name in WATCHED}
    before = {name: snapshot(module) for name, module in watched.items()}
    modules, finders = dict(sys.modules), list(sys.meta_path)
    original_import = builtins.__import__

    rows = read_by_every_way(plain, unischema)

    for name, module in watched.items():
        names, values = before[name]
        assert dir(module) == names, (name, set(dir(module)) ^ set(names))
        changed = [key for key, value in values.items() if vars(module)[key] is not value]
        assert not changed, (name, changed)
    assert builtins.__import__ is original_import
    replaced = [name for name, module in modules.items() if sys.modules.get(name) is not module]
    assert not replaced, replaced
    _check_new_modules(set(sys.modules) - set(modules))
    ours = [finder for finder in sys.meta_path if finder not in finders]
    for name in (*REMOVED, "json.nowhere"):
        assert all(
            finder.find_spec(name, None) is None for finder in ours if finder.__module__.startswith("sparkdl")
        )
    for name in REMOVED:
        _check_that_it_is_not_there(name)
    print(f"{sys.version_info.major}.{sys.version_info.minor}", rows)


def _check_new_modules(names: set[str]) -> None:
    from sparkdl.data.petastorm.containment import FACADES, WITHOUT_ORIGINAL, Facade

    facades = [name for name, module in sys.modules.items() if isinstance(module, Facade)]
    assert not facades, facades
    assert not names & set(FACADES) & set(WITHOUT_ORIGINAL), names
    for name in names:
        if name.partition(".")[0] in {"numpy", "pandas", "pyarrow"}:
            module = sys.modules[name]
            assert module.__spec__ is not None
            assert module.__spec__.name == name


def _check_that_it_is_not_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return
    raise AssertionError(f"{name} can be imported")


if __name__ == "__main__":
    main(*sys.argv[1:])
