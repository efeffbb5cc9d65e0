"""Removes what a Store no longer needs: expired datasets and the remains of interrupted writes.

A folder that is being read or written holds a lease: a small file that is renewed as long as its holder lives. A use
that has not been renewed for :data:`LEASE_S` seconds counts as ended, for example because its process was killed. Times
are modification times of files, by the Store's own clock, so that machines whose clocks differ agree.

A folder in use is not removed. A folder is first marked for removal, then checked again: a use that begins before the
second check is seen by it, and a reader that comes later sees the mark and writes a dataset of its own.
"""

from __future__ import annotations

import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from sparkdl.data.dataset.dataset import MANIFEST_NAME
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import StoreError
from sparkdl.meanings import store_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from sparkdl.data.files.filesystems import Location


logger = logging.getLogger(__name__)

LEASE_S = 120.0
"""Seconds after which a lease that is not renewed has expired."""

RENEWAL_S = 20.0
"""Seconds between two renewals."""

STORE_TIMEOUT_S = 10.0
"""Seconds that the end of a lease waits for the Store."""


class Lease:
    """A lease that lasts from its creation to :meth:`end`.

    Args:
        location: location of the folder. It is made if it does not exist.
        name: name of the lease's file.
        content: content of the file.

    Attributes:
        path: path of the file.
        began: modification time of the file when it was first written, in seconds.
        is_lost: whether other processes may have considered the lease expired, because it was not renewed in time: its
            file has been removed since, or the folder has another lease of the same kind, whose name is the same up to
            the first hyphen. A lease whose file was deleted before it expired is not lost, and not renewed either.

    Raises:
        Exception: an error of the filesystem, if the folder cannot be written.
    """

    def __init__(self, location: Location, name: str, content: bytes = b"sparkdl") -> None:
        self._location, self._name, self._content = location, name, content
        self.path = f"{location.path}/{name}"
        location.make_folder()
        self._write()
        self.began = self._renewed = modified(location, name)
        self.is_lost = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="sparkdl-lease", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the lease was stopped or ended."""
        return self._is_over.is_set()

    def stop(self) -> None:
        """Stop renewing the lease, and leave the file; wait at most :data:`STORE_TIMEOUT_S` for a renewal under way."""
        self._is_over.set()
        self._thread.join(STORE_TIMEOUT_S)

    def end(self) -> None:
        """Stop renewing the lease and remove the file if possible; calling it again does nothing."""
        self.stop()
        self.within_timeout(self._remove)

    def renew_if_held(self) -> None:
        """Check whether the lease is lost, and renew it if not; nothing changes if the Store does not answer."""
        self.within_timeout(self._look_or_warn)

    def within_timeout(self, function: Callable[[], object]) -> None:
        """Call a function that uses the Store, after the renewals have stopped; warn if the Store does not answer."""
        thread = self._thread
        if not thread.is_alive():
            thread = threading.Thread(target=function, name="sparkdl-lease-end", daemon=True)
            thread.start()
            thread.join(STORE_TIMEOUT_S)
        if thread.is_alive():
            logger.warning("The store of %s has not answered for %g s.", self._location.path, STORE_TIMEOUT_S)

    def _renew(self) -> None:
        while not self._is_over.wait(RENEWAL_S):
            if not self._look_or_warn():
                return

    def _look_or_warn(self) -> bool:
        """Renew the lease, and return whether there is still a lease to renew."""
        try:
            return self._look()
        except Exception as error:
            logger.warning("The use of %s could not be renewed: %s", self._location.path, error)
            return True

    def _look(self) -> bool:
        filesystem = self._location.filesystem
        filesystem.invalidate_cache()
        if not filesystem.exists(self.path):
            # A missing file was removed by others after it expired, or deleted on purpose, with the folder or without.
            if filesystem.exists(self._location.path):
                self.is_lost |= store_time(self._location) - self._renewed >= LEASE_S
            return False
        self._write()
        before, self._renewed = self._renewed, modified(self._location, self._name)
        if self._renewed - before >= LEASE_S:
            # Another process may have removed the file after the check, before it was written again.
            kind = self._name.partition("-")[0]
            names = {name for name in file_names(self._location) if name.partition("-")[0] == kind}
            self.is_lost |= names != {self._name}
        return True

    def _remove(self) -> None:
        with suppress(Exception):
            self._location.filesystem.rm(self.path)

    def _write(self) -> None:
        with self._location.filesystem.open(self.path, "wb") as file:
            file.write(self._content)


def modified(location: Location, name: str) -> float:
    """Return the modification time of a file in a folder, in seconds.

    Raises:
        Exception: an error of the filesystem, if the file does not exist.
    """
    location.filesystem.invalidate_cache()
    return float(location.filesystem.modified(f"{location.path}/{name}").timestamp())


def store_time(location: Location) -> float:
    """Return the time of a Store's clock in seconds, which is the modification time of a file written for this."""
    name = f"clock-{uuid.uuid4().hex}.tmp"
    with location.filesystem.open(f"{location.path}/{name}", "wb") as file:
        file.write(b"sparkdl")
    try:
        return modified(location, name)
    finally:
        with suppress(FileNotFoundError):
            location.filesystem.rm(f"{location.path}/{name}")


