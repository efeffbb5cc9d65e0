"""Topology of a communicator: which ranks share a host, and the numbers of the ranks inside and across hosts.

Pure arithmetic on the standard library; :mod:`sparkdl.rendezvous.hosts` detects which ranks share a host.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Label = TypeVar("Label", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks and hosts of a communicator, as seen by one rank.

    Attributes:
        rank: number of this rank, ``0 <= rank < world_size``.
        host_of_rank: index of the host of every rank; hosts are numbered by first appearance, so rank 0 is on host 0.
    """

    rank: int
    host_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.host_of_rank):
            raise ValueError(f"rank {self.rank} is outside a world of {len(self.host_of_rank)} ranks")
        if number_hosts(self.host_of_rank) != self.host_of_rank:
            raise ValueError(f"hosts must be numbered by first appearance, got {self.host_of_rank}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.host_of_rank)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return max(self.host_of_rank) + 1

    @property
    def host(self) -> int:
        """Index of this rank's host."""
        return self.host_of_rank[self.rank]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this host, in ascending order."""
        return tuple(self.ranks_by_host[self.host])

    @property
    def local_rank(self) -> int:
        """This rank's position among the ranks of its host."""
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return len(self.local_ranks)

    @property
    def cross_ranks(self) -> tuple[int, ...]:
        """The ranks with the same ``local_rank`` as this rank, at most one per host, in order of hosts."""
        local = self.local_rank
        return tuple(ranks[local] for ranks in self.ranks_by_host if local < len(ranks))

    @property
    def cross_rank(self) -> int:
        """This rank's position among its ``cross_ranks``."""
        return self.cross_ranks.index(self.rank)

    @property
    def cross_size(self) -> int:
        """Number of hosts that have a rank with this ``local_rank``."""
        return len(self.cross_ranks)

    @property
    def ranks_by_host(self) -> list[list[int]]:
        """The ranks on each host, in ascending order."""
        return list(group_ranks(enumerate(self.host_of_rank)).values())

    def hosts_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The host indices of some ranks, renumbered by first appearance."""
        return number_hosts([self.host_of_rank[rank] for rank in ranks])


def number_hosts(labels: Sequence[object]) -> tuple[int, ...]:
    """Turn one label per rank into host indices by first appearance: ``["b", "a", "b"]`` gives ``(0, 1, 0)``."""
    index: dict[object, int] = {}
    return tuple(index.setdefault(label, len(index)) for label in labels)


def group_ranks(labels: Iterable[tuple[int, Label]]) -> dict[Label, list[int]]:
    """The ranks that have each label, from pairs of rank and label; in the order in which the labels appear."""
    ranks_of: dict[Label, list[int]] = {}
    for rank, label in labels:
        ranks_of.setdefault(label, []).append(rank)
    return ranks_of


def name_groups(labels: Iterable[tuple[int, str]]) -> str:
    """Format texts about ranks for a message: ``"rank 3: no GPU; ranks 1, 2: no driver"``."""
    return "; ".join(f"{name_ranks(ranks)}: {label}" for label, ranks in group_ranks(labels).items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message: ``"rank 3"``, ``"ranks 1, 3"``, ``"ranks 0-3, 7"``."""
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    names = [
        ", ".join(map(str, range(first, last + 1))) if last - first < 2 else f"{first}-{last}"
        for first, last in spans
    ]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(names)
