"""Runs in a real SQLite store of MLflow."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace

import mlflow
import numpy as np
import pytest
from torch import nn

from sparkdl.data import Column
from sparkdl.errors import ParamError
from sparkdl.estimators import TorchModel
from sparkdl.estimators.model_logging import log_model_or_warn
from sparkdl.tracking import NoRun, open_run
from sparkdl.tracking.logged_model import pip_requirements
from sparkdl.training.saved_model import SavedModel
from tests.training.signatures import make_inputs, make_signature


def test_runs_end_as_their_fit_ends_and_join_or_nest_under_an_active_one(tracked):
    with open_run("on", run_name="alone") as run:
        run.log_params({"long": "x" * 9000, "epochs": 3})
        run.log_epoch(1, {"loss": 0.5, "bad": float("nan")})
    logged = mlflow.get_run(run.run_id)
    assert (logged.info.status, logged.info.run_name) == ("FINISHED", "alone")
    assert len(logged.data.params["long"]) == 500
    assert logged.data.metrics == {"loss": 0.5}
    assert (tracked / "mlflow.db").is_file()

    with pytest.raises(ValueError, match="broken"), open_run("auto") as run:
        raise ValueError("broken")
    assert mlflow.get_run(run.run_id).info.status == "FAILED"

    with mlflow.start_run() as outer:
        with open_run("on") as first:
            first.log_params({"epochs": 1})
        with open_run("on") as second:
            second.log_params({"epochs": 2})
        assert mlflow.active_run().info.run_id == outer.info.run_id
    assert first.run_id == outer.info.run_id
    assert second.run_id != outer.info.run_id
    assert mlflow.get_run(second.run_id).data.tags["mlflow.parentRunId"] == outer.info.run_id


def test_a_store_that_goes_away_costs_warnings_and_no_fit(tracked, caplog):
    with open_run("on") as run:
        run.log_epoch(1, {"loss": 0.5})
        (tracked / "mlflow.db").write_bytes(b"no database any more" * 5000)
        for epoch in (2, 3):
            run.log_epoch(epoch, {"loss": 0.25})
    assert caplog.text.count("did not take the metrics of epoch 2") == 1
    assert "metrics of epoch 3" not in caplog.text
    assert "The metrics of the epochs from 2 are not in MLflow" in caplog.text
    assert f"MLflow could not end the run {run.run_id}" in caplog.text
    assert mlflow.active_run() is None


def test_a_store_that_comes_back_gets_the_metrics_it_missed(tracked):
    store = tracked / "mlflow.db"
    with open_run("on") as run:
        run.log_epoch(1, {"loss": 0.5})
        content = store.read_bytes()
        store.write_bytes(b"no database any more" * 5000)
        run.log_epoch(2, {"loss": 0.25})
        store.write_bytes(content)
        run.log_epoch(3, {"loss": 0.125})
    logged = mlflow.MlflowClient().get_metric_history(run.run_id, "loss")
    assert [(metric.step, metric.value) for metric in logged] == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert mlflow.get_run(run.run_id).info.status == "FINISHED"


def test_a_tracking_uri_of_the_user_is_kept(tracked):
    mlflow.set_tracking_uri(f"sqlite:///{tracked}/own.db")
    with open_run("on"):
        pass
    assert (tracked / "own.db").is_file()
    assert not (tracked / "mlflow.db").exists()


def test_without_mlflow_a_fit_is_not_tracked_unless_it_was_asked_for(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlflow")
    monkeypatch.setattr(sys, "meta_path", [])
    with open_run("auto") as run:
        assert isinstance(run, NoRun)
    with pytest.raises(ParamError, match=r"mlflow is not installed\. Install mlflow"), open_run("on"):
        pass


def test_off_is_off():
    with open_run("off") as run:
        assert run.run_id is None
        assert run.log_model(None) is None


def test_requirements_name_public_versions():
    requirements = pip_requirements()
    assert [line.split("==")[0] for line in requirements] == [
        "cloudpickle",
        "numpy",
        "pandas",
        "safetensors",
        "sparkdl",
        "torch",
    ]
    assert not any("+" in line for line in requirements)


def test_an_example_is_nested_as_the_type_of_its_column_says(tracked):
    """MLflow holds what it is given against that, the example too, and the model takes it."""
    seen = tracked / "seen.pkl"

    def prepare(columns):
        seen.write_bytes(pickle.dumps({name: values[0] for name, values in columns.items()}))
        return {"x": np.zeros((1, 1), np.float32)}

    floats = ("number", "float32")
    columns = {
        "matrix": Column(name="", dtype="float32", shape=(2, 3)),
        "pairs": Column(name="", dtype="object", kind="ragged", lengths=(None, 2), element=floats),
        "uneven": Column(name="", dtype="object", kind="ragged", lengths=(None, None), element=floats),
        "words": Column(
            name="", dtype="object", kind="ragged", lengths=(None,), element=("string", "object")
        ),
        "picture": Column(name="", dtype="object", kind="image"),
        "name": Column(name="", dtype="object", kind="string"),
        "count": Column(name="", dtype="int32"),
    }
    columns = {name: replace(column, name=name) for name, column in columns.items()}
    signature = make_signature()
    inputs = replace(make_inputs("x", prepare=prepare), columns=tuple(columns.values()))
    model = TorchModel(SavedModel(nn.Linear(1, 1), replace(signature, inputs=inputs)))
    given = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3) / 3,
        "pairs": np.arange(6, dtype=np.float32).reshape(3, 2) / 3,
        "uneven": [np.array([0.5, 1.5], np.float32), np.array([2.5], np.float32)],
        "words": np.array(["a", "bc"], dtype=object),
        "picture": np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
        "name": "one",
        "count": np.int32(7),
    }
    example = {name: np.empty(1, dtype=object) for name in given}
    for name, value in given.items():
        example[name][0] = value
    with open_run("on") as run:
        uri = log_model_or_warn(model, example, run)
    served = mlflow.pyfunc.load_model(uri)
    assert len(served.predict(served.input_example)) == 1
    row = pickle.loads(seen.read_bytes())
    for name, value in given.items():
        if name == "uneven":
            assert [inner.tolist() for inner in row[name]] == [inner.tolist() for inner in value]
        else:
            np.testing.assert_array_equal(row[name], value, err_msg=name)
            assert getattr(row[name], "dtype", None) == getattr(value, "dtype", None), name
