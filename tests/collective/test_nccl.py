"""sparkdl's part of the NCCL path: loading, ids, opening, operations on streams, failures and their error messages.

Runs on stand-ins for NCCL and the CUDA driver, which are compiled here; tests/gpu runs the real ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from sparkdl.collective.nccl.opening import _in_wheel
from tests.collective.checks import nccl_checks
from tests.collective.scenes import nccl_scenes
from tests.collective.scenes.failure_scenes import Outcome
from tests.collective.scenes.nccl_scenes import HINTS
from tests.nccl_stand_in.building import stand_in_variables, stand_ins
from tests.run_ranks import run_ranks

WORLD_SIZE = 3
DEAD_RANK = 1
PROMPTLY_S = 30.0
"""Many times what is needed on an idle machine, and far below the deadline that must not be waited for."""


def on_stand_ins(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run a function on ranks that load the stand-ins for NCCL and CUDA."""
    with TemporaryDirectory() as folder:
        variables = stand_in_variables(Path(folder), NCCL_STAND_IN_CALLS=f"{folder}/calls")
        variables |= options.pop("variables", {})
        return run_ranks(world_size, function, *args, variables=variables, **options)


@cache
def numeric_outcomes(world_size: int) -> list[dict[str, str | None]]:
    return on_stand_ins(nccl_checks.every_operation, world_size)


@cache
def played() -> list[dict[str, Outcome]]:
    return on_stand_ins(nccl_scenes.play, WORLD_SIZE)


def seen(scene: str) -> list[Outcome]:
    """What each rank saw of a scene."""
    return [outcomes[scene] for outcomes in played()]


@pytest.mark.parametrize("check", nccl_checks.CHECKS)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_operation_agrees_with_numpy(world_size: int, check: str) -> None:
    for rank, outcome in enumerate(numeric_outcomes(world_size)):
        assert outcome[check] is None, f"rank {rank}: {outcome[check]}"


def test_call_returns_while_its_stream_is_busy_and_keeps_the_streams_order() -> None:
    for outcome in seen("order"):
        assert outcome["before"] == (False, 0.0)
        assert outcome["after"] == (True, 6.0)


def test_killed_peer_is_named_and_gpu_operations_that_wait_for_it_are_aborted() -> None:
    outcomes = on_stand_ins(nccl_scenes.lost_peer, WORLD_SIZE, may_die=[DEAD_RANK])
    for outcome in (outcomes[0], outcomes[2]):
        assert "RankLostError" in outcome["kinds"], outcome
        assert f"rank {DEAD_RANK}" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S
        assert "RankLostError" in outcome["again"]["kinds"]
        assert f"rank {DEAD_RANK}" in outcome["failure"]
        assert outcome["to close"]["seconds"] < PROMPTLY_S
        assert "ncclCommAbort" in outcome["calls"]
        assert "ncclCommDestroy" not in outcome["calls"]


def test_peer_killed_while_nccl_opens_is_named() -> None:
    outcome, _ = on_stand_ins(nccl_scenes.lost_peer_while_opening, 2, may_die=[DEAD_RANK])
    assert "RankLostError" in outcome["kinds"], outcome
    assert f"rank {DEAD_RANK}" in outcome["message"]
    assert outcome["seconds"] < PROMPTLY_S


def test_abort_reaches_all_ranks_with_its_reason() -> None:
    for outcome in seen("aborted"):
        assert "CommunicatorAbortedError" in outcome["kinds"], outcome
        assert "the loss is rotten" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S
        assert outcome.get("seconds to abort", 0.0) < PROMPTLY_S


def test_exception_inside_with_aborts_the_other_ranks() -> None:
    for rank, outcome in enumerate(seen("exception")):
        assert outcome["kinds"][0] == "ValueError" if rank == 1 else "CommunicatorAbortedError", outcome
        assert "bad batch" in outcome["message"]


