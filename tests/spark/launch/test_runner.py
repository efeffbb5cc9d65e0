"""The runners on Spark; tests/runner tests the same on ranks of one machine."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl import HorovodRunner, Runner
from sparkdl.data import Store
from sparkdl.errors import LaunchError, ParamError, SlotsMissingError
from tests.collective.eventually import eventually
from tests.runner import elastic_functions as elastic
from tests.runner import horovod_notebook as notebook
from tests.runner import rank_functions as functions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


@pytest.mark.slow_on("local")
def test_a_function_finds_everything_ready_on_every_rank_of_the_stage(spark: SparkSession) -> None:
    values = Runner(num_workers=2).run_all(functions.see_everything, 1, second=2)
    assert [value["horovod"] for value in values] == [(0, 2), (1, 2)]
    assert [value["sum"] for value in values] == [[2.0, 2.0]] * 2
    assert [value["backend"] for value in values] == ["sparkdl"] * 2


@pytest.mark.slow  # tests/runner/test_runner.py does so daily
def test_a_function_may_initialize_torch_itself_on_the_ranks_of_the_stage(spark: SparkSession) -> None:
    values = Runner(num_workers=2, init_torch=False).run_all(functions.initialize_torch_in_every_way)
    for value in values:
        assert value[1:] == [[name, 2, [3.0, 3.0]] for name in ("sparkdl", "gloo", "undefined")]


@pytest.mark.slow_elsewhere
@pytest.mark.no_cluster_needed
def test_a_script_that_no_executor_has_runs_on_all_ranks(spark: SparkSession, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, torch.distributed as dist\nprint('word', sys.argv[1:], dist.get_rank())\n")
    lines: list[tuple[int, str, int | None]] = []
    runner = Runner(num_workers=2, spark=spark, on_log=lambda *line: lines.append(line))
    assert runner.run(str(script), "a", b=1) is None
    assert sorted(lines) == [(rank, f"word ['a', '--b', '1'] {rank}", None) for rank in (0, 1)]


@pytest.mark.slow_elsewhere
@pytest.mark.no_cluster_needed
def test_a_run_in_a_thread_uses_the_session_of_the_program(spark: SparkSession) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(Runner().run, len, "abc").result() == 3


@pytest.mark.slow_elsewhere
@pytest.mark.no_cluster_needed
def test_horovod_runner_prints_messages_for_the_driver_or_all_output(spark: SparkSession, capfd) -> None:
    HorovodRunner(np=2).run(functions.log_and_print)
    quiet = capfd.readouterr()
    assert quiet.out.startswith("[rank 0] meant for the driver!")
    assert "[rank" not in quiet.err
    HorovodRunner(np=2, driver_log_verbosity="all").run(functions.log_and_print)
    assert "[rank 0] printed\n" in capfd.readouterr().err


@pytest.mark.slow  # tests/runner/test_horovod_runner.py runs it daily
@pytest.mark.no_cluster_needed
def test_the_documented_training_runs_on_tasks_of_the_session(spark: SparkSession, tmp_path) -> None:
    losses = HorovodRunner(np=2).run(notebook.train_hvd, learning_rate=0.1, log_dir=str(tmp_path))
    assert losses[-1] < losses[0] / 2
    assert len(list(tmp_path.glob("checkpoint-*.pth.tar"))) == notebook.NUM_EPOCHS


@pytest.mark.slow  # tests/spark/launch/test_launch.py tests this daily, without a Runner
@pytest.mark.any_spark_will_do
def test_run_waits_for_slots_until_its_start_timeout(
    spark: SparkSession, hold: Callable[[Any], Any], tmp_path
) -> None:
    """One of the two slots is occupied until the run has given up."""
    holder = threading.Thread(target=spark.range(0, 1, 1, 1).mapInArrow(hold, "id long").collect)
    holder.start()
    try:
        assert eventually((tmp_path / "running").exists, timeout_s=60)
        with pytest.raises(SlotsMissingError, match=r"0 of 2 ranks had started after 2 s"):
            Runner(num_workers=2, start_timeout_s=2.0).run(functions.see_everything, 1, second=2)
    finally:
        (tmp_path / "release").touch()
        holder.join(60)


def test_resources_apply_to_each_task_and_need_a_cluster(spark: SparkSession, spark_mode: str) -> None:
    from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests

    one_core = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    two_cores = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
    executors = ResourceProfileBuilder().require(ExecutorResourceRequests().cores(1)).build
    if int(spark.version.split(".")[0]) < 4:
        with pytest.raises(LaunchError, match="needs Spark 4.0 or later"):
            Runner(num_workers=2, resources=one_core).run(functions.see_everything, 1, second=2)
        return
    with pytest.raises(ParamError, match="resources requests executors with cores"):
        Runner(num_workers=2, resources=executors).run(functions.see_everything, 1, second=2)
    if spark_mode != "cluster":
        with pytest.raises(LaunchError, match="Spark has no resource profiles"):
            Runner(num_workers=2, resources=one_core).run(functions.see_everything, 1, second=2)
        return
    assert Runner(num_workers=2, resources=one_core).run(functions.keywords_of_the_launch, a=1) == {"a": 1}
    # The executors of this profile have one core each.
    with pytest.raises(LaunchError, match="2 ranks need 2 slots .* has 0"):
        Runner(num_workers=2, resources=two_cores).run(functions.keywords_of_the_launch, a=1)


@pytest.mark.slow  # tests/runner/test_elastic.py restarts a Runner daily
@pytest.mark.any_spark_will_do
def test_run_that_lost_a_rank_resumes_from_the_last_commit_in_the_store(
    spark: SparkSession, tmp_path, caplog
) -> None:
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        value = Runner(num_workers=2, max_restarts=1).run(elastic.train, str(tmp_path / "killed"))
    assert value["began_with"] == 3
    assert value["losses"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert "2 of 2 ranks from commit 3 " in caplog.text
    assert not list(Store.default().location.filesystem.glob(f"{Store.default().location.path}/commits*"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.about_executors
def test_run_with_a_killed_executor_resumes_from_the_last_commit(
    spark: SparkSession, tmp_path, caplog
) -> None:
    driver = f"spark://CoarseGrainedScheduler@127.0.0.1:{spark.conf.get('spark.driver.port')}"
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        value = Runner(num_workers=2, max_restarts=1).run(elastic.train, str(tmp_path / "killed"), driver)
    assert value["began_with"] == 3
    assert "ranks from commit 3 " in caplog.text
