"""Communicators on the native core, and opening them.

Opening finds the ranks that share a host and creates the segment and the connections; the data path is in
``sparkdl._native``.
"""

from __future__ import annotations

import logging
import os
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.native.point_to_point import NativeMessages
from sparkdl.collective.native.ring_connections import connect_rings
from sparkdl.collective.native.segment import SegmentError, open_segment
from sparkdl.collective.telemetry.stalls import stall_fd, watch_native
from sparkdl.errors import CommunicatorError, TransportUnavailableError
from sparkdl.foreign_errors import as_utf8
from sparkdl.rendezvous.addresses import LOOPBACK
from sparkdl.rendezvous.store import Rendezvous
from sparkdl.topology import Topology, number_hosts

if TYPE_CHECKING:
    from sparkdl import _native
    from sparkdl.collective.opening import Opening

logger = logging.getLogger(__name__)


try:
    from sparkdl import _native
except ImportError as error:
    raise TransportUnavailableError(
        f"sparkdl's native extension cannot be imported ({error}). Install sparkdl from a wheel, or build it"
        " with `make setup` in a clone."
    ) from error


def _of_core(name: str) -> Any:
    """The core's method of that name, looked up once per communicator, to save a Python frame in every call."""
    return cached_property(attrgetter(f"_core.{name}"))


class NativeCommunicator(Communicator):
    """A communicator on the native core; created by :func:`open_native_communicator`."""

    transport = "native"

    def __init__(
        self, core: _native.Communicator, opening: Opening, topology: Topology, memory: Topology
    ) -> None:
        super().__init__(opening, topology)
        self._core = core
        watch_native(self, core.monitor)
        self._memory = memory
        self._num_arenas = 0
        self._has_room = True
        self._messages: NativeMessages = NativeMessages(self, opening.own_rendezvous)
        self.monitors = core.monitor, self._messages.monitor

    @property
    def failure(self) -> str | None:
        """See the contract."""
        return self._core.failure

    allreduce = _of_core("allreduce")
    allreduce_async = _of_core("allreduce_async")
    allreduce_group = _of_core("allreduce_group")
    allreduce_group_async = _of_core("allreduce_group_async")
    reduce_scatter = _of_core("reduce_scatter")
    reduce_scatter_async = _of_core("reduce_scatter_async")
    reduce_scatter_group = _of_core("reduce_scatter_group")
    reduce_scatter_group_async = _of_core("reduce_scatter_group_async")
    allgather = _of_core("allgather")
    allgather_async = _of_core("allgather_async")
    allgather_group = _of_core("allgather_group")
    allgather_group_async = _of_core("allgather_group_async")
    broadcast = _of_core("broadcast")
    broadcast_async = _of_core("broadcast_async")
    reduce = _of_core("reduce")
    reduce_async = _of_core("reduce_async")
    gather = _of_core("gather")
    gather_async = _of_core("gather_async")
    scatter = _of_core("scatter")
    scatter_async = _of_core("scatter_async")
    alltoall = _of_core("alltoall")
    alltoall_async = _of_core("alltoall_async")
    barrier = _of_core("barrier")
    barrier_async = _of_core("barrier_async")
    join = _of_core("join")

    def allocate(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """See the contract."""
        is_shared = self._memory.num_hosts == 1 and self._memory.local_size > 1 and self._has_room
        if num_bytes == 0 or not is_shared:
            return super().allocate(num_bytes)
        part_bytes = _native.arena_part_bytes(num_bytes)
        self._num_arenas += 1
        try:
            fd = open_segment(
                self._own_rendezvous.view(f"arena/{self._num_arenas}"),
                self._memory,
                secret=self.secret,
                num_bytes=part_bytes * self._memory.local_size,
                timeout_s=self.timeout_s,
            )
        except SegmentError as error:  # all ranks raise it
            self._has_room = False
            if self._memory.local_rank == 0:
                logger.warning(
                    "Shared memory is too small for all gradients. The rest lies in each rank's own memory, and "
                    "collectives copy it. %s",
                    error,
                )
            return super().allocate(num_bytes)
        try:
            return self._core.add_arena(fd, part_bytes)[:num_bytes]
        finally:
            os.close(fd)

    def abort(self, reason: str) -> None:
        """See the contract."""
        reason = as_utf8(reason)
        self._core.abort(reason)
        self._messages.abort(reason)

    def close(self) -> None:
        """See the contract."""
        self._end_timeline()
        self._messages.close()
        self._core.close()


def open_native_communicator(opening: Opening) -> NativeCommunicator:
    """Open a communicator on the native core; see :func:`~sparkdl.collective.opening.open_communicator`."""
    topology = opening.find_topology()
    memory, segment_fd = _share_memory(opening, topology)
    try:
        fds = connect_rings(
            opening.own_rendezvous,
            topology=memory,
            # Ranks of one host share a network namespace (see sparkdl.rendezvous.hosts), hence its loopback.
            listen_on=[LOOPBACK] if topology.num_hosts == 1 else None,
            secret=opening.secret,
            name=opening.name,
            wire=opening.wire,
            timeout_s=opening.deadline.remaining_s(),
        )
    except BaseException:
        if segment_fd >= 0:
            os.close(segment_fd)
        raise
    stall_check = opening.stall_check
    core = _native.Communicator(
        rank=opening.rank,
        host_of_rank=list(memory.host_of_rank),
        segment_fd=segment_fd,
        lane_fds=fds.get("lane", (-1, -1)),
        lifeline_fds=fds.get("lifeline", (-1, -1)),
        timeout_s=opening.timeout_s,
        wire=opening.wire,
        stall_warning_s=stall_check.warn_after_s,
        stall_abort_s=stall_check.abort_after_s,
        stall_fd=-1 if stall_check.warn_after_s is None else stall_fd(os.getpid()),
    )
    return NativeCommunicator(core, opening, topology, memory)


def _share_memory(opening: Opening, topology: Topology) -> tuple[Topology, int]:
    """Open the host's segment, unless TCP is requested or the only possibility.

    Returns:
        Topology of the ranks by the segment that they share, which the core treats as hosts, and the segment's
        descriptor; -1 if this rank shares no segment.
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
        return topology, _open_segment(opening, opening.own_rendezvous, topology)
    except SegmentError as error:
        if transport != "auto":
            raise
        logger.warning("No shared memory between ranks that share a host; they use TCP. %s", error)
        failed = error.hosts
    without = number_hosts([(host, rank if host in failed else None) for rank, host in enumerate(hosts)])
    memory = Topology(rank=topology.rank, host_of_rank=without)
    second = opening.own_rendezvous.view("second try")
    return memory, _open_segment(opening, second, memory)


def _open_segment(opening: Opening, rendezvous: Rendezvous, topology: Topology) -> int:
    return open_segment(
        rendezvous,
        topology,
        secret=opening.secret,
        num_bytes=_native.segment_bytes(topology.local_size) if topology.local_size > 1 else 0,
        timeout_s=opening.deadline.remaining_s(),
    )
