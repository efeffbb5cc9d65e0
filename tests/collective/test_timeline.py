"""One file for all ranks shows when each of them communicated."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.collective.scenes import timeline_scenes
from tests.collective.scenes.timeline_scenes import LATE_RANK, WAIT_S
from tests.collective.scenes.trace_file import TraceFile
from tests.run_ranks import run_ranks

WORLDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "shm": ("shm", (0, 0, 0)),
    "two hosts": ("auto", (0, 0, 1)),
    "tcp": ("tcp", (0, 0, 0)),
    "mpi": ("mpi", (0, 0, 1)),
}

worlds = pytest.mark.parametrize(
    "world", [pytest.param(name, marks=pytest.mark.slow) if name == "tcp" else name for name in WORLDS]
)


Played = Callable[[str], tuple[Path, list[dict[str, dict[str, Any]]]]]
Traces = Callable[[str, str], TraceFile]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A function that plays the scenes of a world once and returns the folder of the files and the outcomes."""

    @cache
    def play(world: str) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
        transport, hosts = WORLDS[world]
        folder = tmp_path_factory.mktemp("timelines")
        return folder, run_ranks(3, timeline_scenes.play, str(folder), hosts, transport=transport)

    return play


@pytest.fixture(scope="module")
def trace_of(played: Played) -> Traces:
    """A function that reads the timeline file of a scene in a world."""
    return lambda world, scene: TraceFile(played(world)[0] / f"{scene}.json")


@worlds
def test_ranks_are_processes_and_process_sets_are_threads(world: str, trace_of: Traces) -> None:
    trace = trace_of(world, "operations")
    assert list(trace.processes) == [0, 1, 2]
    for rank, name in trace.processes.items():
        assert name.startswith(f"rank {rank} on ")
    for rank in range(3):
        sets = {name for (process, _), name in trace.threads.items() if process == rank}
        early = {"operations/early"} if rank in (0, LATE_RANK) else set()
        assert sets == {"operations", "operations/late"} | early
    assert not trace.about["dropped"]
    assert not trace.about["missing"]
    assert trace.about["start_time_since_epoch_in_micros"] > 1.7e15


@worlds
def test_timeline_has_operations_between_start_and_stop_with_name_bytes_and_dtype(
    world: str, trace_of: Traces
) -> None:
    trace = trace_of(world, "operations")
    for rank in range(3):
        operations = trace.operations(rank, "operations")
        assert [event["name"] for event in operations] == [
            *(f"allreduce weights {number}" for number in range(3)),
            *["allreduce queued"] * 3,
            "barrier",
        ]
        first = operations[0]["args"]
        assert first["name"] == "weights 0"
        assert first["bytes"] == 4000
        assert first["dtype"] == "float32"
        (gathered,) = trace.operations(rank, "operations/late")
        assert gathered["name"] == "allgather"
        assert gathered["args"]["bytes"] == 60
    (sent,) = trace.operations(0, "operations/early")
    assert sent["name"] == "broadcast"


@worlds
def test_waiting_for_a_late_rank_is_a_phase_of_the_others(world: str, trace_of: Traces) -> None:
    trace = trace_of(world, "operations")
    for rank in (0, 2):
        waits = trace.phases(rank, "operations", "NEGOTIATE_ALLREDUCE")
        long = [event for event in waits if event["dur"] > WAIT_S * 0.5e6]
        assert len(long) >= 3
        assert {event["name"] for event in long[:3]} == {
            f"wait for rank {LATE_RANK}" if world == "shm" else "wait for other ranks"
        }
    for rank in range(3):
        transfers = trace.phases(rank, "operations", "TRANSFER_ALLREDUCE")
        assert len(transfers) == 6


@worlds
def test_asynchronous_operations_have_a_queue_phase(world: str, trace_of: Traces) -> None:
    trace = trace_of(world, "operations")
    for rank in range(3):
        assert [event["name"] for event in trace.queued(rank)] == ["queue of operations"] * 3


@worlds
def test_clocks_of_the_ranks_agree(world: str, trace_of: Traces) -> None:
    trace = trace_of(world, "operations")
    error_us = max(trace.about["clock_error_us"].values())
    assert error_us < 1_000_000  # half of the quickest round trip, which is slow on a busy machine
    by_rank = [trace.operations(rank, "operations") for rank in range(3)]
    for same in zip(*by_rank, strict=True):
        # No rank is done before the last one has begun.
        last_begin = max(event["ts"] for event in same)
        first_end = min(event["ts"] + event["dur"] for event in same)
        assert last_begin <= first_end + 2 * error_us + 1


