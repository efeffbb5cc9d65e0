"""The contract of every communicator, and the one function that opens them. Runs on ranks.

Arrays are C-contiguous buffers in CPU memory: NumPy arrays, or anything with ``__dlpack__`` such as torch
tensors, of float32, float64, bfloat16, float16, int32, int64 or uint8; bfloat16 and float16 are added up in
float32. ``op`` is ``"sum"``, ``"avg"``, ``"min"``, ``"max"`` or ``"product"``; the average of integers is
rounded toward zero.

Every operation has a deadline, ``timeout_s`` or the communicator's own; after an operation has failed the
communicator is of no further use. All ranks must call the same operations in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from sparkdl.collective.opening import Opening
from sparkdl.collective.rendezvous import PrefixRendezvous, Rendezvous
from sparkdl.errors import ParamError
from sparkdl.topology import number_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from sparkdl.collective.handle import Handle
    from sparkdl.topology import Topology

TRANSPORTS = ("auto", "native", "shm", "tcp", "mpi")

Array = Any
"""A C-contiguous CPU buffer; see the head of this module."""


class Communicator(ABC):
    """The open group of ranks. A context manager: closes on success, aborts on exception.

    Attributes:
        topology: which ranks share a host, whatever carries the data between them.
        name: what the communicator is called in messages.
        rendezvous: the store it was opened over.
        secret: the job's secret.
        requested_transport: the ``transport`` that it was opened with; what a sub-group should be opened with.
        timeout_s: default deadline of every operation, in seconds.
    """

    def __init__(self, opening: Opening, topology: Topology) -> None:
        self.topology = topology
        self.name = opening.name
        self.rendezvous = opening.rendezvous
        self.secret = opening.secret
        self.requested_transport = opening.transport
        self.timeout_s = opening.timeout_s

    @property
    @abstractmethod
    def transport(self) -> str:
        """What carries the data: ``"native"`` or ``"mpi"``."""

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why the communicator cannot be used any more; None as long as it can."""

    @property
    def rank(self) -> int:
        """Number of this rank in the communicator."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """How many ranks the communicator has."""
        return self.topology.world_size

    @abstractmethod
    def allreduce_async(self, array: Array, *, op: str = "sum", timeout_s: float | None = None) -> Handle:
        """Start :meth:`allreduce`."""

    @abstractmethod
    def reduce_scatter_async(
        self, array: Array, out: Array, *, op: str = "sum", timeout_s: float | None = None
    ) -> Handle:
        """Start :meth:`reduce_scatter`."""

    @abstractmethod
    def allgather_async(self, array: Array, out: Array, *, timeout_s: float | None = None) -> Handle:
        """Start :meth:`allgather`."""

    @abstractmethod
    def broadcast_async(self, array: Array, *, root: int, timeout_s: float | None = None) -> Handle:
        """Start :meth:`broadcast`."""

    @abstractmethod
    def barrier_async(self, *, timeout_s: float | None = None) -> Handle:
        """Start :meth:`barrier`."""

    @abstractmethod
    def allreduce(self, array: Array, *, op: str = "sum", timeout_s: float | None = None) -> None:
        """Reduce ``array`` over all ranks, in place; every rank ends with the same bits.

        Raises:
            CommunicatorTimeoutError: if some rank does not join in time; the message names it.
            RankLostError: if a rank has died; the message names it.
            CommunicatorAbortedError: if a rank aborted; the message has its reason.
        """

    @abstractmethod
    def reduce_scatter(
        self, array: Array, out: Array, *, op: str = "sum", timeout_s: float | None = None
    ) -> None:
        """Reduce ``array`` over all ranks; rank r gets block r in ``out``.

        Args:
            array: ``world_size`` times as many elements as ``out``.
            out: the block of this rank; same dtype.
            op: how to reduce.
            timeout_s: deadline; see :meth:`allreduce` for the errors.
        """

    @abstractmethod
    def allgather(self, array: Array, out: Array, *, timeout_s: float | None = None) -> None:
        """Put the ``array`` of every rank into ``out``, in order of rank.

        Args:
            array: the block of this rank; may be its own place in ``out``.
            out: ``world_size`` times as many elements; same dtype.
            timeout_s: deadline; see :meth:`allreduce` for the errors.
        """

    @abstractmethod
    def broadcast(self, array: Array, *, root: int, timeout_s: float | None = None) -> None:
        """Copy rank ``root``'s ``array`` into that of every other rank; errors as for :meth:`allreduce`."""

    @abstractmethod
    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank is here; errors as for :meth:`allreduce`."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make every operation fail with ``reason``, here and on all peers; returns at once."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is queued and leave; the peers do not take this for a death. May be called again."""

    def split(self, ranks: Sequence[int], name: str) -> Communicator | None:
        """Open a process set: a communicator of some ranks of this one. Only these ranks need to call it.

        Args:
            ranks: the members; their order gives their ranks in the process set.
            name: distinguishes process sets that are opened at the same time.

        Returns:
            The process set, to be closed by the caller; None on a rank that is not in it.

        Raises:
            ParamError: if ``ranks`` is empty, has duplicates, or names a rank that does not exist.
        """
        members = list(ranks)
        outside = [rank for rank in members if not 0 <= rank < self.world_size]
        if not members or outside or len(set(members)) != len(members):
            raise ParamError(
                f"process set {name!r} has ranks {members}: they must be distinct and within"
                f" 0 to {self.world_size - 1}, and there must be one at least"
            )
        if self.rank not in members:
            return None
        return open_communicator(
            rendezvous=self.rendezvous,
            rank=members.index(self.rank),
            world_size=len(members),
            secret=self.secret,
            transport=self.requested_transport,
            timeout_s=self.timeout_s,
            name=f"{self.name}/{name}",
            host_of_rank=self.hosts_of(members),
        )

    def hosts_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The hosts of some ranks of this communicator, numbered anew by first appearance."""
        return number_hosts([self.topology.host_of_rank[rank] for rank in ranks])

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()


