"""Short-lived files in ``/dev/shm``, readable by this user alone and removed as soon as possible.

A process that is killed between making and removing its file leaves it behind; every file is locked as long
as its maker lives, so the next communicator of the same user can tell such files and removes them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - names in here are random and made with O_EXCL

_PREFIX = "sparkdl-"
_LEFTOVER_AGE_S = 10.0
"""Younger files are never taken for leftovers: their maker may not have locked them yet."""


class SharedFile:
    """A new file in ``/dev/shm`` with a random name, open and locked; a context manager that removes it.

    Attributes:
        path: where other ranks of this host find it until it is removed.
        fd: its descriptor; closed by :meth:`close` unless :meth:`take_fd` was called.

    Raises:
        OSError: if ``/dev/shm`` is missing or cannot be written.
    """

    def __init__(self, duty: str) -> None:
        self.path = FOLDER / f"{_PREFIX}{os.getuid()}-{duty}-{secrets.token_hex(12)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(self.path, flags, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        self._linked = True

    def unlink(self) -> None:
        """Remove the name; whoever has the file open keeps it."""
        if self._linked:
            self._linked = False
            self.path.unlink(missing_ok=True)

    def take_fd(self) -> int:
        """Hand the descriptor over to the caller, who closes it."""
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        """Remove the name and close the descriptor if it is still ours."""
        self.unlink()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_shared(path: str, *, flags: int) -> int:
    """Open a file that another rank published, and return its descriptor.

    Raises:
        OSError: if it is not there, not ours to open, or not a file of sparkdl in ``/dev/shm``.
    """
    name = Path(path)
    if name.parent != FOLDER or not name.name.startswith(_PREFIX):
        raise FileNotFoundError(f"{path!r} is not a shared file of sparkdl")
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW)


def remove_leftovers() -> list[Path]:
    """Remove what killed processes of this user left behind; return which files those were."""
    removed = []
    for path in FOLDER.glob(f"{_PREFIX}{os.getuid()}-*") if FOLDER.is_dir() else ():
        try:
            if time.time() - path.stat().st_mtime < _LEFTOVER_AGE_S:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except OSError:  # locked: its maker lives
            continue
        finally:
            os.close(fd)
    return removed
