"""The files that a DataFrame reads, with text that changes when they are written again."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from sparkdl.data.files.filesystems import open_location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdl.data.files.filesystems import Location

_NUM_THREADS = 16
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "updated")


@dataclass(frozen=True)
class InputFiles:
    """The files that a DataFrame reads.

    Attributes:
        folder: URL of the folder that holds them all.
        paths: their paths inside it, sorted.
        is_delta: whether they belong to a Delta table, whose log says which rows of a file are valid.
        identity: text that changes when a file is added, removed or written again, or when the table gets
            another version.
    """

    folder: str
    paths: tuple[str, ...]
    is_delta: bool
    identity: str


def input_files(df: DataFrame) -> InputFiles | None:
    """Return the files that a DataFrame reads; None if it reads none, or the driver cannot see them.

    A cached DataFrame reads no files.
    """
    try:
        urls = sorted(set(df.inputFiles()))
        return _describe(urls) if urls else None
    except Exception:  # any error of Spark or of a filesystem that is not ours
        return None


def _describe(urls: list[str]) -> InputFiles:
    plain = sorted(unquote(url) for url in urls)  # Spark quotes what a URL may not hold
    folder = os.path.commonprefix(plain).rpartition("/")[0]  # noqa: RUF071 - cut at a slash right away
    paths = tuple(url[len(folder) + 1 :] for url in plain)
    location = open_location(folder)
    location.filesystem.invalidate_cache()
    with ThreadPoolExecutor(min(_NUM_THREADS, len(paths))) as pool:
        states = list(pool.map(lambda path: _state(location, f"{location.path}/{path}"), paths))
    log = _delta_log(location)
    if log is not None:
        states += sorted(_state(location, str(path)) for path in location.filesystem.find(log))
    return InputFiles(folder=folder, paths=paths, is_delta=log is not None, identity="\n".join(states))


def _state(location: Location, path: str) -> str:
    if location.is_local:
        found = os.stat(path)
        return f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
    info = location.filesystem.info(path)
    return " ".join([path, str(info["size"]), *(f"{tag}={info[tag]}" for tag in _TAGS if tag in info)])


def _delta_log(location: Location) -> str | None:
    """Return the log of the Delta table that the files lie in, if they lie in one."""
    folder = location.path
    while folder.strip("/"):
        log = f"{folder}/_delta_log"
        if location.filesystem.exists(log):
            return log
        folder = os.path.dirname(folder)
    return None
