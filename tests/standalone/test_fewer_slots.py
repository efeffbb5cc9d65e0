"""A machine of the cluster is lost for good; Runner and TorchEstimator continue with the remaining slots."""

from __future__ import annotations

import json
import sys

import pytest

from tests.standalone.cluster import StandaloneCluster
from tests.standalone.submitting import started, wait_for_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN = """\
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


FIT = """\
import json, logging, sys
from pathlib import Path

import numpy as np
import torch
from pyspark.sql import SparkSession

from sparkdl.estimators import Callback, TorchEstimator


class WaitOnce(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_epoch_start(self, context):
        import threading
        from pathlib import Path

        if (context.epoch, context.world_size) == (3, 2):
            Path(self.folder, f"rank-{context.rank}").touch()
            threading.Event().wait(120)  # until the machine of one of them is gone


def fit(session, folder, **params):
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(96, 3)).astype("float32")
    rows = [(row.tolist(), float(row.sum())) for row in rows]
    frame = session.createDataFrame(rows, "x array<float>, y float")
    torch.manual_seed(0)
    model = TorchEstimator(
        model=torch.nn.Linear(3, 1),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        loss=torch.nn.MSELoss(),
        featuresCol="x",
        labelCol="y",
        batchSize=8,
        epochs=5,
        numWorkers=2,
        seed=7,
        tracking="off",
        **params,
    ).fit(frame)
    weights = torch.cat([value.reshape(-1) for value in model.module.state_dict().values()])
    return {"weights": weights.tolist(), "epochs": len(model.history)}


if __name__ == "__main__":
    logging.basicConfig()
    session = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").getOrCreate()
    folder = sys.argv[2]
    whole = fit(session, folder)
    broken = fit(
        session,
        folder,
        callbacks=[WaitOnce(folder)],
        checkpointDir=f"{folder}/checkpoints",
        maxRestarts=1,
        minWorkers=1,
    )
    Path(folder, "value.json").write_text(json.dumps({"whole": whole, "broken": broken}))
    session.stop()
"""


def run_and_lose_a_machine(program, folder):
    """Run a program on a cluster of two machines; kill one as soon as both ranks are ready."""
    (folder / "program.py").write_text(program)
    with (
        StandaloneCluster(folder / "cluster") as cluster,
        started(
            [sys.executable, "program.py", cluster.url, str(folder)],
            folder,
            SPARKDL_STORE=str(folder / "store"),
        ) as process,
    ):
        wait_for_files(process, folder / "rank-0", folder / "rank-1")
        cluster.kill("worker-0")
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return json.loads((folder / "value.json").read_text()), said


def test_run_continues_with_fewer_ranks_from_its_last_commit_after_a_lost_machine(tmp_path):
    value, said = run_and_lose_a_machine(RUN, tmp_path)
    assert value == {"began_with": 3, "sizes": [2, 2, 2, 1, 1]}
    assert "The run continues with 1 of 2 ranks from commit 3 " in said


def test_fit_continues_with_fewer_ranks_to_the_same_weights_after_a_lost_machine(tmp_path):
    value, said = run_and_lose_a_machine(FIT, tmp_path)
    whole, broken = value["whole"], value["broken"]
    assert broken["epochs"] == whole["epochs"] == 5
    assert broken["weights"] == pytest.approx(whole["weights"], abs=1e-5)
    assert "continues with 1 of 2 ranks" in said
