"""A small file that is renewed as long as its holder lives, from which others see that somebody is at work in a folder.

Runs on the *driver*. Times are those of the modification of files, by the store's own clock, so that machines whose
clocks differ agree.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sparkdl.data.filesystems import Location

logger = logging.getLogger(__name__)

LEASE_S = 120.0
"""Seconds after which a lease that nobody renews is over."""

RENEWAL_S = 20.0
"""Seconds between two renewals."""


class Lease:
    """A lease from its making to :meth:`end`.

    Args:
        location: the folder. It is made if it does not exist.
        name: of the file.
        content: of the file.

    Attributes:
        path: of the file.
        began: when the file was written.

    Raises:
        Exception: of the filesystem, if the folder cannot be written.
    """

    def __init__(self, location: Location, name: str, content: bytes = b"sparkdl") -> None:
        self._location, self._content = location, content
        self.path = f"{location.path}/{name}"
        location.make_folder()
        self._write()
        self.began = modified(location, name)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="sparkdl-lease", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has been ended."""
        return self._is_over.is_set()

    def stop(self) -> None:
        """Renew it no more, and leave the file."""
        self._is_over.set()
        self._thread.join()

    def end(self) -> None:
        """Renew it no more and remove the file, if that can be; doing so again does nothing."""
        self.stop()
        with suppress(Exception):
            self._location.filesystem.rm(self.path)

    def _renew(self) -> None:
        while not self._is_over.wait(RENEWAL_S):
            try:
                if not self._location.filesystem.exists(self.path):
                    return  # somebody deleted the folder on purpose
                self._write()
            except Exception as error:
                logger.warning("The use of %s could not be renewed: %s", self._location.path, error)

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


def file_names(location: Location) -> list[str]:
    """Return the names of what lies directly in a folder; none if it does not exist."""
    try:
        found: Iterable[object] = location.filesystem.ls(location.path, detail=False)
    except FileNotFoundError:
        return []
    return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]
