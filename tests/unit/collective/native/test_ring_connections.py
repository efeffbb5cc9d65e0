from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.collective.native.ring_connections import Ring, plan_rings
from sparkdl.topology import Topology, number_hosts
from tests.collective.scenes.opening_scenes import where_it_listens
from tests.run_ranks import RankEnvironment, run_ranks


def rings_of(host_of_rank: tuple[int, ...]) -> list[dict[str, Ring]]:
    ranks = range(len(host_of_rank))
    return [plan_rings(Topology(rank=rank, host_of_rank=host_of_rank)) for rank in ranks]


def test_rank_that_is_alone_has_no_connections() -> None:
    assert rings_of((0,)) == [{}]


def test_ranks_of_one_host_have_lifelines_alone() -> None:
    assert rings_of((0, 0)) == [
        {"lifeline": Ring(next=1, previous=1)},
        {"lifeline": Ring(next=0, previous=0)},
    ]


def test_lane_joins_ranks_with_the_same_local_rank() -> None:
    rings = rings_of((0, 1, 0, 1, 2, 2))
    assert rings[0]["lane"] == Ring(next=1, previous=4)
    assert rings[2]["lane"] == Ring(next=3, previous=5)


def test_number_of_lanes_is_the_smallest_number_of_ranks_of_a_host() -> None:
    rings = rings_of((0, 0, 1))
    assert ["lane" in ring for ring in rings] == [True, False, True]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=20))
def test_rings_close_and_both_ends_agree(labels: list[int]) -> None:
    rings = rings_of(number_hosts(labels))
    for kind in ("lifeline", "lane"):
        for rank, ring in enumerate(rings):
            if kind in ring:
                assert rings[ring[kind].next][kind].previous == rank
                assert rings[ring[kind].previous][kind].next == rank


def where_both_listen(environment: RankEnvironment) -> list[list[str]]:
    return [where_it_listens(environment, host_of_rank) for host_of_rank in (None, [0, 1])]


def test_ranks_of_one_or_several_hosts_listen_only_where_the_rendezvous_is_reached() -> None:
    assert run_ranks(2, where_both_listen) == [[["127.0.0.1"]] * 2] * 2
