"""Opening a communicator over the chosen transport.

The only module that chooses between the transports; each of them opens the communicator that an :class:`Opening`
describes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdl.checks import check_rank
from sparkdl.collective.telemetry.monitor import Telemetry
from sparkdl.collective.telemetry.stalls import NotedWait, StallCheck
from sparkdl.errors import ParamError
from sparkdl.rendezvous.deadline import Deadline, check_timeout
from sparkdl.rendezvous.hosts import find_hosts
from sparkdl.rendezvous.store import answered_by
from sparkdl.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.collective.communicator import Communicator
    from sparkdl.rendezvous.store import Rendezvous


TRANSPORTS = ("auto", "native", "shm", "tcp", "mpi", "hierarchical", "hierarchical-mpi")
WIRES = ("float32", "bfloat16", "float16")


def check_transport(transport: str, wire: str = "float32") -> None:
    """Check a transport and a wire format, as :func:`open_communicator` does.

    Raises:
        ParamError: if there is no such transport or wire format, or the two cannot be combined.
    """
    if transport not in TRANSPORTS:
        raise ParamError(f"transport={transport!r} is unknown; it may be one of {', '.join(TRANSPORTS)}")
    if wire not in WIRES:
        raise ParamError(f"wire={wire!r} is unknown; it may be one of {', '.join(WIRES)}")
    if uses_mpi(transport) and wire != "float32":
        raise ParamError(
            f"transport={transport!r} sends float32 as it is; wire={wire!r} needs another transport"
        )


def uses_mpi(transport: str) -> bool:
    """Whether the transport requires all ranks to be in one MPI world."""
    return transport in ("mpi", "hierarchical-mpi")


@dataclass(frozen=True, kw_only=True)
class Opening:
    """One opening of a communicator, by the arguments of :func:`open_communicator`.

    Attributes:
        own_rendezvous: part of the store that only this opening uses.
        deadline: deadline of the opening; ``timeout_s`` is the default one of every operation.
        open: function that opens another communicator, such as a process set.
    """

    rendezvous: Rendezvous
    own_rendezvous: Rendezvous
    rank: int
    world_size: int
    secret: bytes = field(repr=False)
    transport: str
    deadline: Deadline
    timeout_s: float
    name: str
    host_of_rank: Sequence[int] | None
    wire: str
    stall_check: StallCheck
    telemetry: Telemetry
    world_ranks: tuple[int, ...]
    open: Callable[..., Communicator]

    def find_topology(self) -> Topology:
        """Return which ranks share a host. If ``host_of_rank`` is None, the ranks find out together (collective).

        Raises:
            CommunicatorTimeoutError: if some rank does not take part in time; the message names it.
        """
        hosts = self.host_of_rank
        if hosts is None:
            hosts = find_hosts(
                self.own_rendezvous,
                rank=self.rank,
                world_size=self.world_size,
                timeout_s=self.deadline.remaining_s(),
            )
        return Topology(rank=self.rank, host_of_rank=tuple(hosts))


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
    own_rendezvous: Rendezvous | None = None,
    wire: str = "float32",
    stall_check: StallCheck | None = None,
    telemetry: Telemetry | None = None,
    world_ranks: Sequence[int] | None = None,
) -> Communicator:
    """Open a communicator; all its ranks must call this, with the same arguments except ``rank``.

    Args:
        rendezvous: store in which the ranks find each other.
        rank: number of this rank.
        world_size: number of ranks.
        secret: the job's secret; ranks authenticate each other with it.
        transport: ``"auto"`` and ``"native"`` use shared memory inside a host and TCP between hosts; on a host whose
            shared memory is too small, ``"auto"`` logs a warning and uses TCP. ``"shm"`` and ``"tcp"`` use only that.
            ``"mpi"`` uses mpi4py. For this communicator, ``"hierarchical"`` is the same as ``"native"``, and
            ``"hierarchical-mpi"`` the same as ``"mpi"``; :mod:`sparkdl.torch` then communicates CUDA tensors by NCCL
            inside a host, and by this transport between hosts.
        timeout_s: seconds for opening, and the default deadline of every operation.
        name: name of the communicator in messages. The same name may be opened again if all ranks do so in the same
            order.
        host_of_rank: index of the host of every rank, numbered by first appearance; detected when None.
        own_rendezvous: part of the store that only this opening uses, the same on all ranks; when None, the number of
            openings of the name determines it.
        wire: format in which sums and averages of float32 travel between hosts: ``"float32"``, or rounded to
            ``"bfloat16"`` or ``"float16"``, which halves the bytes. They are added up in float32, and every rank gets
            the same bits. Each host that a sum passes rounds it once, with a relative error of at most 2^-8 (bfloat16)
            or 2^-11 (float16). The largest float16 is 65504. Inside a host nothing is rounded.
        stall_check: when to report, and when to give up, an operation that some ranks do not join; a warning
            after 60 s when None.
        telemetry: telemetry of another communicator of this process, to be measured together with it; a new one when
            None.
        world_ranks: world rank of each rank, its number in the first communicator of the telemetry; equal to the rank
            when None.

    Raises:
        ParamError: if an argument has an invalid value.
        MismatchError: if the ranks disagree about ``wire``.
        TransportUnavailableError: if the transport is not installed.
        CommunicatorTimeoutError: if some rank does not take part in time; the message names it.
        AuthenticationError: if some rank has another secret.
        CommunicatorError: if the ranks cannot connect, or requested shared memory is not available.
    """
    check_transport(transport, wire)
    check_timeout(timeout_s)
    check_rank(rank, world_size)
    deadline = Deadline(timeout_s)
    with answered_by(deadline):
        if own_rendezvous is None:
            # A second opening of a name must not read keys that the first one left in the store.
            count = rendezvous.add(f"communicator/{name}/openings/{rank}/{world_size}", 1)
            own_rendezvous = rendezvous.view(f"communicator/{name}/{count}")
        opening = Opening(
            rendezvous=rendezvous,
            own_rendezvous=own_rendezvous,
            rank=rank,
            world_size=world_size,
            secret=secret,
            transport=transport,
            deadline=deadline,
            timeout_s=timeout_s,
            name=name,
            host_of_rank=host_of_rank,
            wire=wire,
            stall_check=stall_check or StallCheck(),
            telemetry=telemetry or Telemetry(),
            world_ranks=tuple(range(world_size) if world_ranks is None else world_ranks),
            open=open_communicator,
        )
        with NotedWait(name, opening.world_ranks, "opening", timeout_s):
            communicator: Communicator
            if uses_mpi(transport):
                from sparkdl.collective.mpi.communicator import open_mpi_communicator

                communicator = open_mpi_communicator(opening)
            else:
                from sparkdl.collective.native.communicator import open_native_communicator

                communicator = open_native_communicator(opening)
    opening.telemetry.watch(communicator)
    return communicator