def test_operation_past_its_deadline_fails_on_all_ranks_with_its_description() -> None:
    first, *others = seen("late rank")
    # The abort that it sent to the others may come back before its own wait notices.
    assert {"CommunicatorTimeoutError", "CommunicatorAbortedError"} & set(first["kinds"]), first
    said = re.compile("allreduce of 3 float64 on 'late rank/nccl' .* GPU 0 within 0.5 s")
    assert said.search(first["message"])
    assert first["seconds"] < PROMPTLY_S
    for outcome in others:
        assert "CommunicatorAbortedError" in outcome["kinds"], outcome
        assert said.search(outcome["message"])


def test_wait_that_is_too_short_can_be_repeated() -> None:
    assert "CommunicatorTimeoutError" in seen("late wait")[0]["kinds"]
    assert "waited for again" in seen("late wait")[0]["message"]
    for outcome in seen("late wait"):
        assert (outcome["value"], outcome["failure"]) == (3.0, None)


def test_opening_that_hangs_ends_at_its_deadline_and_leaves_the_communicator_usable() -> None:
    for outcome in seen("hangs"):
        assert "CommunicatorTimeoutError" in outcome["kinds"], outcome
        assert "within 1.5 s: ranks 0-2 still waited" in outcome["message"]
        assert "NCCL_SOCKET_IFNAME" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S
        assert outcome["communicator"] is None
        assert outcome["aborts"] == 1


def test_rank_that_cannot_open_is_named_on_all_ranks_at_once() -> None:
    for outcome in seen("cannot open"):
        assert outcome["kinds"][0] == "CommunicatorError", outcome
        assert outcome["message"].startswith("rank 1: opening NCCL communicator 'cannot open/nccl' failed")
        assert outcome["seconds"] < PROMPTLY_S
        assert outcome["communicator"] is None


@pytest.mark.parametrize("case", range(len(HINTS)))
def test_nccl_error_text_comes_with_the_matching_hint(case: int) -> None:
    _, last_error, said, hint = HINTS[case]
    for outcome in seen("hints"):
        for text in ("NCCL 2.27.6 says", said, last_error, hint):
            assert text in outcome["messages"][case]


def test_operation_that_nccl_refuses_on_one_rank_fails_on_all() -> None:
    said = "allreduce of 3 float64 failed: NCCL 2.27.6 says"
    for rank, outcome in enumerate(seen("refuses")):
        if rank == 1:
            assert outcome["message"].startswith(said), outcome
        else:
            assert "CommunicatorAbortedError" in outcome["kinds"], outcome
            assert f"rank 1 aborted: refuses/nccl: {said}" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S


def test_ranks_that_share_a_gpu_are_refused_before_nccl_is_called() -> None:
    for outcome in seen("shared gpu"):
        assert "ParamError" in outcome["kinds"], outcome
        assert "ranks 0, 2 share GPU-abababab-abab-abab-abab-ababababab03" in outcome["message"]


@pytest.mark.parametrize(
    ("version", "enabled", "opens"), [(23000, "1", True), (23000, "0", False), (22907, "1", False)]
)
def test_ranks_may_share_a_gpu_where_nccl_is_told_so_and_new_enough(
    version: int, enabled: str, opens: bool
) -> None:
    orders = dict.fromkeys(range(2), f"version={version}")
    variables = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": enabled}
    for outcome in on_stand_ins(nccl_scenes.share_gpu, 2, orders, variables=variables):
        assert ("ParamError" in outcome["kinds"]) != opens, outcome
        assert opens or "NCCL 2.30 and later can run several ranks on one GPU" in outcome["message"]


def test_missing_gpu_is_named_with_its_rank() -> None:
    for outcome in seen("no gpu"):
        assert "ParamError" in outcome["kinds"], outcome
        assert "rank 1: there is no GPU 1" in outcome["message"]
        assert "sees 1 (CUDA_VISIBLE_DEVICES" in outcome["message"]