def file_names(location: Location) -> list[str]:
    """Return the names of the files and folders directly in a folder; none if it does not exist."""
    try:
        found: Iterable[object] = location.filesystem.ls(location.path, detail=False)
    except FileNotFoundError:
        return []
    return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]


_PREFIX = "_use-"
_LAST_USE = "_last_use"
_REMOVING = "_removing"


class FolderUse:
    """A use of a folder that lasts from its creation to :meth:`end`; a context manager.

    Args:
        location: location of the folder. It is made if it does not exist.

    Raises:
        Exception: an error of the filesystem, if the folder cannot be written.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lease = Lease(location, f"{_PREFIX}{uuid.uuid4().hex}")
        self.began = self._lease.began

    def end(self) -> None:
        """End the use and record the time; calling it again does nothing."""
        if self._lease.is_over:
            return
        self._lease.stop()
        self._lease.within_timeout(self._note_end)
        self._lease.end()

    def _note_end(self) -> None:
        # A folder that was removed meanwhile must not be created again just for this record.
        with suppress(Exception):
            if self._location.filesystem.exists(self._lease.path):
                _write(self._location, _LAST_USE)

    def __enter__(self) -> FolderUse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class Marks:
    """The state of a folder at one moment, according to its small files.

    Args:
        location: location of the folder.
        manifest_name: name of the file that makes it a dataset.
    """

    def __init__(self, location: Location, manifest_name: str) -> None:
        location.filesystem.invalidate_cache()
        names = file_names(location)
        self.has_manifest = manifest_name in names
        self.is_being_removed = _REMOVING in names
        self.uses = {
            name: time
            for name in names
            if name.startswith(_PREFIX) and (time := _time_or_none(location, name)) is not None
        }
        others = [_time_or_none(location, name) for name in (manifest_name, _LAST_USE) if name in names]
        times = [*self.uses.values(), *(time for time in others if time is not None)]
        self.last_use = max(times, default=None)

    @property
    def is_ours(self) -> bool:
        """Whether sparkdl made the folder."""
        return self.last_use is not None or self.has_manifest or self.is_being_removed

    def in_use(self, now: float) -> bool:
        """Whether a process reads or writes there at the time ``now``, by the Store's clock."""
        return any(now - time < LEASE_S for time in self.uses.values())


def mark_for_removal(location: Location) -> None:
    """Mark a dataset as about to be removed, for other processes that look for a dataset."""
    _write(location, _REMOVING)


def unmark_for_removal(location: Location) -> None:
    """Undo :func:`mark_for_removal`."""
    location.filesystem.rm(f"{location.path}/{_REMOVING}")


def _write(location: Location, name: str) -> None:
    with location.filesystem.open(f"{location.path}/{name}", "wb") as file:
        file.write(b"sparkdl")


def _time_or_none(location: Location, name: str) -> float | None:
    try:
        return float(location.filesystem.modified(f"{location.path}/{name}").timestamp())
    except FileNotFoundError:
        return None  # the use ended meanwhile


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
        raise store_error(f"The Store {url} cannot be cleaned up", error) from error


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
    """Remove a folder, its manifest first, so that a partly removed dataset is never read."""
    filesystem = location.filesystem
    with suppress(FileNotFoundError):
        filesystem.rm(f"{location.path}/{MANIFEST_NAME}")
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
    try:
        if not Marks(location, MANIFEST_NAME).is_ours:
            return False
        return _remove_if_old(url, store_time(location), 0.0)
    except Exception as error:
        raise store_error(f"{url} cannot be removed", error) from error


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
    logger.info("Removed %s, which was no longer used.", url)
    return True
