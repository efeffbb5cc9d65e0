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
from sparkdl.collective.rendezvous import PrefixRendezvous
from sparkdl.collective.segment import SegmentError, open_segment
from sparkdl.errors import CommunicatorError, TransportUnavailableError
from sparkdl.topology import Topology, number_hosts

if TYPE_CHECKING:
    from sparkdl.collective.handle import Handle
    from sparkdl.collective.opening import Opening

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

    def __init__(self, core: _native.Communicator, opening: Opening, topology: Topology) -> None:
        super().__init__(opening, topology)
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


def open_native_communicator(opening: Opening) -> NativeCommunicator:
    """Open a communicator on the native core; see :func:`~sparkdl.collective.communicator.open_communicator`."""
    deadline = Deadline(opening.timeout_s)
    topology = opening.find_topology(deadline)
    memory, segment_fd = _share_memory(opening, topology, deadline)
    try:
        sockets = connect_rings(
            opening.own_rendezvous,
            topology=memory,
            secret=opening.secret,
            name=opening.name,
            timeout_s=deadline.remaining_s(),
        )
    except BaseException:
        if segment_fd >= 0:
            os.close(segment_fd)
        raise
    fds = {kind: pair.detach() for kind, pair in sockets.items()}
    try:
        core = _native.Communicator(
            rank=opening.rank,
            host_of_rank=list(memory.host_of_rank),
            segment_fd=segment_fd,
            lane_fds=fds.get("lane", (-1, -1)),
            lifeline_fds=fds.get("lifeline", (-1, -1)),
            timeout_s=opening.timeout_s,
        )
    except ValueError:
        # The core takes the descriptors over unless it refuses them.
        for fd in (segment_fd, *itertools.chain.from_iterable(fds.values())):
            if fd >= 0:
                os.close(fd)
        raise
    return NativeCommunicator(core, opening, topology)


def _share_memory(opening: Opening, topology: Topology, deadline: Deadline) -> tuple[Topology, int]:
    """Open the host's segment, unless TCP was asked for or must do.

    Returns:
        The ranks grouped by the segment that they share, which is what the core takes for hosts, and the
        segment's descriptor, -1 if this rank shares none.
    """
    hosts, transport = topology.host_of_rank, opening.transport
    if transport == "tcp":
        return Topology(rank=topology.rank, host_of_rank=tuple(range(topology.world_size))), -1
    if transport == "shm" and topology.num_hosts > 1:
        raise CommunicatorError(
            f"transport='shm' needs all ranks to share memory, but these are on hosts {list(hosts)}."
            " Use transport='auto'."
        )
    try:
        return topology, _open_segment(opening.own_rendezvous, topology, deadline)
    except SegmentError as error:
        if transport != "auto":
            raise
        logger.warning("No shared memory between ranks that share a host; they use TCP. %s", error)
        failed = error.hosts
    without = number_hosts([(host, rank if host in failed else None) for rank, host in enumerate(hosts)])
    memory = Topology(rank=topology.rank, host_of_rank=without)
    return memory, _open_segment(PrefixRendezvous(opening.own_rendezvous, "second try"), memory, deadline)


def _open_segment(rendezvous: PrefixRendezvous, topology: Topology, deadline: Deadline) -> int:
    num_bytes = _native.segment_bytes(topology.local_size) if topology.local_size > 1 else 0
    return open_segment(rendezvous, topology, num_bytes=num_bytes, timeout_s=deadline.remaining_s())
