"""The MLflow run of a fit, on a real SQLite store."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator
from torch import nn
from torch.optim.lr_scheduler import StepLR

import sparkdl.mlflow
from sparkdl.data.spark.input_files import table_of
from sparkdl.errors import RankError, TrainingError
from tests.spark.estimators.estimator_examples import (
    LossThatKillsRankOneOnce,
    LossThatSpoils,
    make_estimator,
    make_model,
    store_is_empty,
)


@pytest.mark.slow_elsewhere
def test_a_fit_is_tracked_in_sqlite_and_its_model_served_from_there(frame, tracked):
    estimator = make_estimator(
        tracked,
        tracking="auto",
        runName="first",
        epochs=3,
        registeredModelName="digits",
        registeredModelAlias="newest",
    )
    model = estimator.setScheduler(lambda optimizer, steps: StepLR(optimizer, 1, 0.5)).fit(frame)
    assert (tracked / "mlflow.db").is_file()
    run = mlflow.get_run(model.summary.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params["epochs"] == "3"
    assert run.data.params["loss"] == "CrossEntropyLoss"
    assert run.data.tags["mlflow.note.content"].startswith(
        "**TorchEstimator** of sparkdl trains `Sequential` with "
    )
    assert not [name for name in run.data.tags if name.startswith("sparkdl.run")]
    logged = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in logged] == [
        (record.epoch, record.loss) for record in model.history
    ]
    rates = mlflow.MlflowClient().get_metric_history(run.info.run_id, "learning_rate")
    assert [metric.value for metric in rates] == [0.5, 0.25, 0.125]
    assert mlflow.active_run() is None

    names = {name.rpartition("/")[2] for name in run.data.metrics if name.startswith("system/")}
    assert {"cpu_utilization_percentage", "system_memory_usage_megabytes"} <= names
    assert socket.gethostname() in {name.split("/")[1] for name in run.data.metrics if "system/" in name}
    assert {"step_loss", "system/communication/world/allreduce/count"} <= set(run.data.metrics)
    (trained_on,) = run.inputs.dataset_inputs
    assert json.loads(trained_on.dataset.profile)["num_rows"] == frame.count()
    assert len(trained_on.dataset.digest) == 24
    assert (trained_on.dataset.name, trained_on.dataset.source_type) == ("DataFrame", "code")
    assert {tag.key: tag.value for tag in trained_on.tags} == {"mlflow.data.context": "training"}
    client = mlflow.MlflowClient()
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id, "reports")} == {
        f"reports/{name}" for name in ("communication.json", "communication.txt", "history.json")
    }
    picture = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="plots/fit.png")
    assert Path(picture).read_bytes().startswith(b"\x89PNG")

    registered = sparkdl.mlflow.load_module("models:/digits@newest")
    assert torch.equal(registered[0].weight, model.module[0].weight)
    served = mlflow.pyfunc.load_model(model.summary.model_uri)
    folder = mlflow.artifacts.download_artifacts(model.summary.model_uri)
    example = served.metadata.load_input_example(folder)
    assert list(example.columns) == ["image"]
    assert len(served.predict(example)) == 1
    rows = frame.toPandas()
    expected = [row["prediction"] for row in model.transform(frame).collect()]
    assert served.predict(rows[["image"]])["prediction"].tolist() == expected
    loaded = sparkdl.mlflow.load_model(model.summary.model_uri)
    assert loaded.summary == model.summary
    assert [row["prediction"] for row in loaded.transform(frame).collect()] == expected
    assert torch.equal(sparkdl.mlflow.load_module(model.summary.model_uri)[0].weight, model.module[0].weight)
    requirements = mlflow.pyfunc.get_model_dependencies(model.summary.model_uri)
    with open(requirements, encoding="utf-8") as file:
        names = {line.split("==")[0].strip() for line in file}
    assert names == {"cloudpickle", "mlflow", "numpy", "pandas", "safetensors", "torch"}


@pytest.mark.slow_elsewhere
def test_trials_in_a_run_are_all_nested_under_the_name_of_their_table(spark, frame, tracked):
    frame.createOrReplaceTempView("digits_of_trials")
    estimator = make_estimator(tracked, tracking="on", epochs=1, onEpoch=lambda record: None)
    with mlflow.start_run() as search:
        fitted = estimator.fit(spark.table("digits_of_trials").where("digit >= 0"))
    run = mlflow.get_run(fitted.summary.run_id)
    assert run.data.tags["mlflow.parentRunId"] == search.info.run_id
    (trained_on,) = run.inputs.dataset_inputs
    assert trained_on.dataset.name == "digits_of_trials"
    assert json.loads(trained_on.dataset.source) == {"table_name": "digits_of_trials"}
    frame.write.parquet(str(tracked / "digits.parquet"))
    fitted = make_estimator(tracked, tracking="on", epochs=1, numWorkers=1).fit(
        spark.read.parquet(str(tracked / "digits.parquet"))
    )
    (trained_on,) = mlflow.get_run(fitted.summary.run_id).inputs.dataset_inputs
    assert (trained_on.dataset.name, trained_on.dataset.source_type) == ("digits.parquet", "spark")
    source = json.loads(trained_on.dataset.source)
    files = [path for path in (tracked / "digits.parquet").iterdir() if path.name.startswith("part-")]
    assert Path(source["path"].removeprefix("file://")) == tracked / "digits.parquet"
    assert (source["num_files"], source["is_delta"]) == (len(files), False)
    assert table_of(frame) is None
    joined = spark.table("digits_of_trials").join(spark.range(3), "id", "left_anti")
    assert table_of(joined) is None


def _files_in(folder):
    return {path.relative_to(folder) for path in Path(folder).rglob("*.pt")}


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_run_of_a_resumed_or_restarted_or_finished_fit_has_every_epoch_once(frame, tracked):
    """Also of a fit that restarts automatically, and each epoch once."""
    killed = tracked / "killed"
    killed.touch()
    estimator = make_estimator(
        tracked,
        tracking="on",
        checkpointDir=str(tracked / "checkpoints"),
        logCheckpoints=True,
        validationFraction=0.2,
        maxRestarts=1,
        loss=LossThatKillsRankOneOnce(tracked, call=3),
        epochs=1,
    )
    estimator.fit(frame)
    killed.unlink()
    (first,) = mlflow.search_runs(output_format="list")
    runs = [first.info.run_id]
    for _ in range(2):
        model = estimator.setEpochs(2).fit(frame)
        continued = mlflow.get_run(model.summary.run_id).data.tags["sparkdl.continues_run"]
        assert continued == runs[-1]
        assert model.summary.run_id not in runs, "a finished run stays as it is"
        runs.append(model.summary.run_id)
        for name, values in (
            ("loss", [record.loss for record in model.history]),
            ("val_loss", [record.metrics["val_loss"] for record in model.history]),
            ("system/epoch/validation_s", [record.validation_s for record in model.history]),
        ):
            logged = mlflow.MlflowClient().get_metric_history(model.summary.run_id, name)
            assert [(metric.step, metric.value) for metric in logged] == list(enumerate(values, start=1))
        copied = mlflow.artifacts.download_artifacts(
            run_id=model.summary.run_id, artifact_path="checkpoints", dst_path=str(tracked / "copied")
        )
        left = _files_in(tracked / "checkpoints")
        assert left
        assert _files_in(copied) >= left
        assert killed.exists()


@pytest.mark.any_spark_will_do
@pytest.mark.skipif(
    mlflow.__version__ < "2.19", reason="MLflow takes pytest's handlers from the log when it makes a database"
)
@pytest.mark.slow  # tests/unit/tracking/test_run.py keeps and sends such a run daily
def test_a_store_that_goes_away_does_not_lose_the_model(frame, tracked, caplog):
    loss = LossThatSpoils(tracked, "mlflow.db")
    model = make_estimator(tracked, tracking="on", epochs=3, loss=loss).fit(frame)
    assert model.summary.model_uri is None
    assert len(model.history) == 3
    assert "Not everything of this fit could be logged" in caplog.text
    assert [path.name for path in (tracked / "store").iterdir()] == ["unsent-runs"]

    later = f"sqlite:///{tracked}/later.db"
    (sent,) = sparkdl.mlflow.send_kept(tracked / "store", tracking_uri=later)
    assert store_is_empty(tracked)
    mlflow.set_tracking_uri(later)
    run = mlflow.get_run(sent.run_id)
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", model.history[-1].loss)
    rows = frame.toPandas()
    expected = [row["prediction"] for row in model.transform(frame).collect()]
    served = mlflow.pyfunc.load_model(sent.model_uri)
    np.testing.assert_array_equal(np.stack(served.predict(rows[["image"]])["prediction"]), expected)


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_search_has_a_run_per_fold_and_param_map_under_the_active_run(frame, tracked):
    estimator = make_estimator(tracked, tracking="on", epochs=1, numWorkers=1, registeredModelName="found")
    maps = [{estimator.batchSize: 16}, {estimator.batchSize: 64}]
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=maps,
        evaluator=MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy"),
        numFolds=2,
        parallelism=2,
    )
    with mlflow.start_run() as outer:
        found = search.fit(frame)
    assert found.bestModel.summary.run_id == outer.info.run_id, "the last fit is that of the best map"
    children = children_of(outer.info.run_id)
    assert {run.info.status for run in children} == {"FINISHED"}
    places = [(run.data.tags["sparkdl.param_map"], run.data.params["batchSize"]) for run in children]
    assert sorted(places) == [("0", "16"), ("0", "16"), ("1", "64"), ("1", "64")]
    digests = {run.inputs.dataset_inputs[0].dataset.digest for run in children}
    assert len(digests) == 2, "one for each fold"

    estimator.fit(frame, maps)
    (parent,) = [
        run
        for run in mlflow.search_runs(output_format="list")
        if run.info.run_name == "TorchEstimator, 2 Param maps"
    ]
    assert parent.info.status == "FINISHED"
    assert sorted(run.data.tags["sparkdl.param_map"] for run in children_of(parent.info.run_id)) == ["0", "1"]

    with mlflow.start_run() as outer:
        estimator.fit(frame, maps[:1])
    (nested,) = children_of(outer.info.run_id)
    assert nested.data.tags["sparkdl.param_map"] == "0"


def children_of(run_id):
    return mlflow.search_runs(filter_string=f"tags.mlflow.parentRunId = '{run_id}'", output_format="list")


@pytest.mark.any_spark_will_do
def test_a_loss_that_is_no_longer_finite_is_named_and_ends_the_run_as_failed(frame, tracked):
    estimator = make_estimator(
        tracked,
        tracking="on",
        model=make_model(1),
        loss=nn.MSELoss(),
        labelCol="target",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e25),
    )
    with pytest.raises(RankError, match=r"The loss became (inf|nan) in epoch 1, step [23]") as caught:
        estimator.fit(frame)
    assert isinstance(caught.value.__cause__, TrainingError)
    assert store_is_empty(tracked)
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FAILED"
    assert mlflow.active_run() is None
