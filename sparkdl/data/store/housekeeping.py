"""Removes what a Store no longer needs: expired datasets and the remains of interrupted writes.

A folder that is being read or written holds a :class:`~sparkdl.data.files.lease.Lease`, and is not removed. A folder is
first marked for removal, then checked again: a use that begins before the second check is seen by it, and a reader that
comes later sees the mark and writes a dataset of its own.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from sparkdl.data.dataset.dataset import MANIFEST_NAME
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.files.lease import LEASE_S, file_names, store_time
from sparkdl.foreign_errors import store_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sparkdl.data.files.filesystems import Location


logger = logging.getLogger(__name__)

USE = "_use"
"""Kind of the leases that protect a folder from removal."""
LAST_USE = "_last_use"
"""Name of the file whose modification time is the end of the last use."""
_REMOVING = "_removing"


class Marks:
    """The state of a folder at one moment, according to its small files.

    Args:
        location: location of the folder.

    Attributes:
        has_manifest: whether the folder is a complete dataset.
        is_being_removed: whether it is marked for removal.
        last_use: time of the last use, in seconds by the Store's clock; None if there is no sign of one.
        is_ours: whether sparkdl made the folder.
    """

    def __init__(self, location: Location) -> None:
        names = file_names(location)
        self.has_manifest = MANIFEST_NAME in names
        self.is_being_removed = _REMOVING in names
        self._uses = _times(location, [name for name in names if name.startswith(f"{USE}-")])
        others = _times(location, [name for name in (MANIFEST_NAME, LAST_USE) if name in names])
        self.last_use = max([*self._uses, *others], default=None)
        self.is_ours = self.last_use is not None or self.has_manifest or self.is_being_removed

    def in_use(self, now: float) -> bool:
        """Whether a lease of the folder has not expired at the time ``now``, in seconds by the Store's clock."""
        return any(now - time < LEASE_S for time in self._uses)


def _times(location: Location, names: Iterable[str]) -> list[float]:
    times = []
    for name in names:
        with suppress(FileNotFoundError):  # the use ended meanwhile
            times.append(float(location.filesystem.modified(f"{location.path}/{name}").timestamp()))
    return times


_NUM_THREADS = 16


def remove_old_folders(url: str, older_than_s: float) -> list[str]:
    """Remove the datasets of a Store that were not used for some time, and folders that were never finished.

    Args:
        url: URL of the Store.
        older_than_s: seconds since the last use.

    Returns:
        The URLs of the removed folders.

    Raises:
        StoreError: if the Store cannot be listed, or something in it cannot be removed.
    """
    location = open_location(url)
    with store_errors(f"The Store {url} cannot be cleaned up"):
        location.filesystem.invalidate_cache()
        if not location.filesystem.exists(location.path):
            return []
        names = list_folders(location)
        if not names:
            return []
        now = store_time(location)
        with ThreadPoolExecutor(min(_NUM_THREADS, len(names))) as pool:
            removed = pool.map(lambda name: _remove_if_old(f"{url}/{name}", now, older_than_s), names)
            return [f"{url}/{name}" for name, is_gone in zip(names, removed, strict=True) if is_gone]


def list_folders(location: Location) -> list[str]:
    """Return the names of the folders that lie directly in a Store, sorted."""
    entries = location.filesystem.ls(location.path, detail=True)
    names = (
        str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
        for entry in entries
        if entry["type"] == "directory" and str(entry["name"]).rstrip("/") != location.path
    )
    return sorted(names)


def remove_folder(location: Location, manifest: str = MANIFEST_NAME) -> None:
    """Remove a folder, its manifest first, so that a partly removed dataset or checkpoint is never read."""
    filesystem = location.filesystem
    with suppress(FileNotFoundError):
        filesystem.rm(f"{location.path}/{manifest}")
    with suppress(FileNotFoundError):
        filesystem.rm(location.path, recursive=True)
    filesystem.invalidate_cache()


def remove_unless_used(url: str) -> bool:
    """Remove a folder of a Store unless a process reads or writes there, and return whether it was removed.

    Folders that sparkdl did not write, such as those of rows that are read in place, stay as they are.

    Raises:
        StoreError: if it cannot be removed.
    """
    location = open_location(url)
    with store_errors(f"{url} cannot be removed"):
        if not Marks(location).is_ours:
            return False
        return _remove_if_old(url, store_time(location), 0.0)


def _remove_if_old(url: str, now: float, older_than_s: float) -> bool:
    location = open_location(url)
    marks = Marks(location)
    if not marks.is_ours or marks.in_use(now):
        return False
    is_finished = marks.has_manifest and not marks.is_being_removed
    if is_finished and marks.last_use is not None and now - marks.last_use < older_than_s:
        return False
    mark = f"{location.path}/{_REMOVING}"
    location.filesystem.pipe_file(mark, b"sparkdl")
    if Marks(location).in_use(now):
        location.filesystem.rm(mark)
        return False
    remove_folder(location)
    logger.info("Removed %s, which was no longer used.", url)
    return True
