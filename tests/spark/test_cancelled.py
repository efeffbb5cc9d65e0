"""Launches that are cancelled by Spark's own means, as a notebook's Cancel and Spark's UI do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.errors import LaunchCancelledError
from sparkdl.launch import run_on_ranks
from tests.processes import wait_until_gone
from tests.spark import rank_functions as functions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


@pytest.fixture
def cancel(spark: SparkSession, spark_mode: str) -> Any:
    """Cancels what the test's own thread runs, from another thread."""
    if spark_mode == "connect":
        spark.addTag("of-this-test")
        yield lambda: spark.interruptTag("of-this-test")
        spark.removeTag("of-this-test")
        return
    context = spark.sparkContext
    context.setJobGroup("of this test", "to be cancelled", interruptOnCancel=True)
    yield lambda: context.cancelJobGroup("of this test")
    for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
        context.setLocalProperty(name, None)


@pytest.mark.no_cluster_needed
def test_ranks_of_a_launch_that_spark_cancels_end_and_the_next_launch_runs(
    spark: SparkSession, cancel: Callable[[], None], tmp_path: Path
) -> None:
    hanging: set[int] = set()
    cancelled = threading.Event()

    def hear(rank: int, event: dict[str, Any]) -> None:
        hanging.add(event["hanging"])
        if len(hanging) == 2:
            threading.Thread(target=lambda: (cancel(), cancelled.set())).start()

    with pytest.raises(LaunchCancelledError, match=r"Spark was told to cancel .*(?i:cancel)"):
        run_on_ranks(functions.hang, str(tmp_path), num_ranks=2, spark=spark, on_event=hear)
    assert cancelled.wait(30)
    pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == 4
    assert wait_until_gone(pids, 20) == []
    assert run_on_ranks(functions.sum_of_ranks, num_ranks=2, spark=spark) == [3.0, 3.0]
