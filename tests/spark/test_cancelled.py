"""Launches that are cancelled by Spark's own means, as a notebook's Cancel and Spark's UI do."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.data import materialize
from sparkdl.errors import LaunchCancelledError
from sparkdl.launch import run_on_ranks
from tests.collective.eventually import eventually
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

    with pytest.raises(LaunchCancelledError, match=r"stage was cancelled in Spark.*(?i:cancel)"):
        run_on_ranks(functions.hang, str(tmp_path), num_ranks=2, spark=spark, on_event=hear)
    assert cancelled.wait(30)
    pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == 4
    assert wait_until_gone(pids, 20) == []
    assert run_on_ranks(functions.sum_of_ranks, num_ranks=2, spark=spark) == [3.0, 3.0]


@pytest.mark.no_cluster_needed
def test_rows_whose_writing_spark_cancels_are_removed(
    spark: SparkSession, cancel: Callable[[], None], hold: Callable[[Any], Any], tmp_path: Path
) -> None:
    def cancel_once_it_runs() -> None:
        if eventually((tmp_path / "running").exists, timeout_s=60):
            cancel()

    canceller = threading.Thread(target=cancel_once_it_runs)
    canceller.start()
    rows = spark.range(0, 10, 1, 1).mapInArrow(hold, "id long")
    try:
        with pytest.raises(
            LaunchCancelledError, match=r"writing rows: the job was cancelled in Spark: .*(?i:cancel)"
        ):
            materialize(rows, ["id"], tmp_path / "store")
    finally:
        canceller.join()
    assert not list((tmp_path / "store").glob("fit-*"))


@pytest.mark.slow  # in a process of its own, as the session of the others has to live
@pytest.mark.any_spark_will_do
@pytest.mark.usefixtures("spark")  # which sets the variables that Spark needs
def test_an_application_that_ends_meanwhile_is_told_as_that_and_not_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys, threading\n"
        "from pyspark.sql import SparkSession\n"
        "from sparkdl import Runner\n"
        "from tests.spark import rank_functions\n"
        "spark = SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "threading.Thread(target=lambda: (input(), spark.sparkContext._jsc.stop())).start()\n"
        "try:\n"
        "    Runner(num_workers=2, max_restarts=3).run(rank_functions.hang_on_rank, sys.argv[1])\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error, flush=True)\n"
    )
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        assert eventually(lambda: len(list(tmp_path.glob("*.pids"))) == 2, timeout_s=60)
        told, _ = driver.communicate("\n", timeout=90)
    assert told.startswith("ClusterLostError Spark's application ended while the ranks ran"), told
    pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
    assert wait_until_gone(pids, 20) == []
