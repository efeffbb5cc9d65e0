"""Runs logged to a real ``mlflow server``: with passwords, and while it is stopped or killed."""

from __future__ import annotations

import signal
import time

import mlflow
import pytest

import sparkdl.mlflow
from sparkdl import tracking
from sparkdl.data import Store
from sparkdl.estimators.fit.tracking import save_for_mlflow
from tests.servers import fresh_mlflow
from tests.servers.mlflow_servers import tracking_server
from tests.unit.mlflow.model_examples import many_into_many, rows

pytestmark = pytest.mark.slow


@pytest.fixture
def folders(tmp_path):
    for name in ("server", "local"):
        (tmp_path / name).mkdir()
    return tmp_path


def fit(folders, *, after_start=lambda: None, wait_s=60.0):
    """Log what a fit logs; return its run and the seconds from ``after_start`` on."""
    with fresh_mlflow.open_run("on", store=Store(folders / "store"), wait_s=wait_s) as run:
        run.log_params({"epochs": 3})
        run.log_metrics(1, {"loss": 0.5})
        run.flush()
        after_start()
        started = time.monotonic()
        for epoch in (2, 3):
            run.log_metrics(epoch, {"loss": 1 / epoch})
        assert time.monotonic() - started < 30  # a call to a stopped server takes minutes
        spec = save_for_mlflow(many_into_many(), folders / "local")
        started = time.monotonic()  # describing the model calls no server
        run.log_model(spec, folders / "local", tracking.Registration(name="animals", alias="best"))
        run.flush()
    return run, time.monotonic() - started


def check_server_has_all(run_id, model_uri):
    logged = mlflow.get_run(run_id)
    assert (logged.info.status, logged.data.params) == ("FINISHED", {"epochs": "3"})
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.5), (3, 1 / 3)]
    for uri in (model_uri, "models:/animals@best"):
        assert len(mlflow.pyfunc.load_model(uri).predict(rows(2))) == 2


def test_run_refused_for_missing_credentials_is_kept_and_sent_with_them(
    tracked, folders, monkeypatch, caplog
):
    variables = {"MLFLOW_AUTH_ADMIN_PASSWORD": "a long password", "MLFLOW_FLASK_SERVER_SECRET_KEY": "a key"}
    with tracking_server(folders / "server", "--app-name", "basic-auth", **variables) as server:
        mlflow.set_tracking_uri(server.url)
        run, _ = fit(folders, wait_s=5)
        assert (run.run_id, run.model_uri) == (None, None)
        assert "You are not authenticated" in caplog.text

        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a long password")
        (sent,) = sparkdl.mlflow.send_kept(folders / "store")
        check_server_has_all(sent.run_id, sent.model_uri)
        assert not (folders / "store" / "unsent-runs").exists()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_stops_or_dies_delays_a_fit_by_no_more_than_the_stated_time(tracked, folders, number):
    with tracking_server(folders / "server") as server:
        mlflow.set_tracking_uri(server.url)
        run, seconds = fit(folders, after_start=lambda: server.signal(number), wait_s=4.0)
        assert seconds < 4.0 + 40.0  # a call to a stopped server takes minutes
        assert run.run_id is not None
        assert run.model_uri is None
        if number == signal.SIGSTOP:
            server.signal(signal.SIGCONT)
            (sent,) = sparkdl.mlflow.send_kept(folders / "store")
            check_server_has_all(sent.run_id, sent.model_uri)
    if number == signal.SIGKILL:
        with tracking_server(folders / "server") as server:
            mlflow.set_tracking_uri(server.url)
            (sent,) = sparkdl.mlflow.send_kept(folders / "store", tracking_uri=server.url)
            assert sent.run_id == run.run_id  # it has the same database, so the run is found
            check_server_has_all(sent.run_id, sent.model_uri)


def test_server_that_is_unreachable_delays_a_fit_by_no_more_than_the_timeout(tracked, folders):
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    run, seconds = fit(folders, wait_s=2.0)
    assert (run.run_id, run.model_uri) == (None, None)
    assert seconds < 2.0 + 40.0
    with tracking_server(folders / "server") as server:
        (sent,) = sparkdl.mlflow.send_kept(folders / "store", tracking_uri=server.url)
        mlflow.set_tracking_uri(server.url)
        check_server_has_all(sent.run_id, sent.model_uri)
