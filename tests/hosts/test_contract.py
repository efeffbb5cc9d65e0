"""Ranks on several hosts find each other, and their collectives give the results of NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sparkdl.topology import Topology
from tests.collective.checks.numeric_checks import CHECKS, run_checks
from tests.collective.scenes.opening_scenes import where_it_listens
from tests.hosts.network import Network, hosts_with_ranks
from tests.run_ranks import RankEnvironment, run_ranks


def check_all(network: Network) -> None:
    outcomes = run_ranks(network.world_size, run_checks, None, place=network)
    for rank, outcome in enumerate(outcomes):
        assert list(outcome) == list(CHECKS), f"rank {rank} came only to {list(outcome)[-1]}"
        failed = {check: failure for check, failure in outcome.items() if failure is not None}
        assert not failed, f"rank {rank}: {failed}"


def topology(environment: RankEnvironment) -> Topology:
    with environment.communicator() as communicator:
        communicator.barrier()
        return communicator.topology


# tests/collective/test_contract.py has the same checks daily on ranks that take themselves for two hosts of two.
@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_host", [(1, 1), (2, 2), (1, 1, 1), (2, 1)])
def test_transport_agrees_with_numpy_on_hosts_of(ranks_per_host: Sequence[int]) -> None:
    with hosts_with_ranks(*ranks_per_host) as network:
        check_all(network)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_host", [(2, 2), (1, 1, 1)])
def test_transport_agrees_with_numpy_over_a_slow_and_long_cable(ranks_per_host: Sequence[int]) -> None:
    with hosts_with_ranks(*ranks_per_host, gigabits_per_s=1.0, delay_s=0.005) as network:
        check_all(network)


def test_ranks_find_out_who_shares_their_host() -> None:
    """All hosts of this network have the same name and boot id, so only trying shared memory tells them apart."""
    with hosts_with_ranks(1, 2, 1) as network:
        topologies = run_ranks(network.world_size, topology, place=network)
        assert [topology.host_of_rank for topology in topologies] == [
            network.host_of_rank
        ] * network.world_size


@pytest.mark.parametrize(("family", "address"), [(4, "10.77.0.{}"), (6, "fd77::{}")])
def test_ranks_meet_over_either_ip_and_listen_only_on_the_address_of_their_host(
    family: int, address: str
) -> None:
    with hosts_with_ranks(1, 2, family=family) as network:
        seen = run_ranks(3, where_it_listens, place=network)
    assert seen == [[address.format(1)], [address.format(2)], [address.format(2)]]


def test_ranks_listen_where_the_user_says() -> None:
    with hosts_with_ranks(1, 1, decoy=True) as network:
        variables = {"SPARKDL_LISTEN": "eth0"}
        seen = run_ranks(2, where_it_listens, place=network, variables=variables)
    assert seen == [["10.77.0.1"], ["10.77.0.2"]]


def test_address_that_all_hosts_share_does_not_mislead_ranks() -> None:
    with hosts_with_ranks(1, 1, decoy=True) as network:
        assert len(run_ranks(2, topology, place=network)) == 2
