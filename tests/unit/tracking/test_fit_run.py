"""Runs in a real SQLite store of MLflow."""

from __future__ import annotations

import sys

import mlflow
import pytest

from sparkdl.errors import ParamError
from sparkdl.tracking import NoRun, open_run
from sparkdl.tracking.logged_model import pip_requirements


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
