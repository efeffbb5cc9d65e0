"""Shared-memory segment of the ranks of a host: one rank creates it and passes its descriptor to the others.

The segment has no name, so it cannot be left behind. The other ranks receive the descriptor over a Unix socket. Every
process of the host can connect to this socket; therefore both ends prove that they have the job's secret. The memory is
reserved when the segment is created, so that a ``/dev/shm`` that is too small causes an error at once instead of a
SIGBUS later.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

from sparkdl.errors import AuthenticationError, CommunicatorError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.rendezvous.dialing import connect_unix
from sparkdl.rendezvous.hosts import FOLDER, nameless_file
from sparkdl.rendezvous.listener import AuthenticatedListener
from sparkdl.rendezvous.store import Rendezvous, all_gather_bytes

if TYPE_CHECKING:
    from sparkdl.topology import Topology

_PURPOSE = b"sparkdl segment"
_BACKLOG = 1024
_REFUSED = "refused"
"""Published in place of a name if the handshake with the rank that created the segment failed."""


class SegmentError(CommunicatorError):
    """The segment cannot be created or opened on some host; every rank of the communicator raises this error.

    Attributes:
        hosts: indices of the hosts on which it failed.
    """

    def __init__(self, message: str, *, hosts: frozenset[int]) -> None:
        super().__init__(message)
        self.hosts = hosts


def open_segment(
    rendezvous: Rendezvous, topology: Topology, *, secret: bytes, num_bytes: int, timeout_s: float
) -> int:
    """Create and open the segment that this host's ranks share; all ranks of the communicator take part.

    Args:
        rendezvous: part of the rendezvous for this communicator only.
        topology: topology of this rank.
        secret: the job's secret.
        num_bytes: size of the segment in bytes.
        timeout_s: seconds for the whole call.

    Returns:
        Descriptor of the segment, to be closed by the caller; -1 if this rank is alone on its host.

    Raises:
        AuthenticationError: on every rank, if two ranks of a host have different secrets.
        SegmentError: on every rank, if the segment cannot be created or opened on some host.
        CommunicatorTimeoutError: if some rank does not take part in time; the message names it.
    """
    deadline = Deadline(timeout_s)
    leads = topology.local_size > 1 and topology.local_rank == 0
    fd, failure = _make(num_bytes) if leads else (-1, "")
    is_refused = False
    try:
        with ExitStack() as stack:
            name = ""
            if fd >= 0:
                try:
                    name = _offer(fd, secret, stack)
                except OSError as error:
                    failure = f"cannot offer the segment to the other ranks of this host: {error}"
            names = _exchange(rendezvous, topology, deadline, key="segment/made", name=name, failure=failure)
            if topology.local_size > 1 and not leads:
                try:
                    fd, failure = _receive(names[topology.local_ranks[0]], secret, deadline)
                except AuthenticationError as error:
                    failure, is_refused = str(error), True
            _exchange(
                rendezvous,
                topology,
                deadline,
                key="segment/opened",
                name=_REFUSED if is_refused else "",
                failure=failure,
            )
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def _exchange(
    rendezvous: Rendezvous, topology: Topology, deadline: Deadline, *, key: str, name: str, failure: str
) -> list[str]:
    answers = all_gather_bytes(
        rendezvous,
        key=key,
        rank=topology.rank,
        world_size=topology.world_size,
        value=f"{name}\n{failure}".encode(),
        timeout_s=deadline.remaining_s(),
    )
    names, failures = zip(*(answer.decode().split("\n", 1) for answer in answers), strict=True)
    failed = {rank: text for rank, text in enumerate(failures) if text}
    refused = [rank for rank in failed if names[rank] == _REFUSED]
    if refused:
        raise AuthenticationError(f"rank {refused[0]}: {failed[refused[0]]}")
    if failed:
        rank = min(failed)
        hosts = frozenset(topology.host_of_rank[rank] for rank in failed)
        raise SegmentError(f"rank {rank}: {failed[rank]}", hosts=hosts)
    return list(names)


def _make(num_bytes: int) -> tuple[int, str]:
    try:
        fd = nameless_file()
    except OSError as error:
        return -1, f"cannot make a file in {FOLDER}: {error}"
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        return -1, _explain(num_bytes, error)
    return fd, ""


def _offer(fd: int, secret: bytes, stack: ExitStack) -> str:
    """Serve the descriptor to processes that prove the secret, until the stack closes; return the socket's name."""
    name = f"sparkdl-segment-{secrets.token_hex(16)}"

    def give(connection: socket.socket) -> None:
        with connection:
            socket.send_fds(connection, [b"\0"], [fd])

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    stack.enter_context(AuthenticatedListener(secret, purpose=_PURPOSE, sockets=[sock], on_connection=give))
    return name


def _explain(num_bytes: int, error: OSError) -> str:
    needed_mib = -(-num_bytes // (1 << 20))
    if error.errno != errno.ENOSPC:
        return f"cannot reserve {needed_mib} MiB of shared memory in {FOLDER}: {error}"
    free_mib = shutil.disk_usage(FOLDER).free >> 20
    return (
        f"{FOLDER} has {free_mib} MiB free, but {needed_mib} MiB are needed there."
        f" Enlarge it (docker run --shm-size, a memory-backed emptyDir at {FOLDER}), or pass transport='tcp'."
    )


def _receive(name: str, secret: bytes, deadline: Deadline) -> tuple[int, str]:
    try:
        with connect_unix(name, secret, purpose=_PURPOSE, timeout_s=deadline.remaining_s()) as sock:
            sock.settimeout(max(deadline.remaining_s(), 1e-3))
            _, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except AuthenticationError:
        raise
    except OSError as error:
        return -1, f"cannot get the segment of this host: {error}"
    if not fds:
        return -1, "cannot get the segment of this host: its descriptor did not arrive"
    return fds[0], ""
