"""Every Python example of the documentation runs: here those that need a Spark session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import Imputer
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F
from torch import nn

import sparkdl
import sparkdl.horovod.torch as hvd
from sparkdl import Runner
from sparkdl.estimators import TorchEstimator
from sparkdl.parallel import Parallelism
from sparkdl.runner import TrainingState
from tests.docs.snippets import run_examples
from tests.unit.networks.pretrained_folders import write_folder

pytestmark = pytest.mark.any_spark_will_do

QUICK = ("checkpoints.md", "databricks.md", "onnx.md", "slow_links.md", "stores.md", "trained_elsewhere.md")
LONG = (
    "doctor.md",
    "elastic.md",
    "horovod.md",
    "index.md",
    "inputs.md",
    "metrics.md",
    "missing_values.md",
    "monitoring.md",
    "optuna.md",
    "peft.md",
    "petastorm.md",
    "profiling.md",
    "ready_made.md",
    "runner.md",
    "tracking.md",
    "tuning.md",
    "watching_a_fit.md",
)
PAGES_ON_SPARK = (*QUICK, *LONG)

BEGIN_WITH_A_SCRIPT = {"horovod.md", "runner.md"}
"""Pages whose first example is a script, which ``tests/docs`` runs."""

END_WITH_A_SCRIPT = {"tuning.md"}
"""Pages whose last example is a script, which ``tests/clients`` runs."""

WITH_NAMES_OF_THEIR_OWN = {"elastic.md", "runner.md"}
"""Pages whose examples use the same names for different things."""

# The session has two slots, and the machine no GPU.
CHANGES = {
    "num_workers=4": "num_workers=2",
    "numWorkers=4, minWorkers": "numWorkers=2, minWorkers",
    "num_workers=8": "num_workers=2",
    "numWorkers=8": "numWorkers=2",
    "gpus_per_worker=1": "gpus_per_worker=0",
    ".build).run(train)": ".build)",
    "port=9400": "port=0",
    "n_trials=20": "n_trials=2",
    "max_evals=20": "max_evals=3",
    "epochs=50": "epochs=5",
}


def make_model() -> nn.Module:
    return nn.Linear(4, 1)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def train_one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model, torch.ones(2, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(*_: Any, learning_rate: float = 0.1) -> float:
    return learning_rate


def names_of(spark: Any) -> dict[str, Any]:
    """What the examples of a page suppose to be there."""
    rows = [([float(n % 7), 1.0, 0.5, n / 100], float(n % 7), [n, n + 1], "text") for n in range(100)]
    df = spark.createDataFrame(rows, "features array<double>, label double, tokens array<int>, text string")
    model = make_model()
    settings = {
        "model": model,
        "optimizer": "sgd",
        "learningRate": 1e-3,
        "loss": "mse",
        "epochs": 1,
        "showProgress": False,
    }
    estimator = TorchEstimator(**settings)
    grid = ParamGridBuilder().addGrid(estimator.learningRate, [1e-3, 1e-4]).build()
    return {
        **{kind.__name__: kind for kind in (TorchEstimator, Runner, TrainingState, Parallelism, Pipeline)},
        **{function.__name__: function for function in (make_model, loss_of, train_one_epoch, train)},
        "CrossValidator": CrossValidator,
        "assembler": Imputer(inputCols=["label"], outputCols=["filled"]),
        "batches": [torch.ones(2, 4)] * 3,
        "df": df,
        "estimator": estimator,
        "evaluator": RegressionEvaluator(metricName="rmse"),
        "grid": grid,
        "hvd": hvd,
        "maps": grid,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "rows": df.select("features").toPandas(),
        "rows_with_labels": df.select("features", "label").toPandas(),
        "settings": settings,
        "spark": spark,
        "tensor_group": hvd.global_process_set,
        "torch": torch,
        "train_hvd": train,
    }


def write_trained(folder: Path) -> dict[str, str]:
    """Write what the page about trained models takes, and return the changes of its names; Spark has its own folder."""
    (folder / "flowers").mkdir()
    for number in range(3):
        Image.new("RGB", (300, 200 + number), (80 * number, 90, 20)).save(
            folder / "flowers" / f"{number}.jpg"
        )
    torch.save(timm.create_model("resnet18", num_classes=3).state_dict(), folder / "best.pt")
    write_folder(folder / "bert", kind="bert")
    names = {
        "flowers": "flowers",
        "scored": "scored",
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english": "bert",
    }
    return {f'"{name}"': repr(str(folder / place)) for name, place in names.items()}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_examples_of_a_page_run(
    spark: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracked: Any
) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    registry = mlflow.get_registry_uri()
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)\n")
    (tmp_path / "my_models.py").write_text("")
    images = {
        "image": np.zeros((8, 3072), np.uint8).tolist(),
        "name": list("abcdefgh"),
        "label": list(range(8)),
    }
    (tmp_path / "data" / "images").mkdir(parents=True)
    pq.write_table(pa.table(images), tmp_path / "data" / "images" / "part-0.parquet")
    try:
        names = names_of(spark)
        changes = dict(CHANGES)
        if name in ("inputs.md", "peft.md"):
            write_folder(tmp_path / "data" / "bert", kind="bert")
        if name == "ready_made.md":
            names["df"] = names["df"].withColumn("text", F.expr("repeat('once upon a time ', 40)"))
        if name == "trained_elsewhere.md":
            changes |= write_trained(tmp_path)
        if name == "tracking.md":
            names["settings"] |= {"model": nn.Linear(4, 7), "loss": "cross_entropy"}
            names["df"] = names["df"].selectExpr("*", "label AS age", "label AS income")
        namespace = run_examples(
            name,
            tmp_path,
            names,
            changes,
            begin=int(name in BEGIN_WITH_A_SCRIPT),
            end=-1 if name in END_WITH_A_SCRIPT else None,
            is_afresh=name in WITH_NAMES_OF_THEIR_OWN,
        )
        if name == "trained_elsewhere.md":
            scored = spark.read.parquet(str(tmp_path / "scored")).collect()
            assert {row["prediction"] for row in scored} <= {"daisy", "rose", "tulip"}
            assert [len(row["probability"]) for row in scored] == [3, 3, 3]
        if name == "optuna.md":
            states = [trial.state.name for trial in namespace["study"].trials]
            assert states[:2] == ["COMPLETE", "PRUNED"]
            assert len(states) == 4
            assert {*states} == {"COMPLETE", "PRUNED"}
        if name == "tuning.md":
            assert {"fail", "ok"} == set(namespace["trials"].statuses())
    finally:
        hvd.shutdown()
        mlflow.set_registry_uri(registry)
        sparkdl.autolog()  # tracking.md has fits log every tenth epoch
