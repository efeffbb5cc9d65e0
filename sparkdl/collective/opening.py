"""Opening a communicator by the chosen transport, and splitting it into process sets.

Runs on ranks. A process set is a communicator of some ranks of another one, opened as that one was. A rank that is
not in a process set gets an :class:`Outsider` in place of its communicator.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from sparkdl.collective.telemetry.monitor import Telemetry
from sparkdl.collective.telemetry.observation import Observed
from sparkdl.collective.telemetry.stalls import NotedWait, StallCheck
from sparkdl.errors import ParamError
from sparkdl.rendezvous.deadline import Deadline, check_timeout
from sparkdl.rendezvous.hosts import find_hosts
from sparkdl.rendezvous.store import PrefixRendezvous, answered_by
from sparkdl.topology import Topology, name_ranks, number_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective.communicator import Communicator
    from sparkdl.rendezvous.store import Rendezvous


TRANSPORTS = ("auto", "native", "shm", "tcp", "mpi", "hierarchical", "hierarchical-mpi")
WIRES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Opening:
    """One opening of a communicator, as :func:`open_communicator` describes it.

    Attributes:
        rendezvous: the store that the communicator shows to its users.
        own_rendezvous: a view of it that this opening has for itself.
        rank: number of this rank.
        world_size: how many ranks there are.
        secret: the job's secret.
        transport: what was asked for; what carries the data may differ, as ``"auto"`` may make do.
        deadline: of the opening.
        timeout_s: the default deadline of every operation.
        name: what the communicator is called in messages.
        host_of_rank: which ranks share a host; found out by trying when None.
        wire: how sums and averages of float32 travel between hosts.
        stall_check: when ranks that do not join are reported.
        telemetry: what measures the communicator, together with others.
        world_ranks: the ranks, by their numbers in the first communicator of the telemetry.
    """

    rendezvous: Rendezvous
    own_rendezvous: PrefixRendezvous
    rank: int
    world_size: int
    secret: bytes = field(repr=False)
    transport: str
    deadline: Deadline
    timeout_s: float
    name: str
    host_of_rank: Sequence[int] | None = None
    wire: str = "float32"
    stall_check: StallCheck = field(default_factory=StallCheck)
    telemetry: Telemetry = field(default_factory=Telemetry)
    world_ranks: tuple[int, ...]

    def find_topology(self) -> Topology:
        """Where the ranks stand: as the caller said, or found out by trying; all ranks take part.

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


def check_transport(transport: str, wire: str = "float32") -> None:
    """Refuse what :func:`open_communicator` would refuse.

    Raises:
        ParamError: if there is no such transport or wire format, or not both together.
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
    """Whether the ranks have to stand in one MPI world."""
    return transport in ("mpi", "hierarchical-mpi")


def is_hierarchical(transport: str) -> bool:
    """Whether CUDA tensors go by NCCL inside a host alone."""
    return transport in ("hierarchical", "hierarchical-mpi")


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
    own_rendezvous: PrefixRendezvous | None = None,
    wire: str = "float32",
    stall_check: StallCheck | None = None,
    telemetry: Telemetry | None = None,
    world_ranks: Sequence[int] | None = None,
) -> Communicator:
    """Open a communicator; all its ranks call this with the same arguments but ``rank``.

    Args:
        rendezvous: the store in which the ranks find each other.
        rank: number of this rank.
        world_size: how many ranks there are.
        secret: the job's secret, with which ranks prove themselves to each other.
        transport: ``"auto"`` and ``"native"``: shared memory inside a host and TCP across, where ``"auto"``
            makes do with TCP, after a warning, on a host whose shared memory is too small; ``"shm"`` and
            ``"tcp"``: only that; ``"mpi"``: mpi4py. ``"hierarchical"`` is ``"native"``, and
            ``"hierarchical-mpi"`` is ``"mpi"``, for this communicator; :mod:`sparkdl.torch` then has CUDA tensors
            go by NCCL inside a host, and by this transport across.
        timeout_s: seconds for opening, and the default deadline of every operation.
        name: what it is called; the same name may be opened again, as long as all ranks do so in the same
            order.
        host_of_rank: which ranks share a host, numbered by first appearance, where the caller knows; found
            out by trying when None.
        own_rendezvous: a part of the store for this opening alone, the same on all ranks, where the caller knows
            one; found by counting the openings of the name when None.
        wire: how sums and averages of float32 travel between hosts: ``"float32"``, or rounded to ``"bfloat16"`` or
            ``"float16"``, which is half the bytes. They are added up in float32, and every rank gets the same bits;
            each host that a sum passes rounds it once, by at most 2^-8 or 2^-11 of itself. float16 ends at 65504.
            Inside a host nothing is rounded.
        stall_check: when an operation that some ranks do not join is reported, and given up; a warning
            after 60 s when None.
        telemetry: of another communicator of this process, to be measured together with it; its own when None.
        world_ranks: the ranks, by their numbers in the first communicator of the telemetry; the same when None.

    Raises:
        ParamError: if an argument has a value that cannot work.
        MismatchError: if the ranks disagree about ``wire``.
        TransportUnavailableError: if the transport is not installed.
        CommunicatorTimeoutError: if some rank does not take part in time; the message names it.
        AuthenticationError: if some rank has another secret.
        CommunicatorError: if the ranks cannot connect, or shared memory cannot be had where it was asked for.
    """
    check_transport(transport, wire)
    check_timeout(timeout_s)
    if not 0 <= rank < world_size:
        raise ParamError(f"rank {rank} is outside a world of {world_size} ranks")
    deadline = Deadline(timeout_s)
    with answered_by(deadline):
        if own_rendezvous is None:
            # A name that is opened again must not meet what the first opening left in the store.
            count = rendezvous.add(f"communicator/{name}/openings/{rank}/{world_size}", 1)
            own_rendezvous = PrefixRendezvous(rendezvous, f"communicator/{name}/{count}")
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
        )
        with NotedWait(name, opening.world_ranks, "opening", timeout_s):
            communicator = _carry_out(opening)
    opening.telemetry.watch(communicator)
    return communicator


def _carry_out(opening: Opening) -> Communicator:
    if uses_mpi(opening.transport):
        from sparkdl.collective.mpi.communicator import open_mpi_communicator

        return open_mpi_communicator(opening)
    from sparkdl.collective.native.communicator import open_native_communicator

    return open_native_communicator(opening)


class Outsider:
    """Refuses whatever a :class:`~sparkdl.collective.communicator.Communicator` does, but can be closed like one.

    Args:
        rank: number of this rank in the communicator that was split.
        name: of the process set.
        members: its ranks, by their numbers there.

    Attributes:
        is_member: False.
    """

    is_member = False

    def __init__(self, *, rank: int, name: str, members: Sequence[int]) -> None:
        self._who = f"rank {rank} is not in process set {name!r} of {name_ranks(members)}"

    def __enter__(self) -> Outsider:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def close(self) -> None:
        """Nothing: it holds nothing."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ParamError(f"{self._who}: {attribute!r} is for its members. Ask is_member before.")


