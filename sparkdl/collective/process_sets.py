"""Process sets, and the arguments that a communicator was opened with.

A process set is a communicator of some ranks of another communicator, opened by the same function as that one. A rank
that is not in the process set gets a :class:`NonMember` in place of the communicator.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from sparkdl.closing import Closing
from sparkdl.collective.telemetry.monitor import Telemetry
from sparkdl.collective.telemetry.stalls import StallCheck
from sparkdl.errors import ParamError
from sparkdl.rendezvous.hosts import find_hosts
from sparkdl.topology import Topology, name_ranks

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
    own_rendezvous: Rendezvous
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


class NonMember(Closing):
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

    def close(self) -> None:
        """Do nothing."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ParamError(f"{self._who}: {attribute!r} is for its members. Ask is_member before.")


class ProcessSets:
    """Opens the process sets of a communicator.

    Args:
        opening: arguments that the communicator was opened with.
        topology: which of its ranks share a host.
    """

    def __init__(self, opening: Opening, topology: Topology) -> None:
        self._opening, self._topology = opening, topology
        self._num_opened: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def split(self, ranks: Sequence[int], name: str, stall_check: StallCheck | None) -> Communicator:
        """Open a process set; see :meth:`sparkdl.collective.Communicator.split`."""
        members, world_size = list(ranks), self._opening.world_size
        outside = [rank for rank in members if not 0 <= rank < world_size]
        if not members or outside or len(set(members)) != len(members):
            raise ParamError(
                f"process set {name!r} has ranks {members}: they must be distinct and within"
                f" 0 to {world_size - 1}, and there must be at least one"
            )
        rank = self._opening.rank
        if rank not in members:
            return cast("Communicator", NonMember(rank=rank, name=name, members=members))
        return self._open(members, name, stall_check=stall_check, telemetry=self._opening.telemetry)

    def duplicate(self, name: str) -> Communicator:
        """Open a communicator of the same ranks that is not observed; collective."""
        return self._open(list(range(self._opening.world_size)), name, stall_check=None, telemetry=None)

    def _open(
        self, members: list[int], name: str, *, stall_check: StallCheck | None, telemetry: Telemetry | None
    ) -> Communicator:
        opening = self._opening
        self._num_opened[name, tuple(members)] += 1
        number = self._num_opened[name, tuple(members)]
        return opening.open(
            rendezvous=opening.rendezvous,
            rank=members.index(opening.rank),
            world_size=len(members),
            secret=opening.secret,
            transport=opening.transport,
            timeout_s=opening.timeout_s,
            name=f"{opening.name}/{name}",
            host_of_rank=self._topology.hosts_of(members),
            own_rendezvous=opening.own_rendezvous.view(f"set/{name}/{members}/{number}"),
            wire=opening.wire,
            stall_check=stall_check or opening.stall_check,
            telemetry=telemetry,
            world_ranks=[opening.world_ranks[rank] for rank in members],
        )
