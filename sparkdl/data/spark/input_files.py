"""The files that a DataFrame reads, with text that changes when they are written again."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sparkdl.data.dataset.table_logs import DELTA_LOG, find_logs
from sparkdl.data.files.changed_files import TAGS
from sparkdl.data.files.filesystems import open_location
from sparkdl.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdl.data.files.filesystems import Location

_NUM_THREADS = 16


@dataclass(frozen=True)
class InputFiles:
    """The files that a DataFrame reads.

    Attributes:
        folder: URL of the folder that holds them all.
        paths: their paths inside it, sorted.
        is_delta: whether some belong to a Delta table, whose log says which rows of a file are valid.
        identity: text that changes when a file is added, removed or written again, or when a table gets another
            version; None if the filesystem does not report when a file was written.
    """

    folder: str
    paths: tuple[str, ...]
    is_delta: bool
    identity: str | None


def input_files(df: DataFrame) -> InputFiles | None:
    """Return the files that a DataFrame reads; None if it reads none, or the driver cannot see them.

    A cached DataFrame reads no files.
    """
    try:
        # Planned again, because a DataFrame object remembers whether it was cached when it was first run.
        urls = sorted(set(df.select("*").inputFiles()))
        return _describe(urls) if urls else None
    except Exception:  # any error of Spark or of a filesystem that is not ours
        return None


def table_of(df: DataFrame) -> str | None:
    """Return the name of the table or view that a DataFrame reads; None if it reads none, or several."""
    try:
        plan = _analyzed_plan(df)
    except Exception:  # any error of Spark, whose texts are not an interface
        return None
    names = _TABLE.findall(plan)
    leaves = _LEAF.findall(plan)
    return str(names[0]).removeprefix("spark_catalog.") if names and len(leaves) == 1 else None


# Tables and views have an alias with their name; DataFrame.alias adds others, above them or above files and values.
_TABLE = re.compile(
    r"SubqueryAlias ([^\s(]+)$\n[^\n]*?(?:View \(|HiveTableRelation \[|RelationV2\[|Relation `?[\w.]+`?\[)",
    re.MULTILINE,
)
_LEAF = re.compile(
    r"^[^\n]*?(?:Relation|LogicalRDD|LocalRelation|Range|HiveTableRelation|DataSourceV2\w*)\b[ (\[]",
    re.MULTILINE,
)


def _analyzed_plan(df: Any) -> str:
    if not is_connect(df.sparkSession):
        return str(df._jdf.queryExecution().analyzed().toString())
    explained = str(df._explain_string(extended=True))
    return explained.partition("== Analyzed Logical Plan ==")[2].partition("== Optimized")[0]


def state_below(url: str) -> str | None:
    """Return text that changes when a file is written, added or removed at or below a URL, without asking Spark.

    None if there are no files, for a pattern, or if the filesystem does not report when a file was written.
    """
    location = open_location(url)
    location.filesystem.invalidate_cache()
    paths = sorted(map(str, location.filesystem.find(location.path)))
    states = [_state(location, path) for path in paths]
    return None if not states or None in states else "\n".join(map(str, states))


def _describe(urls: list[str]) -> InputFiles:
    plain = sorted(unquote(url) for url in urls)  # Spark quotes what a URL may not hold
    folder = os.path.commonprefix(plain).rpartition("/")[0]  # noqa: RUF071 - cut at a slash right away
    paths = tuple(url[len(folder) + 1 :] for url in plain)
    location = open_location(folder)
    location.filesystem.invalidate_cache()
    with ThreadPoolExecutor(min(_NUM_THREADS, len(paths))) as pool:
        states = list(pool.map(lambda path: _state(location, f"{location.path}/{path}"), paths))
    folders = {_without_partitions(os.path.dirname(f"{location.path}/{path}")) for path in paths}
    logs = find_logs(location.filesystem, folders, [DELTA_LOG])
    for log in logs:
        states += sorted((_state(location, str(path)) for path in location.filesystem.find(log)), key=str)
    identity = None if None in states else "\n".join(map(str, states))
    return InputFiles(folder=folder, paths=paths, is_delta=bool(logs), identity=identity)


def _state(location: Location, path: str) -> str | None:
    """Return the version of a file; None if the filesystem reports its size alone."""
    if location.is_local:
        status = os.stat(path)
        return f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    info = location.filesystem.info(path)
    tags = [f"{tag}={info[tag]}" for tag in TAGS if info.get(tag)]
    return " ".join([path, str(info["size"]), *tags]) if tags else None


def _without_partitions(folder: str) -> str:
    """Return the folder that holds the folders of partitions, such as ``day=7``, in which a file lies."""
    while "=" in os.path.basename(folder):
        folder = os.path.dirname(folder)
    return folder
