"""The communication report counts operations, and finds the ranks that others waited for."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from tests.collective.scenes import report_scenes
from tests.collective.scenes.report_scenes import LATE_RANK, LONG_WAIT_S, NUM_LATE, WAIT_S
from tests.run_ranks import run_ranks

WORLDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "shm": ("shm", (0, 0, 0)),
    "two hosts": ("auto", (0, 0, 1)),
    "tcp": ("tcp", (0, 0, 0)),
    "mpi": ("mpi", (0, 0, 0)),
}

worlds = pytest.mark.parametrize(
    "world",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("tcp", "mpi") else name for name in WORLDS],
)


@cache
def played(world: str) -> list[dict[str, dict[str, Any]]]:
    transport, hosts = WORLDS[world]
    return run_ranks(3, report_scenes.play, hosts, transport=transport)


EXPECTED = {
    # number of operations, bytes, factor of the bus bandwidth
    "allreduce": (602, 600 * 40 + 80 + 400_000, 4 / 3),
    "reduce_scatter": (1, 120, 2 / 3),
    "allgather": (2, 120 + 48, 2 / 3),
    "broadcast": (1, 40, 1.0),
    "reduce": (1, 40, 1.0),
    "gather": (1, 120, 2 / 3),
    "scatter": (1, 120, 2 / 3),
    "alltoall": (1, 120, 2 / 3),
    "barrier": (1, 0, 1.0),
}


@worlds
def test_operations_and_bytes_are_counted_by_kind(world: str) -> None:
    for rank, outcome in enumerate(played(world)):
        report = outcome["counted"]["dict"]
        assert report["rank"] == rank
        operations = report["process_sets"]["counted"]["operations"]
        assert {kind: (row["count"], row["bytes"]) for kind, row in operations.items()} == {
            kind: (count, num_bytes) for kind, (count, num_bytes, _) in EXPECTED.items()
        }


@worlds
def test_bandwidths_follow_the_definitions_of_nccl_tests(world: str) -> None:
    for outcome in played(world):
        for kind, row in outcome["counted"]["dict"]["process_sets"]["counted"]["operations"].items():
            assert 0.0 <= row["waiting_share"] <= 1.0
            assert 0.0 <= row["exposed_share"] <= 1.0
            transfer_s = row["busy_s"] - row["waiting_s"]
            assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / transfer_s)
            assert row["bus_bandwidth"] == pytest.approx(row["algorithm_bandwidth"] * EXPECTED[kind][2])


@worlds
def test_process_sets_are_reported_also_when_they_are_closed(world: str) -> None:
    for rank, outcome in enumerate(played(world)):
        sets = outcome["counted"]["dict"]["process_sets"]
        if rank not in (0, 1):
            assert set(sets) == {"counted"}
            continue
        assert sets["counted/pair"]["world_size"] == 2
        assert sets["counted/pair"]["operations"]["broadcast"]["count"] == 2


@worlds
def test_table_has_a_line_per_process_set_and_operation(world: str) -> None:
    lines = played(world)[0]["counted"]["table"].splitlines()
    assert re.match(r"Communication of rank 0 took \S+ s of \S+ s, ", lines[0])
    assert lines[1].split()[:5] == ["process", "set", "operation", "count", "MiB"]
    rows = {tuple(line.split()[:3]) for line in lines[2:]}
    assert {("counted", kind, str(count)) for kind, (count, _, _) in EXPECTED.items()} <= rows
    assert ("counted/pair", "broadcast", "2") in rows


@worlds
def test_metrics_have_names_that_mlflow_takes(world: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation", reason="mlflow is not installed")
    metrics = played(world)[0]["counted"]["metrics"]
    assert metrics["communication/counted/allreduce/count"] == 602.0
    assert metrics["communication/counted_pair/broadcast/bytes"] == 80.0
    for name, value in metrics.items():
        validation._validate_metric_name(name)
        assert isinstance(value, float)
    assert len(metrics) == 7 * (len(EXPECTED) + 1)


@worlds
def test_waiting_for_the_slowest_rank_is_measured_separately(world: str) -> None:
    for rank, outcome in enumerate(played(world)):
        row = outcome["late"]["own"]["process_sets"]["late"]["operations"]["allreduce"]
        assert row["count"] == NUM_LATE
        if rank == LATE_RANK:
            # The time before its call is not communication.
            assert row["busy_s"] <= outcome["late"]["calls_s"]
            continue
        assert row["waiting_s"] > NUM_LATE * WAIT_S * 0.5
        assert row["waiting_share"] == pytest.approx(row["waiting_s"] / row["busy_s"])
        assert row["exposed_share"] == pytest.approx(1.0)


@worlds
def test_straggler_is_named_with_how_often_it_was_last(world: str) -> None:
    outcome = played(world)[0]["late"]
    worst = outcome["world"]["late_ranks"][0]
    assert (worst["process_set"], worst["rank"]) == ("late", LATE_RANK)
    assert worst["count"] == NUM_LATE
    assert worst["waited_s"] > NUM_LATE * WAIT_S * 0.5
    assert [report["rank"] for report in outcome["world"]["ranks"]] == [0, 1, 2]
    assert "came last" in outcome["world table"]
    assert all("world" not in other["late"] for other in played(world)[1:])
    if world == "shm":
        late = outcome["own"]["process_sets"]["late"]["late_ranks"][LATE_RANK]
        assert late["count"] == NUM_LATE
        assert late["waited_s"] > NUM_LATE * WAIT_S * 0.5


@worlds
def test_process_sets_with_the_same_name_are_distinguished_by_their_world_ranks(world: str) -> None:
    outcomes = [outcome["namesakes"] for outcome in played(world)]
    seen = [
        {label: report["operations"]["allreduce"]["count"] for label, report in outcome["own"].items()}
        for outcome in outcomes
    ]
    assert seen == [
        {"namesakes/pair": NUM_LATE},
        {
            "namesakes/pair of ranks 0, 1": NUM_LATE,
            "namesakes/pair of ranks 1, 2": 2 * NUM_LATE,
        },
        {"namesakes/pair": 2 * NUM_LATE},
    ]
    worst = outcomes[0]["world"]["late_ranks"][0]
    assert (worst["process_set"], worst["ranks"], worst["rank"]) == ("namesakes/pair", (1, 2), LATE_RANK)
    assert re.search(
        rf"namesakes/pair of ranks 1, 2 +allreduce +{2 * NUM_LATE} .*\(rank 1\) .*\(rank 2\)",
        outcomes[0]["table"],
    )


@worlds
def test_gathering_leaves_the_report_as_it_was(world: str) -> None:
    for outcome in played(world):
        before, after = (outcome["late"][name]["process_sets"] for name in ("own", "after"))
        assert before == after


@worlds
def test_communication_behind_computation_is_not_exposed(world: str) -> None:
    for rank, outcome in enumerate(played(world)):
        if rank == LATE_RANK:
            continue
        hidden, exposed = outcome["hidden"]["hidden"], outcome["hidden"]["exposed"]
        assert hidden["busy"] > LONG_WAIT_S * 0.5
        assert hidden["exposed"] == 0.0
        assert exposed["busy"] > LONG_WAIT_S * 0.5
        assert exposed["exposed"] > 0.5


@worlds
def test_failed_operations_are_counted_apart(world: str) -> None:
    for outcome in played(world):
        assert outcome["failing"] == {"count": 1, "failed": 1, "bytes": 16}
