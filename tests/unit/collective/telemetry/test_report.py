from __future__ import annotations

import math

import pytest

from sparkdl.collective.telemetry.communication_report import OperationReport, make_report
from sparkdl.collective.telemetry.monitor import (
    CommunicatorKey,
    CommunicatorMeasurements,
    Lateness,
    OperationTotals,
)


def row(
    operation: str, *, world_size: int = 4, busy_s: float = 3.0, waiting_s: float = 1.0
) -> OperationReport:
    return OperationReport(
        process_set="world",
        ranks=tuple(range(world_size)),
        operation=operation,
        count=10,
        num_failed=0,
        bytes=8_000,
        busy_s=busy_s,
        waiting_s=waiting_s,
        queued_s=0.5,
        exposed_s=1.5,
    )


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("allreduce", 1.5),
        ("reduce_scatter", 0.75),
        ("allgather", 0.75),
        ("alltoall", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
    ],
)
def test_bus_bandwidth_is_the_algorithm_bandwidth_times_what_has_to_move(
    operation: str, factor: float
) -> None:
    assert row(operation).algorithm_bandwidth == 4_000.0
    assert row(operation).bus_bandwidth == 4_000.0 * factor


def test_shares_are_of_the_time_of_the_operations() -> None:
    assert row("allreduce").waiting_share == pytest.approx(1 / 3)
    assert row("allreduce").exposed_share == 0.5


def test_operations_that_were_not_timed_have_no_rate() -> None:
    never = row("allreduce", busy_s=0.0, waiting_s=0.0)
    assert never.algorithm_bandwidth == never.bus_bandwidth == never.waiting_share == 0.0
    alone = row("allreduce", world_size=1)
    assert alone.bus_bandwidth == 0.0


def measured() -> CommunicatorMeasurements:
    key = CommunicatorMeasurements(key=CommunicatorKey("world/a set", (0, 3)))
    key.add(
        [OperationTotals("allreduce", 3, 1, 2**20, 2_000_000, 0, 0, 1_000_000)], [Lateness(1, 2, 500_000)]
    )
    return key


def test_report_reads_as_a_table() -> None:
    report = make_report(0, [measured()], 12.0)
    assert str(report).splitlines() == [
        "Communication of rank 0 took 0.002 s of 12 s, 0.001 s not hidden behind computation",
        "process set  operation         count    MiB   ms  alg GB/s  bus GB/s  waiting  exposed",
        "world/a set  allreduce  3 + 1 failed  1.000  2.0     0.524     0.524       0%      50%",
        "",
        "process set  came last  times  ms waited for",
        "world/a set  rank 3         2            0.5",
    ]


def test_report_reads_as_a_dict() -> None:
    report = make_report(0, [measured()], 12.0).as_dict()
    assert report["seconds"] == 12.0
    key = report["process_sets"]["world/a set"]
    assert (key["world_size"], key["ranks"]) == (2, [0, 3])
    assert key["late_ranks"] == {3: {"count": 2, "waited_s": 0.0005}}
    assert key["operations"]["allreduce"]["num_failed"] == 1
    assert key["operations"]["allreduce"]["exposed_share"] == 0.5


def test_metrics_are_finite_and_flat() -> None:
    metrics = make_report(0, [measured()], 12.0).as_metrics("fit")
    assert metrics["fit/world_a set/allreduce/algorithm_gb_per_s"] == pytest.approx(2**20 / 0.002 / 1e9)
    assert all(math.isfinite(value) for value in metrics.values())


def test_report_of_nothing_is_an_empty_table() -> None:
    report = make_report(3, [], 1.0)
    assert "rank 3" in str(report)
    assert report.as_metrics() == {}