@worlds
def test_timeline_file_exists_when_stop_returns_on_any_rank(world: str, played: Played) -> None:
    assert [outcome["operations"]["exists"] for outcome in played(world)[1]] == [True] * 3


@worlds
def test_timeline_keeps_the_latest_operations_and_reports_how_many_were_dropped(
    world: str, played: Played, trace_of: Traces
) -> None:
    trace = trace_of(world, "dropped")
    for rank in range(3):
        names = [event["args"]["name"] for event in trace.operations(rank, "dropped")]
        assert names == ["15", "16", "17", "18", "19"]
        assert trace.about["dropped"][f"rank {rank}"] == {"dropped": 15}
    said = [event["name"] for event in trace.events if event["ph"] == "i"]
    assert said == ["15 earlier operations were dropped"] * 3
    (warning,) = played(world)[1][0]["dropped"]["warnings"]
    assert "dropped.json has the latest operations alone" in warning


@worlds
def test_second_timeline_has_its_own_operations(world: str, trace_of: Traces) -> None:
    trace = trace_of(world, "again")
    for rank in range(3):
        assert [event["args"]["name"] for event in trace.operations(rank, "again")] == ["second"]


@worlds
def test_wrong_calls_are_refused_alike_on_all_ranks(world: str, played: Played) -> None:
    folder, outcomes = played(world)
    for outcome in outcomes:
        for call, named in {
            "stopped": "'again'",
            "started": "runs already",
            "unwritable": str(folder / "again.json" / "below a file"),
        }.items():
            assert outcome["again"][call]["kinds"][0] == "ParamError"
            assert named in outcome["again"][call]["message"]


@worlds
def test_closing_ends_the_timeline(world: str, trace_of: Traces) -> None:
    trace = trace_of(world, "closed")
    for rank in range(3):
        assert [event["args"]["name"] for event in trace.operations(rank, "closed")] == ["the last"]


@worlds
def test_exception_on_one_rank_leaves_a_timeline_of_all_ranks(world: str, trace_of: Traces) -> None:
    trace = trace_of(world, "failed")
    for rank in range(3):
        good = trace.operations(rank, "failed")[0]
        assert good["args"]["name"] == "good"
    assert not trace.about["missing"]
    failed = [event for event in trace.operations(0, "failed") if event["args"].get("failed")]
    assert [event["args"]["name"] for event in failed] == ["bad"]


@pytest.mark.parametrize("world", ["two hosts", "mpi"])
def test_offset_of_shifted_clocks_is_within_its_error(world: str, played: Played) -> None:
    _, hosts = WORLDS[world]
    for rank, outcome in enumerate(played(world)[1]):
        clocks = outcome["clocks"]
        if hosts[rank] == 0:
            assert clocks["offset"] == clocks["error"] == 0
            continue
        assert abs(clocks["offset"] + clocks["shift"]) <= clocks["error"]
        assert clocks["error"] < clocks["shift"] / 1000


@pytest.mark.parametrize(
    "transport",
    ["shm", pytest.param("tcp", marks=pytest.mark.slow), pytest.param("mpi", marks=pytest.mark.slow)],
)
def test_timeline_of_the_survivors_names_the_killed_rank(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "killed.json"
    outcomes = run_ranks(3, timeline_scenes.killed, str(path), transport=transport, may_die=[LATE_RANK])
    trace = TraceFile(path)
    assert list(trace.processes) == [0, 2]
    for rank in (0, 2):
        assert trace.operations(rank, "killed")[0]["args"]["name"] == "all alive"
        assert "RankLostError" in outcomes[rank]["error"]["kinds"]
        assert f"rank {LATE_RANK}" in outcomes[rank]["error"]["message"]
        assert outcomes[rank]["seconds"] < 45.0
    assert f"rank {LATE_RANK}" in trace.about["missing"][f"rank {LATE_RANK}"]
    (warning,) = outcomes[0]["warnings"]
    assert f"is without rank {LATE_RANK}" in warning
