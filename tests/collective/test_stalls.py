"""Ranks that do not join an operation are named on every rank that waits for them, on any transport."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sparkdl.collective import StallCheck
from sparkdl.errors import ParamError
from tests.collective.scenes import stall_scenes
from tests.collective.scenes.stall_scenes import ABORT_S
from tests.run_ranks import run_ranks

WORLDS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    # transport, hosts, ranks that stay away
    "shm": ("shm", (0, 0, 0, 0), (1, 3)),
    "tcp": ("tcp", (0, 0, 0), (1,)),
    "two hosts": ("auto", (0, 0, 1, 1), (3,)),
    "a host without a lane for each": ("auto", (0, 1, 1), (0,)),
    "mpi": ("mpi", (0, 0, 0), (2,)),
}

worlds = pytest.mark.parametrize(
    "world",
    [name if name in ("shm", "mpi") else pytest.param(name, marks=pytest.mark.slow) for name in WORLDS],
)


@cache
def played(world: str) -> dict[int, dict[str, Any]]:
    transport, hosts, away = WORLDS[world]
    outcomes = run_ranks(len(hosts), stall_scenes.play, hosts, away, transport=transport)
    return dict(enumerate(outcomes))


def waiting(world: str, scene: str) -> list[dict[str, Any]]:
    return [outcome[scene] for rank, outcome in played(world).items() if rank not in WORLDS[world][2]]


def name_of(away: tuple[int, ...]) -> str:
    return f"rank {away[0]}" if len(away) == 1 else "ranks " + ", ".join(map(str, away))


@worlds
def test_missing_ranks_and_the_tensor_are_named_on_every_rank_that_waits(world: str) -> None:
    who = name_of(WORLDS[world][2])
    for rank, outcome in played(world).items():
        warnings = outcome["warned"]["warnings"]
        if rank in WORLDS[world][2]:
            assert warnings == []
            continue
        for warning in warnings[:2]:
            assert warning.startswith(f"Rank {rank} has waited ")
            assert "allreduce 'weights' of 5 float32" in warning
            assert f"on 'warned': {who} had not joined" in warning


def test_warning_reads_as_the_documentation_shows_it() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "communication.md").read_text(encoding="utf-8")
    shown = re.search(r"## Stalls.*?```\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    warning = played("shm")[0]["warned"]["warnings"][0]
    at_60_s = re.sub(r"waited \S+ s", "waited 60 s", warning).replace("'warned'", "'world'")
    assert at_60_s == " ".join(shown[1].split())


@worlds
def test_stalled_operation_completes_when_the_missing_ranks_join(world: str) -> None:
    for outcome in played(world).values():
        assert outcome["warned"]["sum"] == len(WORLDS[world][1])


@worlds
def test_stall_that_lasts_too_long_fails_on_every_rank_with_the_reason(world: str) -> None:
    for outcome in waiting(world, "given up"):
        assert "CommunicatorError" in outcome["kinds"], outcome
        assert "allreduce 'weights' of 5 float64" in outcome["message"]
        assert f"stalled for {ABORT_S:.1f} s" in outcome["message"] or "stalled for 1 s" in outcome["message"]
        assert ABORT_S * 0.9 < outcome["seconds"] < ABORT_S + 30.0
    for outcome in played(world).values():
        assert outcome["given up"]["kinds"]


@worlds
def test_ranks_without_a_stall_check_get_no_warning(world: str) -> None:
    for outcome in played(world).values():
        assert outcome["silent"]["warnings"] == []


@worlds
def test_stall_warning_on_a_process_set_names_its_world_ranks(world: str) -> None:
    late = WORLDS[world][2][0]
    waits = next(rank for rank in played(world) if rank not in WORLDS[world][2])
    for rank, outcome in played(world).items():
        if rank != waits:
            assert outcome["message"]["warnings"] == []
            continue
        assert outcome["message"]["sum"] == 5.0
        pair = "'pairs/pair'"
        if (late, waits) != (0, 1):
            pair += f" (its ranks 0, 1 are {late}, {waits} of the world)"
        assert outcome["in a pair"]["sum"] == 10.0
        for place, operation in (
            ("message", "recv of 5 float64 from rank 0 with tag 7"),
            ("in a pair", "allreduce of 5 float64"),
        ):
            warning = outcome[place]["warnings"][0]
            assert warning.startswith("Rank 1 has waited ")
            assert f"in {operation}" in warning
            assert f" on {pair}: rank 0 had not joined" in warning


@worlds
def test_idle_communicator_uses_no_processor_time(world: str) -> None:
    for outcome in played(world).values():
        assert outcome["idle"]["seconds"] < 0.25  # of half a second


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_stall_check_refuses_times_that_are_not_positive(seconds: float) -> None:
    with pytest.raises(ParamError, match="warn_after_s must be positive or None"):
        StallCheck(warn_after_s=seconds)
