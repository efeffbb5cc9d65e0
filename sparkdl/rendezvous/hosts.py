"""Detection of the ranks that share a host, and nameless files in ``/dev/shm`` for the memory that they share.

Runs on every rank, while a communicator opens. A nameless file leaves nothing behind when the processes that use it
end. Other ranks of the host receive its descriptor over a Unix socket (see :mod:`sparkdl.collective.native.segment`).

Ranks share a host if they see each other's mark and have the same ``/dev/shm``. A mark is a random name in the
abstract namespace of Unix sockets (unix(7)). Only processes of the same network namespace see it; they run on the
same kernel and can pass descriptors to each other. A mark disappears with its process, however that ends. Host names
are never compared: two containers can have the same host name or boot id without sharing memory, and one machine can
have two names.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.closing import Closing
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.rendezvous.store import Rendezvous, all_gather_bytes
from sparkdl.topology import number_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


FOLDER = Path("/dev/shm")  # noqa: S108 - nothing in here is opened by a name that others could guess


def nameless_file() -> int:
    """Make a nameless file in ``/dev/shm``, and return its descriptor, which the caller has to close.

    Raises:
        OSError: if ``/dev/shm`` is missing or cannot be written.
    """
    try:
        return os.open(FOLDER, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # Not a tmpfs, but a file system without nameless files: this file has a name for an instant.
    path = FOLDER / f"sparkdl-{os.getuid()}-{secrets.token_hex(12)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    path.unlink()
    return fd


def folder_identity() -> tuple[int, int] | None:
    """Numbers that identify this process's ``/dev/shm`` on its kernel; None if ``/dev/shm`` cannot be used."""
    try:
        os.close(nameless_file())
        status = FOLDER.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_NAME_BYTES = 16


class Mark(Closing):
    """A name that all processes of this network namespace see, and no others; a context manager.

    Attributes:
        name: name to pass to :func:`is_marked`; empty if a sandbox does not let this process bind a name.
    """

    def __init__(self) -> None:
        self.name = f"sparkdl-mark-{secrets.token_hex(_NAME_BYTES)}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._sock.bind(f"\0{self.name}")
        except OSError as error:
            logger.warning(
                "This process cannot bind an abstract Unix socket (%s): it will use TCP to all other ranks.",
                error,
            )
            self.name = ""

    def close(self) -> None:
        """Release the name."""
        self._sock.close()


def is_marked(name: str) -> bool:
    """Whether this process sees the mark with this name."""
    if not name:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(f"\0{name}")
        except OSError:
            return False
    return True


def find_hosts(rendezvous: Rendezvous, *, rank: int, world_size: int, timeout_s: float) -> tuple[int, ...]:
    """Find the host index of every rank, numbered by first appearance; all ranks get the same result.

    A rank that has no ``/dev/shm`` counts as alone on its host.

    Raises:
        CommunicatorTimeoutError: if some rank does not take part in time; the message names it.
    """
    if world_size == 1:
        return (0,)
    deadline = Deadline(timeout_s)
    folder = folder_identity()
    with Mark() as mark:
        offers = all_gather_bytes(
            rendezvous,
            key="hosts/offers",
            rank=rank,
            world_size=world_size,
            value=json.dumps([mark.name, folder]).encode(),
            timeout_s=deadline.remaining_s(),
        )
        marks, folders = zip(*map(json.loads, offers), strict=True)
        # Compared with this rank's own entry in ``folders``, not with ``folder``: JSON turns tuples into lists.
        same = [folder is not None and other == folders[rank] for other in folders]
        seen = [
            other for other in range(world_size) if other == rank or (same[other] and is_marked(marks[other]))
        ]
        # The marks stay until all ranks have published what they saw.
        sightings = all_gather_bytes(
            rendezvous,
            key="hosts/sightings",
            rank=rank,
            world_size=world_size,
            value=json.dumps(seen).encode(),
            timeout_s=deadline.remaining_s(),
        )
    return group_by_sight([set(json.loads(sighting)) for sighting in sightings])


def group_by_sight(seen: Sequence[set[int]]) -> tuple[int, ...]:
    """Group ranks so that the ranks of a group all see each other; ``seen[r]`` holds the ranks that rank r sees.

    Seeing is neither symmetric nor transitive: users, mounts and containers can hide marks. All ranks compute the
    groups from the same input, so they get the same result.
    """
    groups: list[list[int]] = []
    host_of_rank = []
    for rank, sight in enumerate(seen):
        for host, members in enumerate(groups):
            if all(member in sight and rank in seen[member] for member in members):
                members.append(rank)
                host_of_rank.append(host)
                break
        else:
            groups.append([rank])
            host_of_rank.append(len(groups) - 1)
    return number_hosts(host_of_rank)
