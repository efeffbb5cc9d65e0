"""Shared-memory segment of the ranks of a host: one rank creates it and passes its descriptor to the others.

The segment has no name, so it cannot be left behind. The other ranks receive the descriptor over a Unix socket. Every
process of the host can connect to this socket; therefore both ends prove that they have the job's secret. The memory is
reserved when the segment is created, so that a ``/dev/shm`` that is too small causes an error at once instead of a
SIGBUS later.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.collective.byte_exchange import agree
from sparkdl.errors import AuthenticationError, CommunicatorError, SparkdlError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.rendezvous.dialing import connect_unix
from sparkdl.rendezvous.hosts import FOLDER, nameless_file
from sparkdl.rendezvous.listener import AuthenticatedListener
from sparkdl.rendezvous.store import Rendezvous, all_gather_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.topology import Topology

_PURPOSE = b"sparkdl segment"
_BACKLOG = 1024


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
    fds: list[int] = []

    def exchange(key: str, outcome: Any) -> list[Any]:
        answers = all_gather_bytes(
            rendezvous,
            key=key,
            rank=topology.rank,
            world_size=topology.world_size,
            value=json.dumps(outcome).encode(),
            timeout_s=deadline.remaining_s(),
        )
        return [json.loads(answer) for answer in answers]

    def make() -> str:
        if not leads:
            return ""
        fds.append(_make(num_bytes))
        return _offer(fds[0], secret, stack)

    def receive() -> None:
        if topology.local_size > 1 and not leads:
            fds.append(_receive(names[topology.local_ranks[0]], secret, deadline))

    explain, failing = partial(_failure_of, topology), (CommunicatorError, AuthenticationError)
    try:
        with ExitStack() as stack:
            names = agree(partial(exchange, "segment/made"), make, explain, of=failing)
            agree(partial(exchange, "segment/opened"), receive, explain, of=failing)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds[0] if fds else -1


def _failure_of(topology: Topology, failures: Mapping[int, Any]) -> SparkdlError:
    """Return the error of the lowest rank whose secret differs, or else of the lowest rank that failed."""
    refused = [rank for rank, (kind, _) in failures.items() if kind == AuthenticationError.__name__]
    rank = min(refused or failures)
    text = f"rank {rank}: {failures[rank][1]}"
    if refused:
        return AuthenticationError(text)
    return SegmentError(text, hosts=frozenset(topology.host_of_rank[rank] for rank in failures))


def _make(num_bytes: int) -> int:
    try:
        fd = nameless_file()
    except OSError as error:
        raise CommunicatorError(f"cannot make a file in {FOLDER}: {error}") from error
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        raise CommunicatorError(_explain(num_bytes, error)) from error
    return fd


def _offer(fd: int, secret: bytes, stack: ExitStack) -> str:
    """Serve the descriptor to processes that prove the secret, until the stack closes; return the socket's name."""
    name = f"sparkdl-segment-{secrets.token_hex(16)}"

    def give(connection: socket.socket) -> None:
        with connection:
            socket.send_fds(connection, [b"\0"], [fd])

    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0{name}")
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        stack.enter_context(
            AuthenticatedListener(secret, purpose=_PURPOSE, sockets=[sock], on_connection=give)
        )
    except OSError as error:
        raise CommunicatorError(
            f"cannot offer the segment to the other ranks of this host: {error}"
        ) from error
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


def _receive(name: str, secret: bytes, deadline: Deadline) -> int:
    try:
        with connect_unix(name, secret, purpose=_PURPOSE, timeout_s=deadline.remaining_s()) as sock:
            sock.settimeout(max(deadline.remaining_s(), 1e-3))
            _, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except AuthenticationError:
        raise
    except OSError as error:
        raise CommunicatorError(f"cannot get the segment of this host: {error}") from error
    if not fds:
        raise CommunicatorError("cannot get the segment of this host: its descriptor did not arrive")
    return fds[0]
