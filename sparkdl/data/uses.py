"""Who is at work in a folder of a Store: small files that are renewed as long as somebody reads or writes there.

Runs on the *driver*. A use that has not been renewed for :data:`LEASE_S` seconds has ended, as when its process
was killed. All times are those of the Store's own clock, the modification times of its files, so that machines
whose clocks differ agree.
"""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from sparkdl.data.filesystems import Location

logger = logging.getLogger(__name__)

LEASE_S = 120.0
"""Seconds after which a use that nobody renews is over."""

RENEWAL_S = 20.0
"""Seconds between two renewals."""

_PREFIX = "_use-"
_LAST_USE = "_last_use"
_REMOVING = "_removing"


class FolderUse:
    """A use of a folder from its making to :meth:`end`; a context manager.

    Args:
        location: the folder. It is made if it does not exist.

    Raises:
        Exception: of the filesystem, if the folder cannot be written.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._path = f"{location.path}/{_PREFIX}{uuid.uuid4().hex}"
        location.make_folder()
        self._write(self._path)
        self.began = _modified(location, self._path)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="sparkdl-store-use", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the use and note when that was; doing so again does nothing."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        filesystem = self._location.filesystem
        # A folder that was removed meanwhile must not come back as one that holds nothing but this note.
        with suppress(Exception):
            if filesystem.exists(self._path):
                self._write(f"{self._location.path}/{_LAST_USE}")
                filesystem.rm(self._path)

    def __enter__(self) -> FolderUse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def _renew(self) -> None:
        while not self._is_over.wait(RENEWAL_S):
            try:
                if not self._location.filesystem.exists(self._path):
                    return  # somebody deleted the folder on purpose
                self._write(self._path)
            except Exception as error:
                logger.warning("The use of %s could not be renewed: %s", self._location.path, error)

    def _write(self, path: str) -> None:
        with self._location.filesystem.open(path, "wb") as file:
            file.write(b"sparkdl")


class Marks:
    """What the small files of a folder say at one moment.

    Args:
        location: the folder.
        manifest_name: name of the file that makes it a dataset.
    """

    def __init__(self, location: Location, manifest_name: str) -> None:
        location.filesystem.invalidate_cache()
        names = _file_names(location)
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
        """Whether somebody reads or writes there at ``now``, in the Store's time."""
        return any(now - time < LEASE_S for time in self.uses.values())


def mark_for_removal(location: Location) -> None:
    """Tell who looks for a dataset that this one is about to go."""
    with location.filesystem.open(f"{location.path}/{_REMOVING}", "wb") as file:
        file.write(b"sparkdl")


def unmark_for_removal(location: Location) -> None:
    """Take :func:`mark_for_removal` back."""
    location.filesystem.rm(f"{location.path}/{_REMOVING}")


def store_time(location: Location) -> float:
    """Return what the clock of a Store shows, in seconds: the modification time of a file made for that."""
    path = f"{location.path}/clock-{uuid.uuid4().hex}.tmp"
    with location.filesystem.open(path, "wb") as file:
        file.write(b"sparkdl")
    try:
        return _modified(location, path)
    finally:
        with suppress(FileNotFoundError):
            location.filesystem.rm(path)


def _modified(location: Location, path: str) -> float:
    location.filesystem.invalidate_cache()
    return float(location.filesystem.modified(path).timestamp())


def _time_or_none(location: Location, name: str) -> float | None:
    try:
        return float(location.filesystem.modified(f"{location.path}/{name}").timestamp())
    except FileNotFoundError:
        return None  # it ended while we looked


def _file_names(location: Location) -> list[str]:
    try:
        found: Iterable[object] = location.filesystem.ls(location.path, detail=False)
    except FileNotFoundError:
        return []
    return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]
