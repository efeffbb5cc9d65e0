"""Process sets: communicators of some ranks of another one, opened as that one was. Runs on ranks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

from sparkdl.collective.observation import Observed
from sparkdl.collective.opening import Opening, open_communicator
from sparkdl.collective.outsider import Outsider
from sparkdl.collective.rendezvous import PrefixRendezvous
from sparkdl.errors import ParamError
from sparkdl.topology import number_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.stalls import StallCheck
    from sparkdl.collective.telemetry import Telemetry
    from sparkdl.topology import Topology


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
