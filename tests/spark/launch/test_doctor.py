"""The doctor with a session: it examines every executor, runs ranks, and reports what Spark cannot do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.doctor import examine
from sparkdl.doctor.finding import BAD, GOOD, Finding
from tests.collective.eventually import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def by_check(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


@pytest.mark.slow
def test_every_executor_is_looked_at_and_the_ranks_measure(spark: SparkSession, spark_mode: str) -> None:
    steps: list[str] = []
    findings = examine(spark, on_step=steps.append)
    assert [finding for finding in findings if finding.status == BAD] == []
    pythons = by_check(findings, "Python")
    assert pythons[0].where == "this machine"
    assert len(pythons) == (3 if spark_mode == "cluster" else 2)
    assert len(by_check(findings, "versions")) == len(pythons) - 1
    (slots,) = by_check(findings, "slots")
    assert slots.found.startswith("2 slots, Spark")
    (ranks,) = by_check(findings, "ranks")
    assert ranks.found == "2 ran on 1 host"
    (transfer,) = by_check(findings, "transfer")
    assert "between two of its ranks" in transfer.found
    # A client of Spark Connect needs no Java.
    assert len(by_check(findings, "Java")) == len(pythons) - (1 if spark_mode == "connect" else 0)
    assert steps[-1] == "Measuring the network"


@pytest.mark.any_spark_will_do
@pytest.mark.usefixtures("bare_python")
def test_python_of_the_executors_that_lacks_sparkdl_is_a_finding(spark: SparkSession) -> None:
    (finding,) = by_check(examine(spark, num_ranks=2), "executors")
    assert finding.status == BAD
    assert "bare-python' on the executors, which has no module" in finding.found
    assert "PYSPARK_PYTHON" in finding.found


@pytest.mark.any_spark_will_do
def test_more_ranks_than_slots_and_slots_that_others_hold_are_findings(
    spark: SparkSession, hold: Callable[[Any], Any], tmp_path: Path
) -> None:
    other_job = threading.Thread(target=spark.range(0, 1, 1, 1).mapInArrow(hold, "id long").collect)
    other_job.start()
    try:
        assert eventually((tmp_path / "running").exists, timeout_s=60)
        findings = examine(spark, num_ranks=3, timeout_s=3.0)
    finally:
        (tmp_path / "release").touch()
        other_job.join()
    (slots,) = by_check(findings, "slots")
    assert slots.status == BAD
    assert "3 ranks need 3 slots" in slots.found
    assert "the cluster has 2" in slots.found
    assert "numWorkers" in slots.found
    (executors,) = by_check(findings, "executors")
    assert executors.status == BAD
    assert "other jobs hold its slots" in executors.found
    assert all(finding.status == GOOD for finding in by_check(findings, "Python"))
