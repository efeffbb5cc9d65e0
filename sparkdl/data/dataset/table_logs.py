"""Finds the logs of tables, which say which files and rows of a folder are valid, and refuses such folders.

Delta, Iceberg and Hudi tables, and the folders that Spark's streams write, keep files whose rows were removed or never
committed. Only the readers of their systems know which; a folder of such a table must not be read as plain Parquet.
Files that are named one by one are read as they are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

_ICEBERG = "metadata"
_SYSTEMS = {
    "_delta_log": ("a Delta table", "spark.read.format('delta').load(...)"),
    ".hoodie": ("a Hudi table", "spark.read.format('hudi').load(...)"),
    _ICEBERG: ("an Iceberg table", "spark.read.format('iceberg').load(...)"),
    "_spark_metadata": ("what a stream of Spark wrote", "spark.read.parquet(...)"),
}
"""Description of a table and how Spark reads it, by the name of the folder of its log."""

_NUM_THREADS = 16


def refuse_tables(filesystem: Any, path: str, url: str, paths: Iterable[str] = ()) -> None:
    """Check that a folder is no table with a log, is not inside of one, and has none inside.

    Args:
        filesystem: filesystem of fsspec.
        path: path of the folder on it.
        url: the folder as the user spells it, for the message.
        paths: paths of the files below the folder, relative to it.

    Raises:
        DataError: if there is a log; the message names it, and how to read the table.
    """
    folders = {path, *_inside(path, paths)}
    while "/" in path.strip("/"):
        path = path.rstrip("/").rpartition("/")[0]
        folders.add(path)
    logs = [f"{folder}/{name}" for folder in sorted(folders) for name in _SYSTEMS]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for log, is_there in zip(logs, pool.map(lambda log: _is_log(filesystem, log), logs), strict=True):
            if is_there:
                raise _table_error(log, url)


def _inside(path: str, paths: Iterable[str]) -> set[str]:
    """Return the folders below ``path`` that may hold a log."""
    inside = set()
    for relative in paths:
        parts = relative.split("/")[:-1]
        inside |= {"/".join([path, *parts[:index]]) for index, part in enumerate(parts) if part in _SYSTEMS}
    return inside


def _is_log(filesystem: Any, path: str) -> bool:
    try:
        if not filesystem.isdir(path):
            return False
        if not path.endswith(f"/{_ICEBERG}"):
            return True
        _, _, names = next(iter(filesystem.walk(path)))
    except (OSError, StopIteration):  # as for a folder above that may not be listed
        return False
    return any(".metadata.json" in name for name in names)


def _table_error(log: str, url: str) -> DataError:
    folder, _, name = log.rpartition("/")
    table, reader = _SYSTEMS[name]
    return DataError(
        f"{url} cannot be read as plain Parquet: {folder} is {table}, and its log ({name}) says which files and rows "
        f"are valid. Read it with Spark, {reader}, and give the DataFrame to fit or sparkdl.data.materialize. To read "
        "files as they are, name them: scan_dataset(folder, paths=[...])."
    )
