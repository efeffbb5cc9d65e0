"""The doctor with a session: it examines every executor, runs ranks, and reports what Spark cannot do."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from sparkdl.doctor import examine
from sparkdl.doctor.finding import BAD, GOOD, Finding

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
def test_python_of_the_executors_that_lacks_sparkdl_is_a_finding(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = ":".join(map(str, (Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip")))
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nPYTHONPATH="{libraries}" exec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
    (finding,) = by_check(examine(spark, num_ranks=2), "executors")
    assert finding.status == BAD
    assert "bare-python' on the executors, which has no module" in finding.found
    assert "PYSPARK_PYTHON" in finding.advice


@pytest.mark.any_spark_will_do
def test_more_ranks_than_slots_and_slots_that_others_hold_are_findings(
    spark: SparkSession, tmp_path: Path
) -> None:
    release, running = tmp_path / "release", tmp_path / "running"

    def hold_slot(batches: Any) -> Any:
        pause = threading.Event()
        running.touch()
        while not release.exists():
            pause.wait(0.05)
        yield from batches

    other_job = threading.Thread(target=spark.range(0, 1, 1, 1).mapInArrow(hold_slot, "id long").collect)
    other_job.start()
    try:
        pause = threading.Event()
        while not running.exists():
            pause.wait(0.05)
        findings = examine(spark, num_ranks=3, timeout_s=3.0)
    finally:
        release.touch()
        other_job.join()
    (slots,) = by_check(findings, "slots")
    assert slots.status == BAD
    assert "3 ranks need 3 slots at once and the cluster has 2" in slots.found
    assert "numWorkers" in slots.advice
    (executors,) = by_check(findings, "executors")
    assert executors.status == BAD
    assert "other jobs hold its slots" in executors.found
    assert all(finding.status == GOOD for finding in by_check(findings, "Python"))
