"""Fits on a real cluster whose ranks are killed at random moments: all end, and as an undisturbed one does."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest

from tests.standalone.cluster import StandaloneCluster
from tests.standalone.submitting import started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

NUM_FITS = 50
NUM_ROWS = 403
NUM_EPOCHS = 3

PROGRAM = """\
import json, logging, os, random, signal, sys, threading, time
from pathlib import Path

import torch
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.estimators import TorchEstimator
from tests.processes import wait_until_gone

NUM_FITS, NUM_ROWS, NUM_EPOCHS = map(int, sys.argv[3:6])


class Loss(nn.Module):
    # Says which processes are ranks, from the moment on in which they load what they are to train.
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __setstate__(self, state):
        super().__setstate__(state)
        if self.folder and os.getpid() != int(Path(self.folder, "driver").read_text()):
            Path(self.folder, f"pid-{os.getpid()}").touch()

    def forward(self, outputs, labels):
        if self.folder:
            with open(Path(self.folder, "steps"), "ab") as file:
                file.write(b".")
        time.sleep(0.06)  # a step
        return nn.functional.cross_entropy(outputs, labels)


def fit(frame, folder, **params):
    folder.mkdir(parents=True)
    (folder / "driver").write_text(str(os.getpid()))
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    estimator = TorchEstimator(
        model=model, loss=Loss(str(folder)), optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.02),
        featuresCol=["a", "b"], passFeaturesBy="matrix", labelCol="y", numWorkers=3,
        globalBatchSize=24, epochs=NUM_EPOCHS, seed=3,
        validationFraction=0.2, checkpointDir=str(folder / "checkpoints"),
        checkpointEverySteps=4,
        showProgress=False, tracking="off", **params,
    )
    fitted = estimator.fit(frame)
    weights = {name: value.tolist() for name, value in fitted.module.state_dict().items()}
    pids = [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]
    return {
        "left": wait_until_gone(pids),  # now, as other processes get these numbers later
        "steps": steps_of(folder),
        "rows": [record.rows for record in fitted.history],
        "val_loss": fitted.history[-1].metrics["val_loss"],
        "weights": weights,
    }


def disturb(seed, folder, steps, kills):
    # Kills fall after so many steps of any ranks, and not after a time: on a busy machine fits take longer.
    draw = random.Random(seed)
    for moment in sorted(draw.uniform(0, 0.8 * steps) for _ in range(2)):
        while not kills["over"] and (steps_of(folder) < moment or not kill_one(draw, folder)):
            time.sleep(0.02)
        kills["done"] += not kills["over"]


def steps_of(folder):
    file = folder / "steps"
    return file.stat().st_size if file.exists() else 0


def kill_one(draw, folder):
    pids = sorted(int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*"))
    draw.shuffle(pids)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            return True
        except ProcessLookupError:
            continue
    return False


if __name__ == "__main__":
    logging.basicConfig()
    builder = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")
    session = builder.config("spark.cores.max", "3").getOrCreate()
    rows = [(float(i % 7), float(i % 11), i % 3) for i in range(NUM_ROWS)]
    frame = session.createDataFrame(rows, "a double, b double, y long").coalesce(1).cache()
    folder = Path(sys.argv[2])
    first = fit(frame, folder / "warm", elastic=True)
    results = [fit(frame, folder / "undisturbed", elastic=True)]
    for seed in range(NUM_FITS):
        print("fit", seed, flush=True)
        kills = {"done": 0, "over": False}
        where = folder / str(seed)
        disturber = threading.Thread(target=disturb, args=(seed, where, results[0]["steps"], kills), daemon=True)
        disturber.start()
        result = fit(frame, where, elastic=True)
        kills["over"] = True
        disturber.join()
        results.append({**result, "kills": kills["done"]})
    Path(sys.argv[2], "results.json").write_text(json.dumps(results))
    session.stop()
"""


@pytest.mark.parametrize("kind", ["standalone", "local-cluster"])
def test_fits_that_lose_ranks_at_random_moments_end_as_an_undisturbed_one(kind, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = [str(number) for number in (NUM_FITS, NUM_ROWS, NUM_EPOCHS)]
    with ExitStack() as stack:
        master = "local-cluster[3,1,1024]"
        if kind == "standalone":
            cluster = stack.enter_context(StandaloneCluster(tmp_path / "cluster", num_workers=3))
            master = cluster.url
        process = stack.enter_context(
            started(
                [sys.executable, "program.py", master, str(tmp_path / "fits"), *arguments],
                tmp_path,
                SPARKDL_STORE=str(tmp_path / "store"),
            )
        )
        said, _ = process.communicate(timeout=2700)
    assert process.returncode == 0, said
    undisturbed, *fits = json.loads((tmp_path / "fits" / "results.json").read_text())
    assert len(fits) == NUM_FITS
    for fit in fits:
        assert fit["rows"] == undisturbed["rows"], fit["kills"]
        assert fit["val_loss"] == pytest.approx(undisturbed["val_loss"], abs=1e-5)
        for name, values in fit["weights"].items():
            np.testing.assert_allclose(values, undisturbed["weights"][name], atol=1e-5, err_msg=name)
        assert fit["left"] == []
    assert Counter(fit["kills"] for fit in fits)[2] > NUM_FITS / 2
