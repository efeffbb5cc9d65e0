"""Notices files that are written again while a feed reads them, by what their filesystem reports when they are opened.

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

_TAGS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "updated")
"""What fsspec's filesystems call that by which versions of a file differ, the surest first."""


def version_of(file: Any, path: str) -> str | None:
    """Return the filesystem's version of an open file, which changes when it is written again; None without one.

    The ``path`` is the one under which it was opened.

    It is the same on every machine: of several tags one is taken, as servers give times in other precision where they
    list files than where they describe one.
    """
    details = getattr(file, "details", None)
    if isinstance(details, dict):
        tags = (f"{name} {details[name]}" for name in _TAGS if details.get(name))
        return f"{details.get('size')} bytes, {next(tags, 'no tag')}".replace('"', "")
    try:
        status = os.stat(path) if _hides_its_descriptor(file) else os.fstat(file.fileno())
    except (AttributeError, OSError):
        return None
    return f"{status.st_size} bytes, mtime {status.st_mtime_ns}"


def _hides_its_descriptor(file: Any) -> bool:
    """Whether this is a local file of pyarrow 14, whose ``fileno`` fails."""
    if not isinstance(file, pa.OSFile):
        return False
    try:
        file.fileno()
    except AttributeError:
        return True
    return False


class WatchedFiles:
    """Opens files, and compares each with what it was when its dataset was described, or else when it was opened first.

    A file that is put in the place of another while that is open does no harm, as the open one stays what it is.

    Args:
        open_file: opens a path for reading.
        described: by path the version that was described, as :func:`version_of` has it, where that is known.
    """

    def __init__(self, open_file: Callable[[str], Any], described: Mapping[str, str] | None = None) -> None:
        self._open_file = open_file
        self._described = described or {}
        self._seen: dict[str, str | None] = dict(self._described)
        self._lock = threading.Lock()

    def open(self, path: str) -> Any:
        """Open a file.

        Raises:
            FileChangedError: if it is no longer the file that was described or opened under this path before.
        """
        file = self._open_file(path)
        found = version_of(file, path)
        with self._lock:
            seen = self._seen.setdefault(path, found)
        if seen != found:
            file.close()
            since = "the dataset was described" if path in self._described else "it was first read"
            raise FileChangedError(f"it was written again since {since}")
        return file
