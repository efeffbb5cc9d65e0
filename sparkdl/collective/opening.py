"""What a rank says when it opens a communicator. Runs on ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdl.collective.host_groups import find_hosts
from sparkdl.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective.deadline import Deadline
    from sparkdl.collective.rendezvous import PrefixRendezvous, Rendezvous


@dataclass(frozen=True, kw_only=True)
class Opening:
    """One opening of a communicator, as :func:`~sparkdl.collective.communicator.open_communicator` describes it.

    Attributes:
        rendezvous: the store that the communicator shows to its users.
        own_rendezvous: a view of it that this opening has for itself.
        rank: number of this rank.
        world_size: how many ranks there are.
        secret: the job's secret.
        transport: what was asked for; what carries the data may differ, as ``"auto"`` may make do.
        timeout_s: seconds for opening, and the default deadline of every operation.
        name: what the communicator is called in messages.
        host_of_rank: which ranks share a host; found out by trying when None.
    """

    rendezvous: Rendezvous
    own_rendezvous: PrefixRendezvous
    rank: int
    world_size: int
    secret: bytes = field(repr=False)
    transport: str
    timeout_s: float
    name: str
    host_of_rank: Sequence[int] | None = None

    def find_topology(self, deadline: Deadline) -> Topology:
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
                timeout_s=deadline.remaining_s(),
            )
        return Topology(rank=self.rank, host_of_rank=tuple(hosts))
