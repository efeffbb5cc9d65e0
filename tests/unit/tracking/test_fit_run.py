"""Runs in a real SQLite store of MLflow."""

from __future__ import annotations

import sys

import mlflow
import pytest

from sparkdl.errors import ParamError
from sparkdl.tracking import NoRun, open_run
from sparkdl.tracking.logged_model import pip_requirements


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow.set_tracking_uri(None)
    yield tmp_path
    while mlflow.active_run():
        mlflow.end_run()
    mlflow.set_tracking_uri(None)


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
