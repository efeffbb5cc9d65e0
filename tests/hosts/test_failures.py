"""After any failure of a host, every rank gets the error that names it, in time, and can continue."""

from __future__ import annotations

from functools import cache

import pytest

from sparkdl.topology import name_ranks
from tests.collective.scenes import opening_scenes as scenes_of_ranks
from tests.collective.scenes.failure_scenes import Outcome
from tests.hosts import failure_scenes as scenes
from tests.hosts.network import Network, hosts_with_ranks
from tests.run_ranks import run_ranks

WORLDS = {"three hosts": (1, 1, 1), "two hosts of two": (2, 2)}
QUICK = (
    "cut between operations",
    "cut in an operation",
    "frozen between operations",
    "frozen in an operation",
)

GRACE_S = 30.0
"""Time to find out who is missing: a second if ranks are silent, more on a busy machine."""


def stage_of(network: Network) -> scenes.Stage:
    last = network.host_of_rank[-1]
    return scenes.Stage(
        host_of_rank=network.host_of_rank, cut=network.cut_command(last), fix=network.mend_command(last)
    )


@cache
def seen(world: str) -> tuple[scenes.Stage, list[dict[str, Outcome]]]:
    """The outcomes of the quick scenes on each rank."""
    with hosts_with_ranks(*WORLDS[world], gigabits_per_s=1.0) as network:
        stage = stage_of(network)
        return stage, run_ranks(network.world_size, scenes.play, stage, QUICK, place=network)


worlds = pytest.mark.parametrize(
    "world", ["three hosts", pytest.param("two hosts of two", marks=pytest.mark.slow)]
)
quick_scenes = pytest.mark.parametrize("scene", QUICK)


def outcomes_of(world: str, scene: str) -> tuple[scenes.Stage, list[Outcome]]:
    stage, everything = seen(world)
    outcomes = [played[scene] for played in everything]
    for rank, outcome in enumerate(outcomes):
        assert "unexpected" not in outcome, f"rank {rank}: {outcome['unexpected']}"
    return stage, outcomes


def names_of(ranks: list[int]) -> str:
    return f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} do"


@worlds
@quick_scenes
def test_survivors_name_the_host_that_is_gone_within_their_deadline(world: str, scene: str) -> None:
    stage, outcomes = outcomes_of(world, scene)
    for rank in stage.survivors:
        assert "CommunicatorTimeoutError" in outcomes[rank]["kinds"], outcomes[rank]
        assert "'weights'" in outcomes[rank]["message"]
        assert f"{names_of(stage.victims)} not answer" in outcomes[rank]["message"]
        assert outcomes[rank]["seconds"] < scenes.PATIENCE_S + GRACE_S
        assert "CommunicatorTimeoutError" in outcomes[rank]["again"]["kinds"]


@worlds
@pytest.mark.parametrize("scene", ["cut between operations", "cut in an operation"])
def test_host_that_is_cut_off_names_the_ranks_that_it_cannot_reach(world: str, scene: str) -> None:
    stage, outcomes = outcomes_of(world, scene)
    for rank in stage.victims:
        assert "CommunicatorTimeoutError" in outcomes[rank]["kinds"], outcomes[rank]
        assert f"{names_of(stage.survivors)} not answer" in outcomes[rank]["message"]
        assert outcomes[rank]["seconds"] < scenes.PATIENCE_S + GRACE_S


@worlds
@pytest.mark.parametrize("scene", ["frozen between operations", "frozen in an operation"])
def test_ranks_of_a_thawed_host_get_the_timeout_error(world: str, scene: str) -> None:
    stage, outcomes = outcomes_of(world, scene)
    for rank in stage.victims:
        assert "CommunicatorTimeoutError" in outcomes[rank]["kinds"], outcomes[rank]


@worlds
@quick_scenes
def test_survivors_communicate_without_the_lost_host_and_again_when_it_is_back(
    world: str, scene: str
) -> None:
    stage, outcomes = outcomes_of(world, scene)
    for rank, outcome in enumerate(outcomes):
        assert outcome["total"] == len(stage.host_of_rank)
        assert rank in stage.victims or outcome["remaining total"] == len(stage.survivors)