class Splittable(Observed):
    """The part of a :class:`~sparkdl.collective.communicator.Communicator` that process sets are made of.

    Attributes:
        is_member: True; False in what a rank outside of a process set has of it.
        topology: which ranks share a host, whatever carries the data between them.
        name: what the communicator is called in messages.
        rendezvous: the store it was opened over.
        secret: the job's secret.
        requested_transport: the ``transport`` that it was opened with; what a process set should be opened with.
        timeout_s: default deadline of every operation, in seconds.
        wire: how sums and averages of float32 travel between hosts.
        stall_check: when ranks that do not join an operation are reported.
    """

    is_member = True

    def __init__(self, opening: Opening, topology: Topology) -> None:
        self.topology = topology
        self.name = opening.name
        self.rendezvous = opening.rendezvous
        self.secret = opening.secret
        self.requested_transport = opening.transport
        self.timeout_s = opening.timeout_s
        self._own_rendezvous = opening.own_rendezvous
        self._num_splits: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.wire = opening.wire
        self.stall_check = opening.stall_check
        Observed.__init__(self, opening.telemetry, opening.world_ranks)

    @property
    def rank(self) -> int:
        """Number of this rank in the communicator."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """How many ranks the communicator has."""
        return self.topology.world_size

    def split(
        self, ranks: Sequence[int], name: str, *, stall_check: StallCheck | None = None
    ) -> Communicator:
        """Open a process set: a communicator of some ranks of this one. Only these ranks need to call it.

        Args:
            ranks: the members; their order gives their ranks in the process set.
            name: distinguishes process sets of the same ranks that are opened at the same time.
            stall_check: when ranks that do not join are reported; as in this communicator when None.

        Returns:
            The process set, to be closed by the caller. On a rank that is not in it its ``is_member`` is False, and
            whatever is asked of it but to close is a :class:`~sparkdl.errors.ParamError` that says who is in it.

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
            return cast("Communicator", Outsider(rank=self.rank, name=name, members=members))
        return self._open_subset(members, name, stall_check=stall_check, telemetry=self.telemetry)

    def _open_subset(
        self, members: list[int], name: str, *, stall_check: StallCheck | None, telemetry: Telemetry | None
    ) -> Communicator:
        self._num_splits[name, tuple(members)] += 1
        number = self._num_splits[name, tuple(members)]
        return open_communicator(
            rendezvous=self.rendezvous,
            rank=members.index(self.rank),
            world_size=len(members),
            secret=self.secret,
            transport=self.requested_transport,
            timeout_s=self.timeout_s,
            name=f"{self.name}/{name}",
            host_of_rank=self.hosts_of(members),
            own_rendezvous=PrefixRendezvous(self._own_rendezvous, f"set/{name}/{members}/{number}"),
            wire=self.wire,
            stall_check=stall_check or self.stall_check,
            telemetry=telemetry,
            world_ranks=[self.world_ranks[rank] for rank in members],
        )

    def _open_aside(self, name: str) -> Communicator:
        everybody = list(range(self.world_size))
        return self._open_subset(everybody, name, stall_check=None, telemetry=None)

    def hosts_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The hosts of some ranks of this communicator, numbered anew by first appearance."""
        return number_hosts([self.topology.host_of_rank[rank] for rank in ranks])