def open_communicator(
    *,
    rendezvous: Rendezvous,
    rank: int,
    world_size: int,
    secret: bytes,
    transport: str = "auto",
    timeout_s: float = 300.0,
    name: str = "world",
    host_of_rank: Sequence[int] | None = None,
) -> Communicator:
    """Open a communicator; all its ranks call this with the same arguments but ``rank``.

    Args:
        rendezvous: the store in which the ranks find each other.
        rank: number of this rank.
        world_size: how many ranks there are.
        secret: the job's secret, with which ranks prove themselves to each other.
        transport: ``"auto"`` and ``"native"``: shared memory inside a host and TCP across, where ``"auto"``
            makes do with TCP, after a warning, on a host whose shared memory is too small; ``"shm"`` and
            ``"tcp"``: only that; ``"mpi"``: mpi4py.
        timeout_s: seconds for opening, and the default deadline of every operation.
        name: what it is called; the same name may be opened again, as long as all ranks do so in the same
            order.
        host_of_rank: which ranks share a host, numbered by first appearance, where the caller knows; found
            out by trying when None.

    Raises:
        ParamError: if an argument has a value that cannot work.
        TransportUnavailableError: if the transport is not installed.
        CommunicatorTimeoutError: if some rank does not take part in time; the message names it.
        AuthenticationError: if some rank has another secret.
        CommunicatorError: if the ranks cannot connect, or shared memory cannot be had where it was asked for.
    """
    if transport not in TRANSPORTS:
        raise ParamError(f"transport={transport!r} is unknown; it may be one of {', '.join(TRANSPORTS)}")
    if not 0 <= rank < world_size:
        raise ParamError(f"rank {rank} is outside a world of {world_size} ranks")
    # A name that is opened again must not meet what the first opening left in the store.
    count = rendezvous.add(f"communicator/{name}/openings/{rank}/{world_size}", 1)
    opening = Opening(
        rendezvous=rendezvous,
        own_rendezvous=PrefixRendezvous(rendezvous, f"communicator/{name}/{count}"),
        rank=rank,
        world_size=world_size,
        secret=secret,
        transport=transport,
        timeout_s=timeout_s,
        name=name,
        host_of_rank=host_of_rank,
    )
    if transport == "mpi":
        from sparkdl.collective.mpi_communicator import open_mpi_communicator

        return open_mpi_communicator(opening)
    from sparkdl.collective.native_communicator import open_native_communicator

    return open_native_communicator(opening)
