"""The files that a DataFrame reads, the tables they belong to, and text that changes when they are written again."""

from __future__ import annotations

import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sparkdl.data.dataset.delta_tables import files_of_delta
from sparkdl.data.dataset.table_logs import DELTA_LOG, TABLE_LOGS, find_logs, refuse_tables
from sparkdl.data.files.changed_files import TAGS
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.spark.plans import plain_parquet_reads
from sparkdl.errors import count_of
from sparkdl.spark.session import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame

    from sparkdl.data.files.filesystems import Location

logger = logging.getLogger(__name__)

_NUM_THREADS = 16


@dataclass(frozen=True)
class InputFiles:
    """The files that a DataFrame reads.

    Attributes:
        folder: URL of the folder that holds them all.
        paths: their paths inside it, sorted.
        is_delta: whether some belong to a Delta table.
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


def check_tables(df: DataFrame) -> None:
    """Check that a DataFrame reads no table with a log as plain Parquet, except valid files of a Delta table.

    Raises:
        DataError: if it reads other files of a table; the message names the table, and how to read it.
    """
    for table, name, files in _tables_in(df):
        url = table.name_of(table.path)
        why = ""
        if name == DELTA_LOG:
            removed = sorted(files.difference(files_of_delta(table, url)))
            if not removed:
                continue
            why = (
                f"{len(removed)} of the {count_of(len(files), 'file')} that the DataFrame reads are not of its newest "
                f"version, such as {removed[0]}; fit_on_parquet({url!r}) reads that version."
            )
        refuse_tables(table.filesystem, table.path, url, why=why)


def _tables_in(df: DataFrame) -> Iterator[tuple[Location, str, set[str]]]:
    """Yield what :func:`_tables_of` yields for each read of a DataFrame that the driver can look at."""
    try:
        reads = [urls for urls in plain_parquet_reads(df) if urls]
    except Exception as error:  # any error of Spark
        logger.info("The files of the DataFrame are not checked for tables: %s", error)
        return
    for urls in reads:
        try:
            yield from list(_tables_of(urls))
        except Exception as error:  # any error of a filesystem that is not ours
            logger.info("%s and others are not checked for tables: %s", urls[0], error)


def _tables_of(urls: list[str]) -> Iterator[tuple[Location, str, set[str]]]:
    """Yield the location of each table to which files belong, the name of its log, and the files' paths inside it."""
    location, paths, _ = _locate(urls)
    files = [f"{location.path}/{path}" for path in paths]
    for log in find_logs(location.filesystem, _folders_of(files), TABLE_LOGS):
        folder, _, name = log.rpartition("/")
        inside = {path[len(folder) + 1 :] for path in files if path.startswith(f"{folder}/")}
        yield replace(location, path=folder), name, inside


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
    states = [_state(location, path) for path in location.find_files()]
    return None if not states or None in states else "\n".join(map(str, states))


def _describe(urls: list[str]) -> InputFiles:
    location, paths, folder = _locate(urls)
    files = [f"{location.path}/{path}" for path in paths]
    with ThreadPoolExecutor(min(_NUM_THREADS, len(paths))) as pool:
        states = list(pool.map(lambda path: _state(location, path), files))
    logs = find_logs(location.filesystem, _folders_of(files), [DELTA_LOG])
    for log in logs:
        states += sorted((_state(location, str(path)) for path in location.filesystem.find(log)), key=str)
    identity = None if None in states else "\n".join(map(str, states))
    return InputFiles(folder=folder, paths=paths, is_delta=bool(logs), identity=identity)


def _locate(urls: list[str]) -> tuple[Location, tuple[str, ...], str]:
    """Return the location of the folder that holds all files, their paths inside it, sorted, and its URL."""
    plain = sorted(unquote(url) for url in urls)  # Spark quotes what a URL may not hold
    folder = os.path.commonprefix(plain).rpartition("/")[0]  # noqa: RUF071 - cut at a slash right away
    location = open_location(folder)
    location.filesystem.invalidate_cache()
    return location, tuple(url[len(folder) + 1 :] for url in plain), folder


def _folders_of(files: Iterable[str]) -> set[str]:
    """Return the folders that may have a log, without the folders of partitions in which the files lie."""
    return {_without_partitions(os.path.dirname(path)) for path in files}


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
