"""The doctor's findings about a network, given the surveys of ranks, and the schedule of measurements."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.doctor.finding import BAD, GOOD, NOTE
from sparkdl.doctor.network import judge_network, rounds
from sparkdl.planner.cluster import advice_on_hosts

NAMES = {0: "node-1", 1: "node-2"}


def survey(**seen: Any) -> dict[str, Any]:
    return {"host_of_rank": [0, 1], "attempts": [], "rates": [], "failure": "", **seen}


def test_finding_lists_reached_and_unreached_addresses() -> None:
    attempts = [(1, "eth0", "10.0.0.2", ""), (1, "docker0", "172.17.0.1", "refused")]
    (finding,) = judge_network([survey(attempts=attempts), survey()], NAMES)
    assert finding.status == GOOD
    assert finding.where == "node-1 to node-2"
    assert finding.found == "reaches eth0 10.0.0.2; not docker0 172.17.0.1"


def test_host_that_cannot_be_reached_is_a_failure_with_the_reason() -> None:
    attempts = [(0, "eth0", "10.0.0.1", "timed out")]
    (finding,) = judge_network([survey(), survey(attempts=attempts)], NAMES)
    assert finding.status == BAD
    assert finding.where == "node-2 to node-1"
    assert finding.found == "reaches none of its addresses: eth0 10.0.0.1 (timed out)"
    assert "firewall" in finding.advice


def test_rate_of_a_pair_is_reported_once_and_a_slow_one_as_a_note() -> None:
    rate = (0, 1, "TCP", 1.1e9, 50e-6)
    fast, _ = judge_network([survey(rates=[rate]), survey(rates=[rate])], NAMES)
    assert fast.status == GOOD
    assert fast.where == "node-1 to node-2"
    assert fast.found == "1,100 MB/s, 50 us for a barrier, by TCP"
    slow, _ = judge_network([survey(rates=[(0, 1, "TCP", 12.5e6, 1e-3)]), survey()], NAMES)
    assert slow.status == NOTE
    assert "100.0 MiB of gradients take 8.4 s" in slow.advice


def test_last_finding_on_several_hosts_is_the_planners_advice_for_the_slowest_link() -> None:
    rates = [(0, 1, "TCP", 9e9, 50e-6), (0, 2, "TCP", 1.25e9, 50e-6), (0, 3, "inside", 1e9, 50e-6)]
    surveys = [survey(rates=rates, host_of_rank=[0, 1, 2, 0])]
    names = {**NAMES, 2: "node-3"}
    finding = judge_network(surveys, names)[-1]
    assert (finding.check, finding.status) == ("communication", GOOD)
    assert finding.found == "3 hosts, at least 1,250 MB/s between two by TCP"
    assert finding.advice == " ".join(advice_on_hosts(3, 1.25e9, is_cpu=True))
    assert "On links this slow" in finding.advice
    on_gpus = judge_network(surveys, names, has_gpus=True)[-1]
    assert "only NCCL uses" in on_gpus.found
    assert 'transport="hierarchical" with wire="bfloat16"' in on_gpus.advice
    (inside,) = judge_network([survey(rates=[(0, 1, "inside", 1e9, 50e-6)], host_of_rank=[0, 0])], NAMES)
    assert inside.check == "transfer"


def test_transfer_that_fails_on_all_ranks_is_one_finding() -> None:
    (finding,) = judge_network([survey(failure="rank 1 is out of reach")] * 2, NAMES)
    assert finding.status == BAD
    assert finding.found == "rank 1 is out of reach"


@given(st.lists(st.integers(0, 100), min_size=1, max_size=17, unique=True))
def test_every_pair_meets_once_and_each_player_once_per_round(players: list[int]) -> None:
    found = rounds(players)
    for pairs in found:
        met = [player for pair in pairs for player in pair]
        assert len(met) == len(set(met))
    assert sorted(pair for pairs in found for pair in pairs) == sorted(
        tuple(sorted(pair)) for pair in combinations(players, 2)
    )
