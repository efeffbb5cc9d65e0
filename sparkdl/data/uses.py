"""Who is at work in a folder of a Store: small files that are renewed as long as somebody reads or writes there.

Runs on the *driver*. A use that has not been renewed for :data:`~sparkdl.data.lease.LEASE_S` seconds has ended, as when
its process was killed.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from sparkdl.data.lease import LEASE_S, Lease, file_names

if TYPE_CHECKING:
    from types import TracebackType

    from sparkdl.data.filesystems import Location

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
        self._lease = Lease(location, f"{_PREFIX}{uuid.uuid4().hex}")
        self.began = self._lease.began

    def end(self) -> None:
        """End the use and note when that was; doing so again does nothing."""
        if self._lease.is_over:
            return
        self._lease.stop()
        self._lease.within_timeout(self._note_end)
        self._lease.end()

    def _note_end(self) -> None:
        # A folder that was removed meanwhile must not come back as one that holds nothing but this note.
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
    """What the small files of a folder say at one moment.

    Args:
        location: the folder.
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
        """Whether somebody reads or writes there at ``now``, in the Store's time."""
        return any(now - time < LEASE_S for time in self.uses.values())


def mark_for_removal(location: Location) -> None:
    """Tell who looks for a dataset that this one is about to go."""
    _write(location, _REMOVING)


def unmark_for_removal(location: Location) -> None:
    """Take :func:`mark_for_removal` back."""
    location.filesystem.rm(f"{location.path}/{_REMOVING}")


def _write(location: Location, name: str) -> None:
    with location.filesystem.open(f"{location.path}/{name}", "wb") as file:
        file.write(b"sparkdl")


def _time_or_none(location: Location, name: str) -> float | None:
    try:
        return float(location.filesystem.modified(f"{location.path}/{name}").timestamp())
    except FileNotFoundError:
        return None  # it ended while we looked
