"""Estimators whose ranks divide the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.parallel import Parallelism
from tests.spark.estimators.estimator_examples import make_estimator, make_model

SHARDS = {"shard": 2}


def with_plan() -> nn.Module:
    model = make_model()
    model.tensor_plan = {"0": "colwise", "2": "rowwise"}
    return model


def weights(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.module.state_dict())


@pytest.mark.slow  # tests/training/test_parallelism.py compares shards daily
@pytest.mark.slow_elsewhere
def test_shards_on_two_workers_learn_what_replicas_do(frame, tmp_path):
    replicas = make_estimator(tmp_path, epochs=3).fit(frame)
    model = make_estimator(tmp_path, epochs=3, parallelism=SHARDS, metrics={"right": is_right}).fit(frame)
    torch.testing.assert_close(weights(model), weights(replicas), rtol=1e-4, atol=1e-5)
    assert model.transform(frame).filter("prediction = digit").count() > 120
    assert model.getParallelism() == Parallelism(**SHARDS)


@pytest.mark.any_spark_will_do
def test_pipeline_stages_learn_what_one_worker_does(frame, tmp_path):
    changes = {"epochs": 2, "validationFraction": 0.2, "bestMetric": "val_loss"}
    whole = make_estimator(tmp_path, numWorkers=1, **changes).fit(frame)
    model = make_estimator(
        tmp_path, parallelism={"pipeline": 2}, checkpointDir=str(tmp_path / "run"), **changes
    ).fit(frame)
    torch.testing.assert_close(weights(model), weights(whole), rtol=1e-4, atol=1e-5)
    assert [record.loss for record in model.history] == pytest.approx(
        [record.loss for record in whole.history], rel=1e-4
    )


@pytest.mark.any_spark_will_do
def test_range_test_of_shards_ends_where_the_loss_explodes(frame, tmp_path):
    estimator = make_estimator(
        tmp_path,
        model=make_model(1),
        loss="mse",
        labelCol="target",
        optimizer="sgd",
        learningRate=0.1,
        parallelism=SHARDS,
    )
    found = estimator.find_learning_rate(frame, low=1e-2, high=1e30, num_updates=20)
    assert 1 <= len(found.rates) == len(found.losses) < 20
    assert found.rates[0] == pytest.approx(1e-2)


@pytest.mark.any_spark_will_do
def test_auto_trains_as_the_chosen_layout_does_and_says_which(frame, tmp_path, capfd):
    named = make_estimator(tmp_path, epochs=2, parallelism={"data": 2}).fit(frame)
    estimator = make_estimator(tmp_path, epochs=2, parallelism="auto", showProgress=True)
    assert estimator.getParallelism() == "auto"
    model = estimator.fit(frame)
    assert all(torch.equal(tensor, weights(named)[name]) for name, tensor in weights(model).items())
    assert "the planner chooses Parallelism(data=2): Replicas fit" in capfd.readouterr().err


def is_right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(dim=1) == labels


def with_plan_for_nothing() -> nn.Module:
    model = make_model()
    model.tensor_plan = {"1.*.up": "colwise"}
    return model


NORMALIZED = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
REFUSED: list[tuple[dict[str, Any] | str, dict[str, Any], str]] = [
    ({"shard": 3, "data": 1}, {}, "shard 3 does not equal 2 ranks"),
    ("auto", {"elastic": True}, "parallelism is 'auto', and the fit is elastic"),
    ("automatic", {}, "or 'auto', not 'automatic'"),
    ({"shards": 2}, {}, "has no size 'shards'. Did you mean 'shard'"),
    ({"tensor": 2}, {}, "carries no plan for tensor parallelism"),
    ({"tensor": 2}, {"model": with_plan_for_nothing()}, "names the module '1.*.up'"),
    ({"context": 2}, {}, "neither positions nor position_ids"),
    ({"pipeline": 2, "schedule": "interleaved-1f1b"}, {}, "3 blocks cannot be cut into 4 pipeline stages"),
    ({"pipeline": 2, "schedule": "2f2b"}, {}, "schedule must be 'gpipe' or .*, got '2f2b'"),
    ({"pipeline": 2, "microbatches": 2}, {"batchSize": 7}, "Batches of 7 rows cannot be cut"),
    ({"pipeline": 2}, {"model": NORMALIZED}, "'1' of the model is a BatchNorm"),
    ({"shard": 2, "offload": True}, {}, "parallelism has offload, .* and gpusPerWorker is 0"),
    ({"pipeline": 2}, {"compileModel": True}, "Param compileModel is set"),
    ({"shard": 2}, {"optimizer": torch.optim.Rprop}, "makes Rprop, which needs whole parameters"),
]


@pytest.mark.any_spark_will_do
def test_invalid_parallelism_is_an_error_before_training_starts(frame, tmp_path):
    for parallelism, changes, message in REFUSED:
        with pytest.raises(ParamError, match=message):
            make_estimator(tmp_path, parallelism=parallelism, keepRowsSeconds=3600, **changes).fit(frame)


PROGRAM = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from tests.spark.estimators.estimator_examples import make_estimator
from tests.spark.estimators.test_parallelism import with_plan

kind, folder, rows = sys.argv[1:]
builder = SparkSession.builder.config("spark.ui.enabled", "false")
builder = builder.remote("local[4]") if kind == "connect" else builder.master(kind)
spark = builder.getOrCreate()
model = make_estimator(
    Path(folder), model=with_plan(), epochs=3, numWorkers=4, parallelism={"shard": 2, "tensor": 2}
).fit(spark.read.parquet(rows))
print("digest", round(sum(float(parameter.double().abs().sum()) for parameter in model.module.parameters()), 3))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.any_spark_will_do
@pytest.mark.timeout(500)
def test_hybrid_of_four_workers_gives_equal_weights_on_every_kind_of_spark(tmp_path, frame):
    script = tmp_path / "fit.py"
    script.write_text(PROGRAM)
    rows = tmp_path / "rows"
    frame.write.parquet(str(rows))
    expected = make_estimator(tmp_path, epochs=3).fit(frame.sparkSession.read.parquet(str(rows)))
    digest = round(
        sum(float(parameter.double().abs().sum()) for parameter in expected.module.parameters()), 3
    )
    for kind in ("local[4]", "local-cluster[2,2,1024]", "connect"):
        out = subprocess.run(
            [sys.executable, str(script), kind, str(tmp_path / kind), str(rows)],
            capture_output=True,
            text=True,
            check=True,
            timeout=500,
            cwd=Path(__file__).parents[3],
        ).stdout
        assert f"digest {digest}" in out, kind
