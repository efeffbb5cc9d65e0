"""Detects files that are written again while a feed reads them, by what the filesystem reports when they are opened.

Runs on the reader threads of every *rank*.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.errors import FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TAGS = (
    *("ETag", "etag", "md5Hash", "content_md5", "generation"),
    *("LastModified", "last_modified", "modificationTime", "mtime", "updated"),
)
"""Names that fsspec's filesystems use for the version of a file, the most reliable first."""


def version_of(file: Any, path: str) -> str | None:
    """Return the filesystem's version of an open file, which changes when the file is written again; None without one.

    ``path`` is the path under which the file was opened.

    Only the most reliable of its tags is used, so that the version is the same on every machine: when servers list
    files, they report times in another precision than when they describe one file.
    """
    details = getattr(file, "details", None)
    if isinstance(details, dict):
        tags = (f"{name} {details[name]}" for name in TAGS if details.get(name))
        return f"{details.get('size')} bytes, {next(tags, 'no tag')}".replace('"', "")
    try:
        try:
            status = os.fstat(file.fileno())
        except AttributeError:
            if not isinstance(file, pa.OSFile):
                return None
            status = os.stat(path)  # fileno of a local file fails in pyarrow 14
    except OSError:
        return None
    return f"{status.st_size} bytes, mtime {status.st_mtime_ns}"


class WatchedFiles:
    """Opens files, and compares each with its version when the dataset was described, or else when it was first opened.

    Replacing a file while it is open does no harm, because the open file stays as it is.

    Args:
        open_file: function that opens a path for reading.
        described: versions of the files when the dataset was described, by path, as :func:`version_of` returns them;
            files without a known version are left out.
    """

    def __init__(self, open_file: Callable[[str], Any], described: Mapping[str, str]) -> None:
        self._open_file = open_file
        self._described = described
        self._seen: dict[str, str | None] = dict(described)
        self._lock = threading.Lock()

    def open(self, path: str) -> Any:
        """Open a file.

        Raises:
            FileChangedError: if it is no longer the file that was described or opened under this path before.
        """
        file = self._open_file(path)
        version = version_of(file, path)
        with self._lock:
            seen = self._seen.setdefault(path, version)
        if seen != version:
            file.close()
            since = "the dataset was described" if path in self._described else "it was first read"
            raise FileChangedError(f"it was written again since {since}")
        return file
