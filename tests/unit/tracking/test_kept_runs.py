"""Models that a server refuses, or that are sent repeatedly, in a real SQLite store of MLflow."""

from __future__ import annotations

import re
from contextlib import contextmanager

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from torch import nn

import sparkdl.mlflow
from sparkdl.data import Store
from sparkdl.estimators import TorchModel
from sparkdl.estimators.fit.tracking import save_for_mlflow
from sparkdl.model.saved_model import SavedModel
from sparkdl.tracking.fit_run import RunGroup
from sparkdl.tracking.logged_model import Registration, register
from sparkdl.tracking.mlflow_model import is_mlflow_2
from tests.servers import fresh_mlflow
from tests.servers.fresh_mlflow import unset_tracking_uri
from tests.training.signatures import make_signature

DIGITS = Registration(name="digits", alias="champion")


@contextmanager
def refused(name):
    """Make MLflow's client refuse a method."""

    def refuse(*args, **kwargs):
        raise MlflowException("you may not", PERMISSION_DENIED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, name, refuse)
        yield


def fit(tracked, local, *, meanwhile=lambda: None):
    folder = tracked / local
    folder.mkdir()
    with fresh_mlflow.open_run("on", store=Store(tracked / "store"), wait_s=60) as run:
        meanwhile()
        model = TorchModel(SavedModel(nn.Linear(1, 1), make_signature((1,))))
        run.log_model(save_for_mlflow(model, folder), folder, DIGITS)
    return run


def versions():
    return {
        int(version.version): version.tags["sparkdl.model_uri"]
        for version in mlflow.MlflowClient().search_model_versions("name = 'digits'")
    }


def champion():
    return int(mlflow.MlflowClient().get_model_version_by_alias("digits", "champion").version)


def test_refused_model_is_kept_and_sent_when_it_is_permitted(tracked, caplog):
    here = f"sqlite:///{tracked}/here.db"
    elsewhere = f"sqlite:///{tracked}/elsewhere.db"
    mlflow.set_tracking_uri(here)

    # A refused registration does not lose the model; a server selected meanwhile gets nothing.
    with refused("create_registered_model"):
        first = fit(tracked, "first", meanwhile=lambda: mlflow.set_tracking_uri(elsewhere))
    assert mlflow.get_tracking_uri() == elsewhere
    if (tracked / "elsewhere.db").exists():  # MLflow 2.19 creates it
        other = mlflow.MlflowClient(elsewhere)
        assert not other.search_runs(["0"])
        assert not other.search_registered_models()
    assert re.search("MLflow refuses registration of .*: you may not", caplog.text)
    mlflow.set_tracking_uri(here)
    assert len(list(tracked.glob("store/unsent-runs/*"))) == 1
    mlflow.pyfunc.load_model(first.model_uri)
    (sent,) = sparkdl.mlflow.send_kept(tracked / "store")
    assert (sent.run_id, sent.model_uri, sent.error) == (first.run_id, first.model_uri, None)
    assert (versions(), champion()) == ({1: first.model_uri}, 1)

    # A refused model is kept with its registration, however often it is refused.
    with refused("log_artifacts" if is_mlflow_2() else "get_run"):
        second = fit(tracked, "second")
        (failed,) = sparkdl.mlflow.send_kept(tracked / "store")
    assert second.model_uri is None
    assert failed.error == "MlflowException: you may not"
    (sent,) = sparkdl.mlflow.send_kept(tracked / "store")
    assert (sent.run_id, sent.error) == (second.run_id, None)
    assert (versions(), champion()) == ({1: first.model_uri, 2: sent.model_uri}, 2)
    assert not (tracked / "store" / "unsent-runs").exists()

    # Registering again returns the same version, and the alias stays with the newer one.
    assert register(mlflow.MlflowClient(), first.model_uri, DIGITS) == "1"
    assert (len(versions()), champion()) == (2, 2)
    assert "alias champion of digits stays at version 2" in caplog.text


def test_kept_run_that_cannot_be_read_does_not_block_the_others(tracked, caplog):
    mlflow.set_tracking_uri("http://me:secret@127.0.0.1:9")
    with fresh_mlflow.open_run("on", store=Store(tracked / "store"), wait_s=0) as run:
        run.log_params({"epochs": 3})
    (kept,) = tracked.glob("store/unsent-runs/*/run.json")
    assert "secret" not in kept.read_text() + caplog.text
    damaged = tracked / "store" / "unsent-runs" / "0-damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text('{"format": ')
    unset_tracking_uri()
    failed, sent = sparkdl.mlflow.send_kept(tracked / "store", tracking_uri=f"sqlite:///{tracked}/here.db")
    assert "0-damaged cannot be read: JSONDecodeError" in failed.error
    assert sent.error is None
    assert [path.name for path in tracked.glob("store/unsent-runs/*")] == ["0-damaged"]
    assert not mlflow.is_tracking_uri_set()


def test_parent_of_a_kept_run_is_found_on_any_page_of_experiments(tracked, monkeypatch):
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    group = RunGroup(Store(tracked / "store"), experiment="search", name="a search", wait_s=0)
    with fresh_mlflow.open_run("on", store=Store(tracked / "store"), group=group, wait_s=0):
        pass
    group.close()
    unset_tracking_uri()
    here = f"sqlite:///{tracked}/here.db"
    client = mlflow.MlflowClient(here)
    for number in range(3):
        client.create_experiment(f"experiment {number}")
    search = mlflow.MlflowClient.search_experiments
    pages = []

    def search_small_pages(self, page_token=None):
        pages.append(page_token)
        return search(self, max_results=1, page_token=page_token)

    monkeypatch.setattr(mlflow.MlflowClient, "search_experiments", search_small_pages)
    parent, child = sparkdl.mlflow.send_kept(tracked / "store", tracking_uri=here)
    assert client.get_run(parent.run_id).info.run_name == "a search"
    assert client.get_run(child.run_id).data.tags["mlflow.parentRunId"] == parent.run_id
    assert len(pages) > 1
