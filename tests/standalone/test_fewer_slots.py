"""A machine of the cluster goes away for good, and the Runner makes do with the slots that are left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from tests.standalone.cluster import ROOT, StandaloneCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """\
import json, logging, sys
from pathlib import Path

from pyspark.sql import SparkSession

from sparkdl import Runner


def train(folder):
    import threading
    from pathlib import Path

    import torch.distributed as dist

    from sparkdl.runner import TrainingState

    state = TrainingState(epoch=0, sizes=[])
    began_with = state.epoch
    while state.epoch < 5:
        if (state.epoch, dist.get_world_size()) == (3, 2):
            Path(folder, f"rank-{dist.get_rank()}").touch()
            threading.Event().wait(120)  # until the machine of one of them is gone
        dist.barrier()
        state.sizes = [*state.sizes, dist.get_world_size()]
        state.epoch += 1
        state.commit()
    return {"began_with": began_with, "sizes": state.sizes}


if __name__ == "__main__":
    logging.basicConfig()
    session = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").getOrCreate()
    value = Runner(num_workers=2, min_workers=1, max_restarts=1).run(train, sys.argv[2])
    Path(sys.argv[2], "value.json").write_text(json.dumps(value))
    session.stop()
"""


def test_a_run_whose_machine_was_lost_goes_on_with_fewer_ranks_from_its_last_commit(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with StandaloneCluster(tmp_path / "cluster") as cluster, (tmp_path / "log").open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, "program.py", cluster.url, str(tmp_path)],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
                "SPARKDL_STORE": str(tmp_path / "store"),
            },
        )
        try:
            deadline, pause = time.monotonic() + 240, threading.Event()
            while not all((tmp_path / f"rank-{rank}").exists() for rank in (0, 1)):
                assert program.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                pause.wait(0.1)
            cluster.kill("worker-0")
            status = program.wait(300)
        finally:
            program.kill()
            program.wait()
    said = (tmp_path / "log").read_text()
    assert status == 0, said
    assert json.loads((tmp_path / "value.json").read_text()) == {"began_with": 3, "sizes": [2, 2, 2, 1, 1]}
    assert "The run goes on with 1 of 2 ranks from commit 3 of its state: restart 1 of 1." in said
