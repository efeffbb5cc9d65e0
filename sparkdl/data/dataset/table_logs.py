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

DELTA_LOG = "_delta_log"
_ICEBERG = "metadata"
_SYSTEMS = {
    DELTA_LOG: ("a Delta table", "spark.read.format('delta').load(...)"),
    ".hoodie": ("a Hudi table", "spark.read.format('hudi').load(...)"),
    _ICEBERG: ("an Iceberg table", "spark.read.format('iceberg').load(...)"),
    "_spark_metadata": ("what a stream of Spark wrote", "spark.read.parquet(...)"),
}
"""Description of a table and how Spark reads it, by the name of the folder of its log."""

TABLE_LOGS = (DELTA_LOG, ".hoodie", _ICEBERG)
"""Logs of tables that Spark does not heed where it reads their files as plain Parquet. It heeds that of a stream."""

_NUM_THREADS = 16


def refuse_tables(filesystem: Any, path: str, url: str, paths: Iterable[str] = (), *, why: str = "") -> None:
    """Check that a folder is not a table with a log, is not inside of one, and has none inside.

    Args:
        filesystem: filesystem of fsspec.
        path: path of the folder on it.
        url: the folder as the user spells it, for the message.
        paths: paths of the files below the folder, relative to it.
        why: sentence that says why the table cannot be read in place.

    Raises:
        DataError: if there is a log; the message names it, and how to read the table.
    """
    logs = find_logs(filesystem, {path, *_inside(path, paths)})
    if logs:
        log_folder, _, name = logs[0].rpartition("/")
        table, reader = _SYSTEMS[name]
        advice = (
            f"Read it with Spark, {reader}, and give the DataFrame to fit or sparkdl.data.materialize. To read files "
            "as they are, name them: scan_dataset(folder, paths=[...])."
        )
        raise DataError(
            f"{url} cannot be read as plain Parquet: {log_folder} is {table}, and its log ({name}) says which files "
            f"and rows are valid. {' '.join(filter(None, [why, advice]))}"
        )


def find_logs(filesystem: Any, folders: Iterable[str], names: Iterable[str] = tuple(_SYSTEMS)) -> list[str]:
    """Return the paths of the logs in these folders and in all folders above them, sorted by folder.

    Args:
        filesystem: filesystem of fsspec.
        folders: paths of folders on it.
        names: names of the logs to look for.
    """
    places: set[str] = set()
    for folder in folders:
        path = folder.rstrip("/")
        while path.strip("/") and path not in places:
            places.add(path)
            path = path.rpartition("/")[0]
    logs = [f"{folder}/{name}" for folder in sorted(places) for name in names]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        are_there = pool.map(lambda log: is_log(filesystem, log), logs)
        return [log for log, is_there in zip(logs, are_there, strict=True) if is_there]


def _inside(path: str, paths: Iterable[str]) -> set[str]:
    """Return the folders below ``path`` that may hold a log."""
    inside = set()
    for relative in paths:
        parts = relative.split("/")[:-1]
        inside |= {"/".join([path, *parts[:index]]) for index, part in enumerate(parts) if part in _SYSTEMS}
    return inside


def is_log(filesystem: Any, path: str) -> bool:
    """Return whether a path is the log of a table, by its name and by what it holds."""
    try:
        if not filesystem.isdir(path):
            return False
        if not path.endswith(f"/{_ICEBERG}"):
            return True
        _, _, names = next(iter(filesystem.walk(path)))
    except (OSError, StopIteration):  # as for a folder above that may not be listed
        return False
    return any(".metadata.json" in name for name in names)
