"""Files in ``/dev/shm`` that never have a name, so that nothing is left of them when the processes that use them end.

Other ranks of the host get the descriptor itself, over a Unix socket (see :mod:`sparkdl.collective.segment`).
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - nothing in here is opened by a name that others could guess


def nameless_file() -> int:
    """Make a file in ``/dev/shm``, and return its descriptor, the caller's to close.

    Raises:
        OSError: if ``/dev/shm`` is missing or cannot be written.
    """
    try:
        return os.open(FOLDER, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # Not a tmpfs, and a file system that has only files with names: this one has its for an instant.
    path = FOLDER / f"sparkdl-{os.getuid()}-{secrets.token_hex(12)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    path.unlink()
    return fd


def folder_identity() -> tuple[int, int] | None:
    """What tells this process's ``/dev/shm`` from others of the same kernel; None if it cannot be used."""
    try:
        os.close(nameless_file())
        found = FOLDER.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
