"""Hanging ranks are detected in time, named, reported with the stacks of all ranks, and ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.errors import HangError, LaunchError, ProcessesLostError, RankError, SlotsMissingError
from sparkdl.launch import ranks, run_on_ranks, slots, supervision, wait_for_slots
from tests.collective.eventually import eventually
from tests.processes import wait_until_gone
from tests.spark.launch import rank_functions as functions
from tests.spark.launch.test_launch import UnreachableChannel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.launch.rank_functions import Launch

HANG_S = 3.0
WAITS: Any = {"hang_timeout_s": 2.0, "silence_timeout_s": 120.0}
"""For hangs detected by waits or missing progress: on a busy machine heartbeats may be late."""


@pytest.mark.any_spark_will_do
def test_rank_that_sleeps_while_others_wait_is_named_with_the_stacks_of_all(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR, "sparkdl.launch"),
        pytest.raises(HangError, match="rank 0 has waited .* 'gradients' .* for rank 1") as caught,
    ):
        launch(functions.sleep_on, 1, str(tmp_path), **WAITS)
    assert caught.value.rank == 1
    assert caught.value.host
    assert "in sleep_on" in caught.value.traceback_text
    (logged,) = [record.getMessage() for record in caplog.records]
    assert logged == caught.value.report
    waiting, sleeping = logged.split("\nRank 1 on ")
    assert "waiting in allreduce 'gradients' of 4 float64 on 'world/all' for " in waiting
    assert "in no operation that waits for other ranks" in sleeping
    for part in (waiting, sleeping):
        assert "in sleep_on" in part
    assert len(functions.pids_in(tmp_path)) == 2
    assert wait_until_gone(functions.pids_in(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_hang_is_found_also_where_executors_cannot_reach_the_driver(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "DriverChannel", UnreachableChannel)
    with pytest.raises(HangError, match="rank 0 has waited .* 'gradients'") as caught:
        launch(functions.sleep_on, 1, str(tmp_path), **WAITS)
    assert caught.value.rank == 1
    assert "in sleep_on" in caught.value.traceback_text
    assert "waiting in allreduce 'gradients'" in caught.value.report
    assert wait_until_gone(functions.pids_in(tmp_path)) == []


@pytest.mark.any_spark_will_do
def test_python_worker_that_is_stopped_is_named_and_ended(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "END_TIMEOUT_S", 0.5)
    with pytest.raises(HangError, match="no message from the task of rank 1") as caught:
        launch(functions.stop_own_worker_on, 1, str(tmp_path), hang_timeout_s=HANG_S)
    assert caught.value.rank == 1
    workers = [int((tmp_path / "worker").read_text())]
    assert wait_until_gone(functions.pids_in(tmp_path) + workers) == []


@pytest.mark.any_spark_will_do
def test_failure_is_raised_and_the_stage_ended_even_if_the_task_of_another_rank_hangs(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "END_AFTER_FAILURE_TIMEOUT_S", 0.5)
    with pytest.raises(RankError, match="Rank 0 on .* failed .*rank 0 failed") as caught:
        launch(functions.fail_while_the_worker_of_another_is_stopped, str(tmp_path))
    assert not isinstance(caught.value, ProcessesLostError)
    workers = [int((tmp_path / "worker").read_text())]
    assert wait_until_gone(functions.pids_in(tmp_path) + workers) == []


@pytest.mark.slow  # tests/unit/launch/hangs/test_watch.py has the claim daily
@pytest.mark.any_spark_will_do
def test_function_that_stops_reporting_progress_hangs(spark: SparkSession) -> None:
    with pytest.raises(HangError, match="rank 0 has reported no progress for") as caught:
        run_on_ranks(functions.tell_and_sleep, num_ranks=1, spark=spark, **WAITS)
    assert "in tell_and_sleep" in caught.value.traceback_text


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_ranks_that_have_returned_may_wait_longer_than_the_hang_timeout(launch: Launch) -> None:
    assert launch(functions.linger_on, 1, 4.0, **WAITS) == [0, 1]


@pytest.mark.slow
@pytest.mark.any_spark_will_do
@pytest.mark.usefixtures("spark")  # sets the variables that Spark needs
def test_nothing_is_left_running_when_the_driver_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys\n"
        "from pyspark.sql import SparkSession\n"
        "from sparkdl.launch import run_on_ranks\n"
        "from tests.spark.launch import rank_functions\n"
        "spark = SparkSession.builder.master(sys.argv[1]).config('spark.ui.enabled', 'false').getOrCreate()\n"
        "run_on_ranks(rank_functions.hang, sys.argv[2], num_ranks=2, spark=spark,\n"
        "             on_event=lambda rank, event: print(event, flush=True))\n"
    )
    for master in ("local[2]", "local-cluster[2,1,1024]"):
        folder = tmp_path / master
        folder.mkdir()
        command = [sys.executable, str(script), master, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver:
            assert driver.stdout is not None
            assert driver.stdout.readline()
            assert driver.stdout.readline(), "both ranks run"
            driver.kill()
        pids = functions.pids_in(folder)
        assert len(pids) == 4
        assert wait_until_gone(pids) == []


def executor_pid(driver_port: str, executor: str) -> int:
    """Process id of the Java process of an executor of this driver."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")
            is_of_driver = any(word.endswith(f":{driver_port}") for word in words)
            if (
                words[0].endswith("java")
                and is_of_driver
                and ["--executor-id", executor] in map(list, pairwise(words))
            ):
                return int(folder.name)
    raise AssertionError(f"executor {executor} is not there")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.about_executors
