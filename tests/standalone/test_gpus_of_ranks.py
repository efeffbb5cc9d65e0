"""GPUs that Spark assigns to ranks: by the application's settings, or by a resource profile of a single run.

There are no real GPUs: a discovery script makes them up, and the ranks only report which ones were assigned.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.standalone.cluster import StandaloneCluster
from tests.standalone.submitting import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Two for each worker, with names that no other worker has.
DISCOVERY = """#!/bin/sh
echo "{\\"name\\": \\"gpu\\", \\"addresses\\": [\\"${PPID}0\\", \\"${PPID}1\\"]}"
"""

PROGRAM = """\
import json, sys
from pathlib import Path

from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from sparkdl import HorovodRunner, Runner
from sparkdl.errors import ParamError


def sees():
    import os

    return os.environ["CUDA_VISIBLE_DEVICES"].split(","), os.environ["LOCAL_RANK"]


if __name__ == "__main__":
    builder = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")
    builder = builder.config("spark.executor.resource.gpu.amount", 2).config("spark.task.resource.gpu.amount", 1)
    session = builder.getOrCreate()
    both = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1).resource("gpu", 2)).build
    value = {
        "one each": Runner(num_workers=2, gpus_per_worker=1).run_all(sees),
        "two each": Runner(num_workers=2, gpus_per_worker=2, resources=both).run_all(sees),
        "for horovod": HorovodRunner(np=2).run(sees),
    }
    try:
        Runner(num_workers=2, gpus_per_worker=3, resources=both).run_all(sees)
    except ParamError as error:
        value["refused"] = str(error)
    Path(sys.argv[2]).write_text(json.dumps(value))
    session.stop()
"""


def test_ranks_see_the_gpus_that_spark_assigned_to_them(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    script = tmp_path / "discover.sh"
    script.write_text(DISCOVERY)
    script.chmod(0o755)
    gpus = {"spark.worker.resource.gpu.amount": "2", "spark.worker.resource.gpu.discoveryScript": str(script)}
    with StandaloneCluster(tmp_path / "cluster", settings=gpus) as cluster:
        done = run([sys.executable, "program.py", cluster.url, str(tmp_path / "value.json")], tmp_path)
    assert done.code == 0, done.said
    value = json.loads((tmp_path / "value.json").read_text())
    ones, twos = value["one each"], value["two each"]
    assert [(len(seen), local_rank) for seen, local_rank in ones] == [(1, "0"), (1, "0")]
    assert [(len(seen), local_rank) for seen, local_rank in twos] == [(2, "0"), (2, "0")]
    assert len({*twos[0][0], *twos[1][0]}) == 4
    assert "2 GPUs, and each rank is to have 3" in value["refused"]
    # Both ranks are on this machine, so each also sees the GPUs that were assigned to the other.
    seen, local_rank = value["for horovod"]
    assert len(set(seen)) == 2
    assert local_rank == "0"
