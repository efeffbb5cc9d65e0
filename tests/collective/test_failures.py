"""After any failure on one rank, every other rank gets the error that names it, in time, and can continue."""

from __future__ import annotations

import sys
from functools import cache
from operator import le
from pathlib import Path
from typing import Any

import pytest

from tests.collective.scenes import failure_scenes, mpi_failure_scenes, opening_scenes
from tests.run_ranks import run_ranks

WORLD_SIZE = 3
DEAD_RANK = 1
PROMPTLY_S = 30.0
"""Many times what is needed on an idle machine, and far below the deadline that must not be waited for."""

transports = pytest.mark.parametrize(
    # tests/hosts/test_failures.py has failures over TCP
    "transport",
    ["shm", pytest.param("tcp", marks=pytest.mark.slow), "mpi"],
)


@cache
def seen(transport: str) -> list[dict[str, dict[str, Any]] | None]:
    """What the ranks saw of all scenes; None for the rank that the last scene killed."""
    return run_ranks(WORLD_SIZE, failure_scenes.play, transport=transport, may_die=[DEAD_RANK])


def survivors(transport: str, scene: str, *, besides: int | None = None) -> dict[int, dict[str, Any]]:
    outcomes = {
        rank: outcome[scene]
        for rank, outcome in enumerate(seen(transport))
        if outcome is not None and rank != besides
    }
    for rank, outcome in outcomes.items():
        assert "unexpected" not in outcome, f"rank {rank}: {outcome['unexpected']}"
    return outcomes


@transports
def test_missed_deadline_names_the_rank_that_did_not_join(transport: str) -> None:
    for outcome in survivors(transport, "late", besides=WORLD_SIZE - 1).values():
        assert "CommunicatorTimeoutError" in outcome["kinds"], outcome
        assert str(WORLD_SIZE - 1) in outcome["message"].split("join")[0], outcome
        assert outcome["seconds"] < PROMPTLY_S
        assert outcome["failure"]
        assert "CommunicatorError" in outcome["again"]["kinds"], outcome


@transports
def test_handle_of_an_operation_that_misses_its_deadline_raises(transport: str) -> None:
    outcome = survivors(transport, "late asynchronous")[WORLD_SIZE - 1]
    assert "CommunicatorTimeoutError" in outcome["kinds"], outcome
    assert outcome["done"]


@transports
def test_abort_reaches_all_ranks_with_its_reason(transport: str) -> None:
    for outcome in survivors(transport, "aborted").values():
        assert "CommunicatorAbortedError" in outcome["kinds"], outcome
        assert "the data is rotten" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S
        assert outcome.get("seconds to abort", 0.0) < PROMPTLY_S


@transports
def test_exception_inside_with_aborts_the_other_ranks(transport: str) -> None:
    outcomes = survivors(transport, "exception")
    kinds = {rank: outcome["kinds"][0] for rank, outcome in outcomes.items()}
    assert kinds == {0: "CommunicatorAbortedError", WORLD_SIZE - 1: "ValueError"}
    for outcome in outcomes.values():
        assert "bad batch" in outcome["message"]


@transports
def test_rank_that_leaves_early_does_not_make_the_others_hang(transport: str) -> None:
    for outcome in survivors(transport, "left early", besides=0).values():
        assert "CommunicatorError" in outcome["kinds"], outcome
        assert outcome["seconds"] < PROMPTLY_S


@transports
def test_message_that_does_not_come_in_time_ends_the_communicator(transport: str) -> None:
    outcome = survivors(transport, "late message")[0]
    assert "CommunicatorTimeoutError" in outcome["kinds"], outcome
    assert "recv of 3 float64 from rank 1 with tag 4" in outcome["message"]
    assert "rank 1 has not answered" in outcome["message"]
    assert outcome["seconds"] < PROMPTLY_S
    assert outcome["failure"]
    assert "CommunicatorError" in outcome["again"]["kinds"]


@transports
def test_rank_that_gives_up_ends_the_others_long_before_their_deadlines(transport: str) -> None:
    for outcome in survivors(transport, "late message", besides=0).values():
        assert "CommunicatorError" in outcome["kinds"], outcome
        assert "recv of 3 float64 from rank 1 with tag 4" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S


def test_mpi_failure_on_one_rank_reaches_the_other_ranks() -> None:
    for outcome in run_ranks(WORLD_SIZE, mpi_failure_scenes.fault_of_mpi, transport="mpi"):
        assert "allreduce of 3 float64 by sum" in outcome["message"]
        assert "failed in MPI" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S


def test_any_error_in_a_message_over_mpi_reaches_both_ends() -> None:
    sent, received = run_ranks(2, mpi_failure_scenes.fault_in_messages, transport="mpi")
    for outcome in (sent, received):
        assert "CommunicatorError" in outcome["kinds"], outcome
        assert "recv of 1000000 float64 from rank 0" in outcome["message"]
        assert "failed: TypeError" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S


@transports
def test_abort_reaches_ranks_that_wait_for_messages(transport: str) -> None:
    for outcome in survivors(transport, "aborted messages")[0]["seen"]:
        assert "CommunicatorAbortedError" in outcome["kinds"], outcome
        assert "no more messages" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S


@transports
def test_killed_rank_is_named_by_all_ranks_that_wait_for_messages(transport: str) -> None:
    scene = failure_scenes.killed_while_messages_wait
    for outcome in run_ranks(3, scene, transport=transport, may_die=[DEAD_RANK]):
        if outcome is not None:
            assert "RankLostError" in outcome["kinds"], outcome
            assert f"rank {DEAD_RANK}" in outcome["message"]
            assert outcome["seconds"] < PROMPTLY_S