def test_decommissioned_executor_keeps_its_rank_until_it_exits_and_is_then_a_loss(
    spark: SparkSession, tmp_path: Path, launch: Launch
) -> None:
    context: Any = spark.sparkContext
    scheduler, jvm = context._jsc.sc().schedulerBackend(), context._jvm
    executor = sorted(context._jsc.sc().getExecutorIds().mkString(",").split(","))[0]
    started: list[int] = []
    alive_after: list[int] = []

    def take_it_away(rank: int, event: dict[str, Any]) -> None:
        started.append(rank)
        if len(started) != 2:
            return
        info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo(
            "spot instance", jvm.scala.Option.empty()
        )
        assert scheduler.decommissionExecutor(executor, info, False, False)
        pids = functions.pids_in(tmp_path)
        threading.Event().wait(3.0)
        alive_after.extend(pid for pid in pids if Path(f"/proc/{pid}").exists())
        os.kill(executor_pid(spark.conf.get("spark.driver.port"), executor), signal.SIGKILL)

    with pytest.raises(ProcessesLostError, match="lost"):
        launch(functions.hang, str(tmp_path), on_event=take_it_away)
    assert len(alive_after) == 4, "its rank works on, with that of the other executor"
    assert sorted(started) == [0, 1], "nothing runs twice"
    assert wait_until_gone(functions.pids_in(tmp_path)) == []
    assert wait_for_slots(spark, 2, timeout_s=60) == 2
    assert launch(functions.sum_of_ranks) == [3.0, 3.0]


@pytest.mark.timeout(900)
@pytest.mark.about_executors
def test_a_launch_after_a_lost_executor_waits_for_its_replacement(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "EXECUTOR_PATIENCE_S", 0.0)  # this cluster may be younger than that
    assert wait_for_slots(spark, 2, timeout_s=180) == 2
    context: Any = spark.sparkContext
    executor = sorted(context._jsc.sc().getExecutorIds().mkString(",").split(","))[0]
    os.kill(executor_pid(spark.conf.get("spark.driver.port"), executor), signal.SIGKILL)
    assert eventually(lambda: wait_for_slots(spark, 2, timeout_s=0) == 1, timeout_s=180)
    waits: list[str] = []
    with pytest.raises(LaunchError, match="3 ranks need 3 slots"):
        # More than the cluster will ever have: the launch does not wait for them.
        run_on_ranks(functions.sum_of_ranks, num_ranks=3, spark=spark, on_wait=waits.append)
    assert not waits
    with pytest.raises(SlotsMissingError, match=r"has 1\. Spark has 1 of 2 executors: .* to 1, "):
        run_on_ranks(functions.sum_of_ranks, num_ranks=2, spark=spark, start_timeout_s=0.01)
    values = run_on_ranks(
        functions.sum_of_ranks, num_ranks=2, spark=spark, start_timeout_s=300, on_wait=waits.append
    )
    assert values == [3.0, 3.0]
    assert waits[0].startswith("Waiting for 1 of 2 slots: ")
    assert waits[0] in caplog.text
