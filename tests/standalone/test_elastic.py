"""An elastic run takes in machines that are added to a cluster, also by dynamic allocation, and loses some again."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.processes import wait_until_gone
from tests.standalone.cluster import StandaloneCluster
from tests.standalone.submitting import started, wait_for_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """\
import json, logging, os, sys, threading, time
from pathlib import Path

from pyspark.sql import SparkSession

from sparkdl import Runner


def train(folder):
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from sparkdl.runner import TrainingState

    state = TrainingState(epoch=0, sizes=[])
    while True:
        size = dist.get_world_size()
        stop = torch.tensor(float(Path(folder, "stop").exists()))
        dist.all_reduce(stop)
        if stop:
            break
        Path(folder, f"pid-{os.getpid()}").touch()
        Path(folder, f"size-{size}").touch()
        time.sleep(0.05)  # a step
        state.sizes = [*state.sizes, size]
        state.epoch += 1
        state.commit()
        if dist.get_rank() == 0:
            Path(folder, "epoch").write_text(f"{state.epoch} {size} {time.time()}")
    return {"epoch": state.epoch, "sizes": state.sizes}


def decommission_when_asked(session, folder):
    while not Path(folder, "decommission").exists():
        time.sleep(0.05)
    context, jvm = session.sparkContext._jsc.sc(), session.sparkContext._jvm
    executor = context.getExecutorIds().apply(0)
    info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("its machine goes", jvm.scala.Option.empty())
    context.schedulerBackend().decommissionExecutor(executor, info, False, False)


if __name__ == "__main__":
    logging.basicConfig()
    builder = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")
    for setting in sys.argv[3:]:
        builder = builder.config(*setting.split("=", 1))
    session = builder.getOrCreate()
    threading.Thread(target=decommission_when_asked, args=(session, sys.argv[2]), daemon=True).start()
    value = Runner(num_workers=1, max_workers=3, elastic=True).run(train, sys.argv[2])
    Path(sys.argv[2], "value.json").write_text(json.dumps(value))
    session.stop()
"""

DYNAMIC = (
    "spark.dynamicAllocation.enabled=true",
    "spark.dynamicAllocation.shuffleTracking.enabled=true",
    "spark.dynamicAllocation.minExecutors=1",
    "spark.dynamicAllocation.schedulerBacklogTimeout=1s",
)


@pytest.mark.parametrize("settings", [(), DYNAMIC], ids=["fixed allocation", "dynamic allocation"])
def test_a_run_grows_with_its_cluster_and_loses_a_machine(tmp_path, settings):
    (tmp_path / "program.py").write_text(PROGRAM)
    with (
        StandaloneCluster(tmp_path / "cluster", num_workers=1) as cluster,
        started(
            [sys.executable, "program.py", cluster.url, str(tmp_path), *settings],
            tmp_path,
            SPARKDL_STORE=str(tmp_path / "store"),
        ) as process,
    ):
        wait_for_files(process, tmp_path / "size-1")
        cluster.add_worker()
        wait_for_files(process, tmp_path / "size-2")
        cluster.add_worker()
        wait_for_files(process, tmp_path / "size-3")
        killed_at = time.time()
        cluster.kill("worker-2")
        wait_for_size(tmp_path, 2, killed_at)
        (tmp_path / "stop").touch()
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    value = json.loads((tmp_path / "value.json").read_text())
    assert value["epoch"] == len(value["sizes"])  # each epoch counts once
    assert sorted(set(value["sizes"])) == [1, 2, 3]
    assert value["sizes"][-1] == 2
    assert wait_until_gone(pids(tmp_path)) == []


def test_a_rank_leaves_an_executor_that_is_decommissioned_without_a_lost_step(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with (
        StandaloneCluster(tmp_path / "cluster", num_workers=2) as cluster,
        started(
            [sys.executable, "program.py", cluster.url, str(tmp_path), "spark.decommission.enabled=true"],
            tmp_path,
            SPARKDL_STORE=str(tmp_path / "store"),
        ) as process,
    ):
        wait_for_files(process, tmp_path / "size-2")
        asked_at = time.time()
        (tmp_path / "decommission").touch()
        wait_for_size(tmp_path, 1, asked_at)
        (tmp_path / "stop").touch()
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    # Spark chooses which of the two members runs on the first executor.
    assert re.search(r"The run continues with 1 rank, without member [01], as asked\.", said), said
    assert "was lost" not in said
    value = json.loads((tmp_path / "value.json").read_text())
    assert value["epoch"] == len(value["sizes"])


def test_a_killed_driver_leaves_no_rank(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with (
        StandaloneCluster(tmp_path / "cluster", num_workers=2) as cluster,
        started(
            [sys.executable, "program.py", cluster.url, str(tmp_path)],
            tmp_path,
            SPARKDL_STORE=str(tmp_path / "store"),
        ) as process,
    ):
        wait_for_files(process, tmp_path / "size-2")
        os.kill(process.pid, 9)
        assert wait_until_gone(pids(tmp_path)) == []


def pids(folder: Path) -> list[int]:
    return [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]


def wait_for_size(folder: Path, size: int, after: float) -> None:
    """Wait until ranks of this number have finished a step after a time."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        words = (folder / "epoch").read_text().split()
        if len(words) == 3 and int(words[1]) == size and float(words[2]) > after:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{size} ranks have not finished a step")