@transports
def test_close_can_be_called_twice_and_the_name_can_be_reused(transport: str) -> None:
    for outcome in survivors(transport, "closed").values():
        assert "CommunicatorError" in outcome["kinds"], outcome
        assert outcome["total"] == [WORLD_SIZE] * 2


@transports
def test_process_sets_may_overlap_and_be_used_from_several_threads(transport: str) -> None:
    for rank, outcome in survivors(transport, "process sets").items():
        assert outcome["backwards"] == [2, 1, 0]
        assert rank == 2 or outcome["pair"] == [0, 1]
        assert outcome["overlapping"] == ([2, 0] if rank in (0, 2) else None)
        assert outcome["at once"] == [
            60.0,
            40.0 if rank in (0, 1) else None,
            40.0 if rank in (0, 2) else None,
        ]
        assert outcome["alone"] == [1.0, 1.0]


@transports
def test_error_outside_a_process_set_names_its_members(transport: str) -> None:
    for refused, called in zip(
        survivors(transport, "process sets")[2]["pair"], ("allreduce", "world_size"), strict=True
    ):
        assert "ParamError" in refused["kinds"]
        assert f"'pair' of ranks 0, 1: '{called}' is for its members" in refused["message"]


@transports
def test_process_set_of_impossible_ranks_is_refused(transport: str) -> None:
    for outcome in survivors(transport, "process sets").values():
        for ranks in ("empty", "twice", "outside"):
            assert "ParamError" in outcome[ranks]


@pytest.mark.parametrize(
    ("transport", "scene"),
    [
        *((transport, "closed many times") for transport in ("shm", "tcp", "mpi")),
        *((transport, "dropped many times") for transport in ("shm", "tcp")),
    ],
)
def test_communicators_leak_neither_descriptors_nor_threads(transport: str, scene: str) -> None:
    for outcome in survivors(transport, scene).values():
        # A descriptor may still be about to close when the first count is taken.
        assert all(map(le, outcome["many"], outcome["few"])), outcome


@transports
def test_opening_error_names_the_missing_rank(transport: str) -> None:
    for outcome in survivors(transport, "absent").values():
        assert "CommunicatorTimeoutError" in outcome["kinds"], outcome
        assert "rank 1" in outcome["message"]


@transports
def test_killed_rank_is_named_by_all_others_within_seconds(transport: str) -> None:
    outcomes = survivors(transport, "killed")
    assert set(outcomes) == {0, 2}
    for outcome in outcomes.values():
        assert "RankLostError" in outcome["kinds"], outcome
        assert f"rank {DEAD_RANK}" in outcome["message"]
        assert outcome["seconds"] < PROMPTLY_S
        assert "CommunicatorError" in outcome["again"]["kinds"]
        assert outcome["seconds to close"] < PROMPTLY_S


@transports
def test_nothing_stays_in_shared_memory(transport: str) -> None:
    for outcome in survivors(transport, "shared memory").values():
        assert not [file for file in outcome["files"] if Path(file).exists()]
        if transport != "mpi":  # the files of MPICH have names
            assert outcome["nameless"]
            assert not outcome["files"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rank_with_another_secret_is_refused(transport: str) -> None:
    for outcome in run_ranks(2, opening_scenes.wrong_secret, transport=transport):
        assert "AuthenticationError" in outcome["kinds"], outcome


def test_strangers_at_the_listener_do_not_disturb_the_ranks() -> None:
    outcomes = run_ranks(2, opening_scenes.stranger_at_the_listener, transport="tcp")
    assert outcomes == [{"total": [2.0]}] * 2


def test_too_small_shared_memory_is_a_warning_for_auto_and_an_error_for_shm() -> None:
    for outcome in run_ranks(2, opening_scenes.no_room_for_the_segment):
        assert outcome["total"] == [2.0] * 3
        assert outcome["hosts"] == (0, 0), "no shared memory does not put the ranks on two hosts"
        assert "No shared memory" in outcome["warnings"][0]
        assert "CommunicatorError" in outcome["shm"]["kinds"]
        assert "/dev/shm" in outcome["shm"]["message"]


def test_buffers_that_shared_memory_cannot_hold_lie_outside_and_that_is_said_once() -> None:
    outcomes = run_ranks(2, opening_scenes.room_for_some_buffers)
    assert [outcome["totals"] for outcome in outcomes] == [[[3]] * 3] * 2
    (warning,) = [warning for outcome in outcomes for warning in outcome["warnings"]]
    assert "128 MiB" in warning


@pytest.mark.parametrize(
    ("transport", "host_of_rank", "named"),
    [("shm", (0, 1), "transport='auto'"), ("mpi", None, "are not one MPI world")],
)
def test_transport_that_cannot_connect_the_ranks_is_refused(
    transport: str, host_of_rank: tuple[int, int] | None, named: str
) -> None:
    for outcome in run_ranks(2, opening_scenes.error_of_opening, transport, host_of_rank):
        assert "CommunicatorError" in outcome["kinds"]
        assert named in outcome["message"]


@pytest.mark.slow  # takes a whole deadline; MPI's missed deadlines are tested daily
def test_mpi_rank_that_dies_during_opening_does_not_hold_the_others_past_their_deadline() -> None:
    scene = mpi_failure_scenes.dies_while_mpi_makes_the_communicator
    outcome, _ = run_ranks(2, scene, transport="mpi", may_die=[1])
    assert "CommunicatorTimeoutError" in outcome["kinds"], outcome
    assert "'half made' within 1.5 s" in outcome["message"]
    assert outcome["seconds"] < PROMPTLY_S


def test_missing_mpi_library_is_named_with_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI here')")
    variables = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    for outcome in run_ranks(1, opening_scenes.error_of_opening, "mpi", None, variables=variables):
        assert "TransportUnavailableError" in outcome["kinds"]
        assert "pip install mpi4py mpich" in outcome["message"]