@worlds
def test_killed_rank_is_named_by_all_others_within_seconds(world: str) -> None:
    with hosts_with_ranks(*WORLDS[world]) as network:
        stage, dead = stage_of(network), network.world_size - 1
        *outcomes, nothing = run_ranks(dead + 1, scenes.killed, stage, place=network, may_die=[dead])
    assert nothing is None
    for outcome in outcomes:
        assert "RankLostError" in outcome["kinds"], outcome
        assert f"rank {dead} was lost" in outcome["message"]
        assert outcome["seconds"] < 2.0 + GRACE_S
        assert outcome["remaining total"] == dead


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_host_that_is_cut_off_does_not_delay_an_opening_beyond_its_deadline(world: str) -> None:
    with hosts_with_ranks(*WORLDS[world]) as network:
        stage = stage_of(network)
        outcomes = run_ranks(network.world_size, scenes.play, stage, ["cut before opening"], place=network)
    for rank, played in enumerate(outcomes):
        outcome = played["cut before opening"]
        assert "unexpected" not in outcome, outcome
        if rank in stage.victims:
            assert "CommunicatorError" in outcome["kinds"], outcome
            assert "cut off from it" in outcome["message"]
        else:
            assert "CommunicatorTimeoutError" in outcome["kinds"], outcome
            assert f"waited for {name_ranks(stage.victims)} of" in outcome["message"]
        assert outcome["seconds"] < scenes.PATIENCE_S + 5.0 + GRACE_S
        assert outcome["total"] == network.world_size


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_host_that_is_silent_for_fifteen_seconds_is_lost(world: str) -> None:
    with hosts_with_ranks(*WORLDS[world], gigabits_per_s=1.0) as network:
        stage = stage_of(network)
        outcomes = run_ranks(network.world_size, scenes.play, stage, ["cut for good"], place=network)
    for rank, played in enumerate(outcomes):
        outcome = played["cut for good"]
        assert "RankLostError" in outcome["kinds"], outcome
        others = stage.survivors if rank in stage.victims else stage.victims
        assert any(f"rank {other} was lost" in outcome["message"] for other in others), outcome
        assert outcome["seconds"] < 15.0 + GRACE_S
        assert outcome["total"] == network.world_size


@pytest.mark.parametrize("seconds", [1.0, pytest.param(25.0, marks=pytest.mark.slow)])
def test_host_that_is_frozen_for_less_than_the_deadline_is_waited_for(seconds: float) -> None:
    """A machine whose process does not read does not count as lost, however long that lasts."""
    with hosts_with_ranks(1, 1, 1, gigabits_per_s=1.0) as network:
        outcomes = run_ranks(3, scenes.frozen_for_a_while, stage_of(network), seconds, place=network)
    for outcome in outcomes:
        assert outcome["values"] == [1.0]
    assert outcomes[2]["seconds"] > seconds


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("lane", "CommunicatorError", "rank 2 sent something that begins no operation"),
        ("lifeline", "RankLostError", "rank 2 was lost: it sent something that is not a lifeline message"),
    ],
)
def test_rank_that_sends_garbage_is_named(kind: str, error: str, message: str) -> None:
    with hosts_with_ranks(1, 1, 1) as network:
        outcomes = run_ranks(3, scenes.garbage, kind, place=network)
    for outcome in outcomes[:2]:
        assert error in outcome["kinds"], outcome
        assert message in outcome["message"]
        assert outcome["seconds"] < scenes.PATIENCE_S + GRACE_S
    assert [outcome["total"] for outcome in outcomes] == [3.0] * 3


def test_strangers_from_another_host_do_not_disturb_the_ranks() -> None:
    with hosts_with_ranks(1, 1) as network:
        scene = scenes_of_ranks.stranger_at_the_listener
        assert run_ranks(2, scene, transport="tcp", place=network) == [{"total": [2.0]}] * 2


def test_rank_on_another_host_with_another_secret_is_refused() -> None:
    with hosts_with_ranks(1, 1) as network:
        for outcome in run_ranks(2, scenes_of_ranks.wrong_secret, place=network):
            assert "AuthenticationError" in outcome["kinds"], outcome