def test_versions_that_differ_are_named() -> None:
    for outcome in on_stand_ins(nccl_scenes.open_once, 2, {1: "version=22501"}):
        assert "CommunicatorError" in outcome["kinds"], outcome
        assert "rank 0: 2.27.6" in outcome["message"]
        assert "rank 1: 2.25.1" in outcome["message"]


@pytest.mark.parametrize(
    ("variables", "order", "said"),
    [
        ({"LD_LIBRARY_PATH": ""}, "", "the CUDA driver cannot be loaded: tried libcuda.so.1"),
        (
            {"SPARKDL_NCCL_LIBRARY": "/nowhere/nccl.so"},
            "",
            "tried /nowhere/nccl.so (/nowhere/nccl.so: cannot open",
        ),
        ({}, "version=21703", "is NCCL 2.17.3; 2.18.0 or later is needed"),
        ({"SPARKDL_NCCL_LIBRARY": "old"}, "", "and lacks ncclCommSplit; 2.18.0 or later is needed"),
    ],
)
def test_missing_or_old_library_is_named_with_what_was_tried_and_what_to_install(
    variables: dict[str, str], order: str, said: str
) -> None:
    if variables.get("SPARKDL_NCCL_LIBRARY") == "old":
        variables = {"SPARKDL_NCCL_LIBRARY": str(stand_ins() / "old" / "libnccl.so.2")}
    (outcome,) = on_stand_ins(nccl_scenes.open_once, 1, {0: order}, variables=variables)
    assert "TransportUnavailableError" in outcome["kinds"], outcome
    assert outcome["message"].startswith("rank 0: NCCL is not available")
    assert said in outcome["message"]
    assert "pip install nvidia-nccl-cu12" in outcome["message"]


@pytest.mark.skipif(bool(_in_wheel()), reason="the library of the NCCL wheel is taken before the system's")
def test_library_of_the_system_is_taken_without_a_path() -> None:
    (outcome,) = on_stand_ins(nccl_scenes.open_once, 1, {}, variables={"SPARKDL_NCCL_LIBRARY": ""})
    assert outcome["kinds"] == [], outcome["message"]


ARGUMENTS = {
    "unknown memory": ("ParamError", "the input is not in memory that CUDA knows"),
    "other gpu": ("ParamError", "is in memory of GPU"),
    "blocks": ("ParamError", "3 ranks: 12 float32, got 4 float32"),
    "op": ("ParamError", "op must be 'sum', 'avg', 'min', 'max' or 'product', got 'mean'"),
    "int16": ("ParamError", "NCCL has no int16; it takes int8"),
    "scaled int": ("ParamError", "scales the sum and the average of floats alone"),
    "root": ("ParamError", "rank 7 is outside a world of 3 ranks"),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_invalid_argument_is_named_and_leaves_the_group_usable(argument: str) -> None:
    kind, text = ARGUMENTS[argument]
    for outcome in seen("arguments"):
        assert kind in outcome[argument]["kinds"], outcome[argument]
        assert text in outcome[argument]["message"]


def test_idle_group_uses_no_processor_time() -> None:
    for outcome in seen("idle"):
        assert outcome["cpu seconds"] < 0.25  # of half a second


def test_opening_and_closing_leaks_neither_descriptors_nor_threads() -> None:
    for outcome in seen("many"):
        # In the first count other resources may still be about to be released.
        assert all(late <= early for late, early in zip(outcome["many"], outcome["few"], strict=True)), (
            outcome
        )


def test_captured_operation_has_no_deadline() -> None:
    for outcome in seen("captured"):
        assert outcome == {"done": True, "failure": None}


def test_closed_group_refuses_operations_and_leaves_the_communicator_usable() -> None:
    for outcome in seen("closed"):
        assert "CommunicatorError" in outcome["kinds"]
        assert "'closed/nccl' is closed" in outcome["message"]
        assert outcome["communicator"] is None
