"""Removing what a Store no longer needs: datasets past their time, and what broken-off writes left. On the *driver*.

Nothing goes that somebody reads or writes. A folder is first marked as one that goes, then looked at again: who
begins to use it before that second look is seen by it, and who begins later sees the mark and writes its own.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from sparkdl.data.dataset import MANIFEST_NAME
from sparkdl.data.filesystems import open_location
from sparkdl.data.lease import store_time
from sparkdl.data.store_failures import explain_failure
from sparkdl.data.uses import Marks, mark_for_removal, unmark_for_removal
from sparkdl.errors import StoreError

if TYPE_CHECKING:
    from sparkdl.data.filesystems import Location

logger = logging.getLogger(__name__)

_NUM_THREADS = 16


def remove_old_folders(url: str, older_than_s: float) -> list[str]:
    """Remove the datasets of a Store that nobody used for some time, and folders that were never finished.

    Args:
        url: URL of the Store.
        older_than_s: seconds since the last use.

    Returns:
        The URLs of what was removed.

    Raises:
        StoreError: if the Store cannot be listed, or something in it cannot be removed.
    """
    location = open_location(url)
    try:
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
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"The Store {url} cannot be cleaned up: {explain_failure(error)}") from error


def list_folders(location: Location) -> list[str]:
    """Return the names of the folders that lie directly in a Store, sorted."""
    entries = location.filesystem.ls(location.path, detail=True)
    names = (
        str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
        for entry in entries
        if entry["type"] == "directory" and str(entry["name"]).rstrip("/") != location.path
    )
    return sorted(names)


def remove_folder(location: Location) -> None:
    """Remove a folder, its manifest first, so that a set that is half gone is never read."""
    filesystem = location.filesystem
    with suppress(FileNotFoundError):
        filesystem.rm(f"{location.path}/{MANIFEST_NAME}")
    with suppress(FileNotFoundError):
        filesystem.rm(location.path, recursive=True)
    filesystem.invalidate_cache()


def remove_unless_used(url: str) -> bool:
    """Remove a folder of a Store unless somebody reads or writes there, and return whether that was done.

    Folders that sparkdl did not write, as those of rows that are read in place, stay as they are.

    Raises:
        StoreError: if it cannot be removed.
    """
    location = open_location(url)
    try:
        if not Marks(location, MANIFEST_NAME).is_ours:
            return False
        return _remove_if_old(url, store_time(location), 0.0)
    except Exception as error:
        raise StoreError(f"{url} cannot be removed: {explain_failure(error)}") from error


def _remove_if_old(url: str, now: float, older_than_s: float) -> bool:
    location = open_location(url)
    marks = Marks(location, MANIFEST_NAME)
    if not marks.is_ours or marks.in_use(now):
        return False
    is_finished = marks.has_manifest and not marks.is_being_removed
    if is_finished and marks.last_use is not None and now - marks.last_use < older_than_s:
        return False
    mark_for_removal(location)
    if Marks(location, MANIFEST_NAME).in_use(now):
        unmark_for_removal(location)
        return False
    remove_folder(location)
    logger.info("Removed %s, which nobody used any more.", url)
    return True
