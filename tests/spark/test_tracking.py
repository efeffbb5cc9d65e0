"""The MLflow run of a fit, on a real SQLite store."""

from __future__ import annotations

import mlflow
import pytest
import torch
from torch import nn

from sparkdl.errors import RankError
from tests.spark.estimator_examples import make_estimator, make_frame, make_model


@pytest.fixture(scope="module")
def frame(spark):
    return make_frame(spark).cache()


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """MLflow as a user finds it who has configured nothing, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow.set_tracking_uri(None)
    yield tmp_path
    mlflow.set_tracking_uri(None)


def test_a_fit_is_tracked_in_sqlite_and_its_model_served_from_there(frame, tracked):
    model = make_estimator(tracked, tracking="auto", runName="first", epochs=3).fit(frame)
    assert (tracked / "mlflow.db").is_file()
    run = mlflow.get_run(model.summary.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params["epochs"] == "3"
    assert run.data.params["loss"] == "CrossEntropyLoss"
    logged = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in logged] == [
        (record.epoch, record.loss) for record in model.history
    ]
    assert mlflow.active_run() is None

    served = mlflow.pyfunc.load_model(model.summary.model_uri)
    example = served.input_example
    assert list(example.columns) == ["image"]
    assert len(served.predict(example)) == 1
    rows = frame.toPandas()
    expected = [row["prediction"] for row in model.transform(frame).collect()]
    assert served.predict(rows[["image"]])["prediction"].tolist() == expected
    requirements = mlflow.pyfunc.get_model_dependencies(model.summary.model_uri)
    with open(requirements, encoding="utf-8") as file:
        names = {line.split("==")[0].strip() for line in file}
    assert names == {"cloudpickle", "mlflow", "numpy", "pandas", "safetensors", "sparkdl", "torch"}


def test_a_failed_fit_ends_its_run_as_failed(frame, tracked):
    estimator = make_estimator(
        tracked,
        tracking="on",
        model=make_model(1),
        loss=nn.MSELoss(),
        labelCol="target",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e25),
    )
    with pytest.raises(RankError):
        estimator.fit(frame)
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FAILED"
    assert mlflow.active_run() is None
