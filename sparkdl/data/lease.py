"""A small file that is renewed as long as its holder lives, from which others see that somebody is at work in a folder.

Runs on the *driver*. Times are those of the modification of files, by the store's own clock, so that machines whose
clocks differ agree.
"""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sparkdl.data.filesystems import Location

logger = logging.getLogger(__name__)

LEASE_S = 120.0
"""Seconds after which a lease that nobody renews is over."""

RENEWAL_S = 20.0
"""Seconds between two renewals."""

STORE_TIMEOUT_S = 10.0
"""How long the end of a lease waits for its store."""


class Lease:
    """A lease from its making to :meth:`end`.

    Args:
        location: the folder. It is made if it does not exist.
        name: of the file.
        content: of the file.

    Attributes:
        path: of the file.
        began: when the file was written.
        is_lost: whether others may have taken it for over, as it was not renewed in time: its file has gone since, or
            another lease of its kind lies beside it, whose name begins alike up to the first hyphen. One whose file
            somebody deleted earlier than that is not lost, and not renewed either.

    Raises:
        Exception: of the filesystem, if the folder cannot be written.
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
        """Whether it has been ended."""
        return self._is_over.is_set()

    def stop(self) -> None:
        """Renew it no more, and leave the file. A renewal on its way is waited for, but not for long."""
        self._is_over.set()
        self._thread.join(STORE_TIMEOUT_S)

    def end(self) -> None:
        """Renew it no more and remove the file, if that can be; doing so again does nothing."""
        self.stop()
        self.within_timeout(self._remove)

    def look(self) -> None:
        """See whether it is lost, and renew it if not; without an answer of the store all stays as it was."""
        self.within_timeout(self._look_or_warn)

    def within_timeout(self, function: Callable[[], object]) -> None:
        """Call what asks the store, once the renewals have stopped; a store that does not answer costs a warning."""
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
        """Return whether there is something left to renew."""
        try:
            return self._look()
        except Exception as error:
            logger.warning("The use of %s could not be renewed: %s", self._location.path, error)
            return True

    def _look(self) -> bool:
        filesystem = self._location.filesystem
        filesystem.invalidate_cache()
        if not filesystem.exists(self.path):
            # What is not there was removed by others after its time, or by somebody on purpose, with the folder or not.
            if filesystem.exists(self._location.path):
                self.is_lost |= store_time(self._location) - self._renewed >= LEASE_S
            return False
        self._write()
        before, self._renewed = self._renewed, modified(self._location, self._name)
        if self._renewed - before >= LEASE_S:
            # It may have been removed after we looked, and been written anew.
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
    """Return when a file of a folder was last written, in seconds.

    Raises:
        Exception: of the filesystem, if there is none.
    """
    location.filesystem.invalidate_cache()
    return float(location.filesystem.modified(f"{location.path}/{name}").timestamp())


def store_time(location: Location) -> float:
    """Return what the clock of a Store shows, in seconds: the modification time of a file made for that."""
    name = f"clock-{uuid.uuid4().hex}.tmp"
    with location.filesystem.open(f"{location.path}/{name}", "wb") as file:
        file.write(b"sparkdl")
    try:
        return modified(location, name)
    finally:
        with suppress(FileNotFoundError):
            location.filesystem.rm(f"{location.path}/{name}")


def file_names(location: Location) -> list[str]:
    """Return the names of what lies directly in a folder; none if it does not exist."""
    try:
        found: Iterable[object] = location.filesystem.ls(location.path, detail=False)
    except FileNotFoundError:
        return []
    return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]
