"""Communicators on the native core: shared memory inside a host, TCP across. Runs on ranks.

Opening is done here (who shares a host, the segment, the connections); the data path is in
``sparkdl._native``.
"""

from __future__ import annotations

import itertools
import logging
import os
from typing import TYPE_CHECKING

from sparkdl.collective.communicator import Array, Communicator
from sparkdl.collective.connections import connect_rings
from sparkdl.collective.deadline import Deadline
from sparkdl.collective.host_groups import find_hosts
from sparkdl.collective.rendezvous import PrefixRendezvous, Rendezvous
from sparkdl.collective.segment import SegmentError, open_segment
from sparkdl.errors import CommunicatorError, TransportUnavailableError
from sparkdl.topology import Topology, number_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective.handle import Handle

try:
    from sparkdl import _native
except ImportError as error:
    raise TransportUnavailableError(
        f"sparkdl's native extension cannot be imported ({error}). Install sparkdl from a wheel, or build it"
        " with `make setup` in a clone."
    ) from error

logger = logging.getLogger(__name__)


class NativeCommunicator(Communicator):
    """The contract on the native core; made by :func:`open_native_communicator`."""

    def __init__(
        self,
        core: _native.Communicator,
        *,
        topology: Topology,
        name: str,
        rendezvous: Rendezvous,
        secret: bytes,
        requested_transport: str,
        timeout_s: float,
    ) -> None:
        super().__init__(
            topology=topology,
            name=name,
            rendezvous=rendezvous,
            secret=secret,
            requested_transport=requested_transport,
            timeout_s=timeout_s,
        )
        self._core = core

    @property
    def transport(self) -> str:
        """``"native"``."""
        return "native"

    @property
    def failure(self) -> str | None:
        """See the contract."""
        return self._core.failure

    def allreduce(self, array: Array, *, op: str = "sum", timeout_s: float | None = None) -> None:
        """See the contract."""
        self._core.allreduce(array, op, timeout_s)

    def allreduce_async(self, array: Array, *, op: str = "sum", timeout_s: float | None = None) -> Handle:
        """See the contract."""
        return self._core.allreduce_async(array, op, timeout_s)

    def reduce_scatter(
        self, array: Array, out: Array, *, op: str = "sum", timeout_s: float | None = None
    ) -> None:
        """See the contract."""
        self._core.reduce_scatter(array, out, op, timeout_s)

    def reduce_scatter_async(
        self, array: Array, out: Array, *, op: str = "sum", timeout_s: float | None = None
    ) -> Handle:
        """See the contract."""
        return self._core.reduce_scatter_async(array, out, op, timeout_s)

    def allgather(self, array: Array, out: Array, *, timeout_s: float | None = None) -> None:
        """See the contract."""
        self._core.allgather(array, out, timeout_s)

    def allgather_async(self, array: Array, out: Array, *, timeout_s: float | None = None) -> Handle:
        """See the contract."""
        return self._core.allgather_async(array, out, timeout_s)

    def broadcast(self, array: Array, *, root: int, timeout_s: float | None = None) -> None:
        """See the contract."""
        self._core.broadcast(array, root, timeout_s)

    def broadcast_async(self, array: Array, *, root: int, timeout_s: float | None = None) -> Handle:
        """See the contract."""
        return self._core.broadcast_async(array, root, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """See the contract."""
        self._core.barrier(timeout_s)

    def barrier_async(self, *, timeout_s: float | None = None) -> Handle:
        """See the contract."""
        return self._core.barrier_async(timeout_s)

    def abort(self, reason: str) -> None:
        """See the contract."""
        self._core.abort(reason)

    def close(self) -> None:
        """See the contract."""
        self._core.close()


def open_native_communicator(
    *,
    rendezvous: Rendezvous,
    own_rendezvous: PrefixRendezvous,
    rank: int,
    world_size: int,
    secret: bytes,
    transport: str,
    timeout_s: float,
    name: str,
    host_of_rank: Sequence[int] | None,
) -> NativeCommunicator:
    """Open a communicator on the native core; see :func:`~sparkdl.collective.communicator.open_communicator`.

    Args:
        rendezvous: the store that the communicator shows to its users.
        own_rendezvous: a view of it that this opening has for itself.
        rank: number of this rank.
        world_size: how many ranks there are.
        secret: the job's secret.
        transport: ``"auto"``, ``"native"``, ``"shm"`` or ``"tcp"``.
        timeout_s: seconds for opening, and the default deadline of every operation.
        name: what it is called.
        host_of_rank: which ranks share a host; found out by trying when None.
    """
    deadline = Deadline(timeout_s)
    if transport == "tcp":
        topology, segment_fd = Topology(rank=rank, host_of_rank=tuple(range(world_size))), -1
    else:
        hosts = (
            tuple(host_of_rank)
            if host_of_rank is not None
            else find_hosts(own_rendezvous, rank=rank, world_size=world_size, timeout_s=timeout_s)
        )
        topology = Topology(rank=rank, host_of_rank=hosts)
        topology, segment_fd = _share_memory(own_rendezvous, topology, transport, deadline)
    try:
        sockets = connect_rings(
            own_rendezvous, topology=topology, secret=secret, name=name, timeout_s=deadline.remaining_s()
        )
    except BaseException:
        if segment_fd >= 0:
            os.close(segment_fd)
        raise
    fds = {kind: pair.detach() for kind, pair in sockets.items()}
    try:
        core = _native.Communicator(
            rank=rank,
            host_of_rank=list(topology.host_of_rank),
            segment_fd=segment_fd,
            lane_fds=fds.get("lane", (-1, -1)),
            lifeline_fds=fds.get("lifeline", (-1, -1)),
            timeout_s=timeout_s,
        )
    except ValueError:
        # The core takes the descriptors over unless it refuses them.
        for fd in (segment_fd, *itertools.chain.from_iterable(fds.values())):
            if fd >= 0:
                os.close(fd)
        raise
    return NativeCommunicator(
        core,
        topology=topology,
        name=name,
        rendezvous=rendezvous,
        secret=secret,
        requested_transport=transport,
        timeout_s=timeout_s,
    )


def _share_memory(
    rendezvous: Rendezvous, topology: Topology, transport: str, deadline: Deadline
) -> tuple[Topology, int]:
    """Find who shares a host and open the host's segment; where that fails and may, go on without it."""
    hosts = topology.host_of_rank
    if transport == "shm" and topology.num_hosts > 1:
        raise CommunicatorError(
            f"transport='shm' needs all ranks to share memory, but these are on hosts {list(hosts)}."
            " Use transport='auto'."
        )
    try:
        num_bytes = _native.segment_bytes(topology.local_size) if topology.local_size > 1 else 0
        return topology, open_segment(
            rendezvous, topology, num_bytes=num_bytes, timeout_s=deadline.remaining_s()
        )
    except SegmentError as error:
        if transport != "auto":
            raise
        logger.warning("No shared memory between ranks that share a host; they use TCP. %s", error)
        failed = error.hosts
    without = number_hosts([(host, other if host in failed else None) for other, host in enumerate(hosts)])
    topology = Topology(rank=topology.rank, host_of_rank=without)
    second_try = PrefixRendezvous(rendezvous, "second try")
    num_bytes = _native.segment_bytes(topology.local_size) if topology.local_size > 1 else 0
    return topology, open_segment(second_try, topology, num_bytes=num_bytes, timeout_s=deadline.remaining_s())
