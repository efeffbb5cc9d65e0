"""Notices files that are written again while a feed reads them, by what their filesystem tells when they are opened.

Runs on the reader threads of every *rank*.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from sparkdl.errors import FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable

_DETAILS = (
    "size",
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
)
"""What fsspec's filesystems call that by which versions of a file differ."""


class WatchedFiles:
    """Opens files, and compares each with what it was when it was opened first.

    A file that is put in the place of another while that is open does no harm, as the open one stays what it is.

    Args:
        open_file: opens a path for reading.
    """

    def __init__(self, open_file: Callable[[str], Any]) -> None:
        self._open_file = open_file
        self._seen: dict[str, Any] = {}
        self._lock = threading.Lock()

    def open(self, path: str) -> Any:
        """Open a file.

        Raises:
            FileChangedError: if it is no longer the file that was opened under this path before.
        """
        file = self._open_file(path)
        found = _identity(file)
        with self._lock:
            seen = self._seen.setdefault(path, found)
        if seen != found:
            file.close()
            raise FileChangedError("it was written again since it was first read")
        return file


def _identity(file: Any) -> Any:
    details = getattr(file, "details", None)
    if isinstance(details, dict):
        return tuple(str(details.get(name)) for name in _DETAILS)
    try:
        status = os.fstat(file.fileno())
    except (AttributeError, OSError):
        return None  # a filesystem that tells nothing
    return status.st_size, status.st_mtime_ns
