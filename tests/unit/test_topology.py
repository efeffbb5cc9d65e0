from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.topology import Topology, number_hosts


def test_hosts_are_numbered_by_first_appearance() -> None:
    assert number_hosts(["b", "a", "b", "c"]) == (0, 1, 0, 2)


def test_two_by_two_ranks_know_their_places() -> None:
    topology = Topology(rank=3, host_of_rank=(0, 1, 0, 1))
    assert (topology.world_size, topology.num_hosts, topology.host) == (4, 2, 1)
    assert topology.local_ranks == (1, 3)
    assert (topology.local_rank, topology.local_size) == (1, 2)
    assert topology.cross_ranks == (2, 3)
    assert (topology.cross_rank, topology.cross_size) == (1, 2)


def test_host_without_the_local_rank_is_left_out_of_the_cross_ranks() -> None:
    assert Topology(rank=1, host_of_rank=(0, 0, 1)).cross_ranks == (1,)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="outside a world of 2"):
        Topology(rank=rank, host_of_rank=(0, 0))


@pytest.mark.parametrize("hosts", [(1, 0), (0, 2), (1,)])
def test_hosts_out_of_order_are_refused(hosts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="first appearance"):
        Topology(rank=0, host_of_rank=hosts)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_every_rank_has_one_place_on_one_host(labels: list[int]) -> None:
    hosts = number_hosts(labels)
    places = set()
    for rank in range(len(labels)):
        topology = Topology(rank=rank, host_of_rank=hosts)
        assert topology.local_ranks[topology.local_rank] == rank
        assert topology.cross_ranks[topology.cross_rank] == rank
        assert topology.local_ranks == tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
        places.add((topology.host, topology.local_rank))
    assert len(places) == len(labels)
