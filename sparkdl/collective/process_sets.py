"""Process sets, and the arguments that a communicator was opened with.

A process set is a communicator of some ranks of another communicator, opened by the same function as that one. A rank
that is not in the process set gets a :class:`NonMember` in place of the communicator.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from sparkdl.collective.telemetry.monitor import Telemetry
from sparkdl.collective.telemetry.observation import Observed
from sparkdl.collective.telemetry.stalls import StallCheck
from sparkdl.errors import ParamError
from sparkdl.rendezvous.hosts import find_hosts
from sparkdl.rendezvous.store import PrefixRendezvous
from sparkdl.topology import Topology, name_ranks, number_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.collective.communicator import Communicator
    from sparkdl.rendezvous.deadline import Deadline
    from sparkdl.rendezvous.store import Rendezvous


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Arguments of one opening of a communicator; see :func:`~sparkdl.collective.opening.open_communicator`.

    Attributes:
        rendezvous: store that the communicator offers to its users.
        own_rendezvous: part of the store that only this opening uses.
        rank: number of this rank.
        world_size: number of ranks.
        secret: the job's secret.
        transport: requested transport; with ``"auto"``, hosts whose shared memory is too small use TCP.
        deadline: deadline of the opening.
        timeout_s: default deadline of every operation, in seconds.
        name: name of the communicator in messages.
        host_of_rank: index of the host of every rank; detected when None.
        wire: format in which sums and averages of float32 travel between hosts.
        stall_check: when operations that some ranks do not join are reported.
        telemetry: collects the measurements of this communicator and of related ones.
        world_ranks: world rank of each rank, its number in the first communicator of the telemetry.
        open: function that opens another communicator, such as a process set.
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
    open: Callable[..., Communicator]

    def find_topology(self) -> Topology:
        """Return which ranks share a host: from ``host_of_rank``, or detected, in which all ranks take part.

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


class NonMember:
    """Placeholder for a process set on a rank that is not in it: can be closed; any other use raises an error.

    Args:
        rank: number of this rank in the communicator that was split.
        name: name of the process set.
        members: ranks of the process set, by their numbers in the communicator that was split.

    Attributes:
        is_member: always False.
    """

    is_member = False

    def __init__(self, *, rank: int, name: str, members: Sequence[int]) -> None:
        self._who = f"rank {rank} is not in process set {name!r} of {name_ranks(members)}"

    def __enter__(self) -> NonMember:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def close(self) -> None:
        """Do nothing."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ParamError(f"{self._who}: {attribute!r} is for its members. Ask is_member before.")


class Splittable(Observed):
    """The part of a :class:`~sparkdl.collective.communicator.Communicator` that opens process sets.

    Attributes:
        is_member: True; False in a :class:`NonMember`.
        topology: which ranks share a host, regardless of the transport.
        name: name of the communicator in messages.
        rendezvous: store over which the communicator was opened.
        secret: the job's secret.
        requested_transport: ``transport`` with which the communicator was opened, also to be used for process sets.
        open_other: function that opens another communicator, with the arguments of
            :func:`~sparkdl.collective.opening.open_communicator`.
        timeout_s: default deadline of every operation, in seconds.
        wire: format in which sums and averages of float32 travel between hosts.
        stall_check: when operations that some ranks do not join are reported.
    """

    is_member = True

    def __init__(self, opening: Opening, topology: Topology) -> None:
        self.topology = topology
        self.name = opening.name
        self.rendezvous = opening.rendezvous
        self.secret = opening.secret
        self.requested_transport = opening.transport
        self.open_other = opening.open
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
        """Number of ranks of the communicator."""
        return self.topology.world_size

    def split(
        self, ranks: Sequence[int], name: str, *, stall_check: StallCheck | None = None
    ) -> Communicator:
        """Open a process set: a communicator of some ranks of this one. Only these ranks need to call it.

        Args:
            ranks: the members; their order gives their ranks in the process set.
            name: distinguishes process sets of the same ranks that are opened at the same time.
            stall_check: when operations that some ranks do not join are reported; this communicator's when None.

        Returns:
            The process set, to be closed by the caller. On a rank that is not a member, its ``is_member`` is False, and
            every operation but ``close`` raises a :class:`~sparkdl.errors.ParamError` that names the members.

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
            return cast("Communicator", NonMember(rank=self.rank, name=name, members=members))
        return self._open_subset(members, name, stall_check=stall_check, telemetry=self.telemetry)

    def _open_subset(
        self, members: list[int], name: str, *, stall_check: StallCheck | None, telemetry: Telemetry | None
    ) -> Communicator:
        self._num_splits[name, tuple(members)] += 1
        number = self._num_splits[name, tuple(members)]
        return self.open_other(
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

    def _open_duplicate(self, name: str) -> Communicator:
        all_ranks = list(range(self.world_size))
        return self._open_subset(all_ranks, name, stall_check=None, telemetry=None)

    def hosts_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the host indices of some ranks of this communicator, renumbered by first appearance."""
        return number_hosts([self.topology.host_of_rank[rank] for rank in ranks])
