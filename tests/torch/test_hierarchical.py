"""CUDA tensors on several hosts: the bytes sent between hosts, and that all ranks end together after any failure.

tests/torch/test_accelerators.py compares the results with one process, for all operations and layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.collective.scenes.failure_scenes import Outcome
from tests.nccl_stand_in.building import stand_in_variables
from tests.run_ranks import run_ranks
from tests.torch.scenes import hierarchical_scenes as scenes
from tests.torch.scenes.hierarchical_scenes import BLOCK, ELEMENTS, HOSTS

PROMPTLY_S = 30.0
"""Many times what is needed on an idle machine, and far below the deadline that must not be waited for."""


def on_stand_ins(function: Callable[..., Any], **options: Any) -> list[Any]:
    with TemporaryDirectory() as folder:
        variables = stand_in_variables(Path(folder), CUDA_STAND_IN_ALL_MEMORY="1")
        return run_ranks(len(HOSTS), function, variables=variables, **options)


@cache
def played() -> list[dict[str, Outcome]]:
    return on_stand_ins(scenes.play, transport="hierarchical")


def seen(scene: str) -> list[Outcome]:
    return [outcomes[scene] for outcomes in played()]


@pytest.mark.slow
def test_large_tensors_are_right() -> None:
    for outcome in seen("sums"):
        assert outcome["is right"]
        assert outcome["scattered"]
        assert outcome["gathered"]


@pytest.mark.slow
def test_each_byte_crosses_once_per_host() -> None:
    allreduced = [outcome["moved"].pop(("across", "allreduce")) for outcome in seen("sums")]
    for of_host in (allreduced[:2], allreduced[2:]):
        assert sum(of_host) == 4 * ELEMENTS
        assert abs(of_host[0] - of_host[1]) <= 4
    for outcome in seen("sums"):
        # Each rank carries two of the four blocks, and receives the two blocks of the other host.
        assert outcome["moved"] == {
            ("across", "reduce_scatter"): 4 * 2 * BLOCK,
            ("across", "allgather"): 4 * 2 * BLOCK,
        }


@pytest.mark.parametrize(
    "transport", ["hierarchical", pytest.param("hierarchical-mpi", marks=pytest.mark.slow)]
)
def test_killed_rank_is_named_on_all_ranks(transport: str) -> None:
    for outcome in on_stand_ins(scenes.lose_a_rank, transport=transport, may_die=[3])[:3]:
        for told in (outcome, outcome["again"]):
            assert told["kinds"][0] == "RankLostError", outcome
            assert "rank 3" in told["message"]
        assert outcome["seconds"] < PROMPTLY_S
        assert not outcome["to close"]["kinds"]


@pytest.mark.slow
def test_failure_of_nccl_on_one_rank_reaches_all_hosts() -> None:
    first, *others = seen("NCCL fails")
    assert first["kinds"][0] == "CommunicatorError", first
    assert "remote process exited" in first["message"]
    for outcome in others:
        assert outcome["kinds"][0] == "CommunicatorAbortedError", outcome
        assert "remote process exited" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S


def test_missed_deadline_ends_all_ranks() -> None:
    *others, late = seen("late rank")
    for outcome in others:
        assert outcome["kinds"][0] in {"CommunicatorTimeoutError", "CommunicatorAbortedError"}, outcome
        assert re.search(r"\b(1(\.0)?|0\.\d+) s\b", outcome["message"]), outcome
        assert outcome["seconds"] < PROMPTLY_S
    assert late["again"]["kinds"][0] == "CommunicatorAbortedError", late


def test_nccl_opening_failure_on_one_host_reaches_the_other_hosts() -> None:
    for host, outcome in zip(HOSTS, seen("opening fails"), strict=True):
        assert outcome["kinds"][0] == "CommunicatorError"
        assert "unhandled system error" in outcome["message"]
        assert ("on that of ranks 2, 3: " in outcome["message"]) == (host == 0)
