"""Runs in a real SQLite store of MLflow."""

from __future__ import annotations

import atexit
import io
import logging
import math
import os
import pickle
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlflow
import numpy as np
import pytest
from torch import nn

import sparkdl.mlflow
from sparkdl import tracking
from sparkdl.data import Column, Store
from sparkdl.errors import ParamError
from sparkdl.estimators import TorchModel, TrainingSummary
from sparkdl.estimators.fit.progress import FitListener, FitProgress
from sparkdl.estimators.fit.tracking import log_values, save_for_mlflow
from sparkdl.model.saved_model import SavedModel
from sparkdl.tracking.logged_model import pip_requirements
from sparkdl.training.history import EpochRecord
from tests.servers import fresh_mlflow
from tests.training.signatures import make_inputs, make_signature

ANY_TYPE = hasattr(mlflow.types.schema, "AnyType")


@pytest.fixture
def open_run(tmp_path):
    """A function that opens runs, which keep what they cannot send in a Store."""
    return partial(fresh_mlflow.open_run, store=Store(tmp_path / "store"))


def kept(tmp_path):
    return list((tmp_path / "store").glob("unsent-runs/*/run.json"))


def log_model(run, folder, signature, example=None, summary=None):
    """Log a model with a signature by way of the subfolder ``local``."""
    (folder / "local").mkdir()
    model = TorchModel(SavedModel(nn.Linear(1, 1), signature), summary)
    run.log_model(save_for_mlflow(model, folder / "local", example), folder / "local", None)


def column_of(*values):
    """An array of objects, also where they are arrays."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def test_run_ends_as_its_fit_ends_and_joins_or_nests_under_an_active_run(tracked, open_run):
    with open_run("on", run_name="alone", tags={"purpose": "test"}) as run:
        run.log_params({"long": "x" * 9000, "epochs": 3})
        run.log_metrics(1, {"loss": 0.5, "bad": float("nan")})
    logged = mlflow.get_run(run.run_id)
    assert (logged.info.status, logged.info.run_name) == ("FINISHED", "alone")
    assert logged.data.tags["purpose"] == "test"
    assert len(logged.data.params["long"]) == 500
    assert logged.data.metrics == {"loss": 0.5}
    assert (tracked / "mlflow.db").is_file()

    with pytest.raises(ValueError, match="broken"), open_run("auto") as run:
        raise ValueError("broken")
    assert mlflow.get_run(run.run_id).info.status == "FAILED"
    for stop in (KeyboardInterrupt, SystemExit):
        with pytest.raises(stop), open_run("auto") as run:
            raise stop
        assert mlflow.get_run(run.run_id).info.status == "KILLED"

    with mlflow.start_run() as outer:
        with open_run("on") as first:
            first.log_params({"epochs": 1})
        with open_run("on") as second:
            second.log_params({"epochs": 2})
        assert mlflow.active_run().info.run_id == outer.info.run_id
        with open_run("on", run_name="trial", may_join=False) as trial:
            trial.log_params({"epochs": 3})
    with mlflow.start_run() as search, open_run("on", may_join=False) as first_trial:
        pass
    with mlflow.start_run() as tagged:
        with open_run("on", tags={"mlflow.parentRunId": tagged.info.run_id}) as tagged_trial:
            pass
        with open_run("on", tags={"mlflow.parentRunId": search.info.run_id}) as joined:
            pass
    assert joined.run_id == tagged.info.run_id, "the tag is of another run than the active one"
    for nested, parent in ((trial, outer), (first_trial, search), (tagged_trial, tagged)):
        assert mlflow.get_run(nested.run_id).data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert first.run_id == outer.info.run_id
    assert second.run_id != outer.info.run_id
    assert mlflow.get_run(second.run_id).data.tags["mlflow.parentRunId"] == outer.info.run_id
    assert mlflow.get_run(outer.info.run_id).info.status == "FINISHED"
    assert kept(tracked) == []


def test_run_that_is_open_when_the_program_ends_is_killed(tracked, open_run, monkeypatch):
    """A fit of a daemon thread is not ended before, such as a trial of Ray Tune."""
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda function, *args: at_exit.append((function, args)))
    with open_run("on") as run:
        ((end, args),) = [handler for handler in at_exit if getattr(handler[0], "__self__", None) is run]
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            end(*args)
        run.flush()
        assert mlflow.get_run(run.run_id).info.status == "RUNNING"
        end(*args)
    assert mlflow.get_run(run.run_id).info.status == "KILLED"
    assert kept(tracked) == []


def test_fit_joins_a_run_with_params_and_keeps_its_own_beside_those_of_the_user(tracked, open_run, caplog):
    mlflow.set_tracking_uri(f"sqlite:///{tracked}/mlflow.db")
    with mlflow.start_run() as outer:
        mlflow.log_params({"epochs": 100, "mine": "x"})
        for epochs in (3, 4):
            with open_run("on") as run:
                run.log_params({"epochs": epochs, "batchSize": 8, "mine": "x"})
                run.log_metrics(1, {"loss": 0.5})
            assert (run.run_id == outer.info.run_id) == (epochs == 3), "the second fit has a nested run"
    params = mlflow.get_run(outer.info.run_id).data.params
    assert params == {"epochs": "100", "sparkdl.epochs": "3", "batchSize": "8", "mine": "x"}
    assert "param epochs with the value 100; the further value 3 is logged as sparkdl.epochs" in caplog.text
    assert mlflow.get_run(run.run_id).data.params == {"epochs": "4", "batchSize": "8", "mine": "x"}
    assert kept(tracked) == []


def test_run_has_the_layout_that_the_ranks_chose_and_why_and_that_of_a_restart(tracked, open_run):
    with open_run("on") as run:
        listener = FitListener(run, FitProgress(io.StringIO()), list)
        for code in ("Parallelism(data=2)", "Parallelism(shard=2)"):
            listener.handle_event(0, {"kind": "layout", "code": code, "reason": f"{code} is fast."})
    params = mlflow.get_run(run.run_id).data.params
    assert params == {
        "parallelism": "Parallelism(data=2)",
        "parallelismReason": "Parallelism(data=2) is fast.",
        "sparkdl.parallelism": "Parallelism(shard=2)",
        "sparkdl.parallelismReason": "Parallelism(shard=2) is fast.",
    }


def test_run_of_an_interrupted_fit_is_continued_with_each_value_once_unless_it_was_deleted(tracked, open_run):
    def fit(*losses, error=KeyboardInterrupt, **options):
        with suppress(KeyboardInterrupt, ZeroDivisionError), open_run("on", key="one fit", **options) as run:
            run.log_params({"epochs": len(losses)})
            for epoch, loss in enumerate(losses, start=1):
                run.log_metrics(epoch, {"loss": loss})
            raise error
        return run.run_id

    first = fit(0.5)
    assert mlflow.get_run(first).info.status == "KILLED"
    assert fit(0.5, 0.25) == fit(0.5, 0.25, 0.125, error=ZeroDivisionError) == first
    history = mlflow.MlflowClient().get_metric_history(first, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.25), (3, 0.125)]
    run = mlflow.get_run(first)
    assert run.info.status == "FAILED"
    assert run.data.params == {"epochs": "1", "sparkdl.epochs": "2", "sparkdl.epochs.2": "3"}

    group = tracking.RunGroup(open_run.keywords["store"], experiment=None, name="again")
    assert fit(0.5, group=group) == first
    group.close()
    parent = mlflow.get_run(first).data.tags["mlflow.parentRunId"]
    assert mlflow.get_run(parent).info.run_name == "again"
    with mlflow.start_run(run_id=first):
        assert fit(0.5, 0.25) == first
        assert mlflow.get_run(first).info.status == "RUNNING", "the user ends it"
    with mlflow.start_run() as outer:
        assert fit(0.5, 0.25) == outer.info.run_id

    assert fit(0.5, experiment="another") not in (first, outer.info.run_id)
    for run_id in (first, outer.info.run_id):
        mlflow.delete_run(run_id)
    again = fit(0.5, 0.25)
    assert again not in (first, outer.info.run_id)
    assert fit(0.5, 0.25) == again


def test_fit_that_continues_a_finished_one_has_a_run_of_its_own_that_names_it(tracked, open_run):
    runs = []
    for losses in ((0.5,), (0.5, 0.25), (0.5, 0.25, 0.125)):
        with open_run("on", key="one fit") as run:
            for epoch, loss in enumerate(losses, start=1):
                run.log_metrics(epoch, {"loss": loss})
        runs.append(mlflow.get_run(run.run_id))
    assert [run.data.metrics for run in runs] == [{"loss": 0.5}, {"loss": 0.25}, {"loss": 0.125}]
    assert {run.info.status for run in runs} == {"FINISHED"}
    ids = [run.info.run_id for run in runs]
    assert [run.data.tags.get("sparkdl.continues_run") for run in runs] == [None, *ids[:2]]
    assert mlflow.get_run(ids[0]).data.metrics == {"loss": 0.5}, "it stays as it was"


def test_messages_to_a_store_that_goes_away_are_kept_with_a_warning_and_sent_later(tracked, open_run, caplog):
    with open_run("on", wait_s=60) as run:
        run.log_metrics(1, {"loss": 0.5})
        run.flush()
        content = (tracked / "mlflow.db").read_bytes()
        (tracked / "mlflow.db").write_bytes(b"no database any more" * 5000)
        for epoch in (2, 3):
            run.log_metrics(epoch, {"loss": 1 / epoch})
        run.log_file("reports/said.txt", b"something")
    assert caplog.text.count("to MLflow failed") == 1
    assert f"sparkdl.mlflow.send_kept('{tracked}/store')" in caplog.text
    assert len(kept(tracked)) == 1
    assert mlflow.active_run() is None

    (failed,) = sparkdl.mlflow.send_kept(tracked / "store")
    assert failed.error is not None
    assert len(kept(tracked)) == 1

    (tracked / "mlflow.db").write_bytes(content)
    (sent,) = sparkdl.mlflow.send_kept(tracked / "store")
    assert (sent.run_id, sent.error) == (run.run_id, None)
    logged = mlflow.MlflowClient().get_metric_history(run.run_id, "loss")
    assert [(metric.step, metric.value) for metric in logged] == [(1, 0.5), (2, 0.5), (3, 1 / 3)]
    assert mlflow.get_run(run.run_id).info.status == "FINISHED"
    assert mlflow.artifacts.load_text(f"runs:/{run.run_id}/reports/said.txt") == "something"
    assert not (tracked / "store" / "unsent-runs").exists()
    assert sparkdl.mlflow.send_kept(tracked / "store") == []


def test_a_run_has_the_files_of_the_block_and_says_where_it_is(tracked, open_run):
    block = tracking.log_with_fits(files={"job.yaml": b"epochs: 3"}, code=[])
    with block, open_run("on", run_name="mine") as run:
        assert run.place == ""
        run.flush()
        assert (
            run.place
            == f"MLflow run mine ({run.run_id}): mlflow ui --backend-store-uri sqlite:///{tracked}/mlflow.db"
        )
    assert mlflow.artifacts.load_text(f"runs:/{run.run_id}/job.yaml") == "epochs: 3"
    with open_run("on") as other:
        other.flush()
    assert not mlflow.MlflowClient().list_artifacts(other.run_id)


def test_notes_of_mlflow_about_its_tables_are_not_shown(tracked, open_run, caplog):
    with caplog.at_level(logging.INFO), open_run("on") as run:
        run.flush()
    assert (tracked / "mlflow.db").is_file()
    assert not [record for record in caplog.records if record.name.startswith(("mlflow", "alembic"))]


def test_a_store_that_comes_back_gets_the_metrics_it_missed(tracked, open_run):
    store = tracked / "mlflow.db"
    with open_run("on") as run:
        run.log_metrics(1, {"loss": 0.5})
        run.flush()
        content = store.read_bytes()
        store.write_bytes(b"no database any more" * 5000)
        run.log_metrics(2, {"loss": 0.25})
        run.flush()
        store.write_bytes(content)
        run.log_metrics(3, {"loss": 0.125})
        run.flush()
    logged = mlflow.MlflowClient().get_metric_history(run.run_id, "loss")
    assert [(metric.step, metric.value) for metric in logged] == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert mlflow.get_run(run.run_id).info.status == "FINISHED"


def test_refused_message_is_named_and_does_not_block_the_others(tracked, open_run, caplog):
    with open_run("on") as run:
        run.log_params({"no/../name": 1})
        run.log_metrics(1, {"loss": 0.5})
    assert "MLflow refuses params " in caplog.text
    assert mlflow.get_run(run.run_id).data.metrics == {"loss": 0.5}
    assert kept(tracked) == []


def test_runs_of_a_group_are_nested_under_its_own_run_or_the_users_run(tracked, open_run):
    store = open_run.keywords["store"]
    group = tracking.RunGroup(store, experiment="search", name="a search")
    with open_run("on", group=group, tags={"sparkdl.param_map": "1"}, experiment="search") as child:
        child.log_params({"epochs": 1})
    group.close()
    run = mlflow.get_run(child.run_id)
    parent = mlflow.get_run(run.data.tags["mlflow.parentRunId"])
    assert (parent.info.run_name, parent.info.status) == ("a search", "FINISHED")
    assert run.info.experiment_id == parent.info.experiment_id
    with mlflow.start_run() as outer:
        group = tracking.RunGroup(store, experiment=None, name="a search")
        with open_run("on", group=group) as child:
            pass
        group.close()
    assert mlflow.get_run(child.run_id).data.tags["mlflow.parentRunId"] == outer.info.run_id


def test_a_tracking_uri_of_the_user_is_kept(tracked, open_run):
    mlflow.set_tracking_uri(f"sqlite:///{tracked}/own.db")
    with open_run("on"):
        pass
    assert (tracked / "own.db").is_file()
    assert not (tracked / "mlflow.db").exists()


def test_a_fit_is_not_tracked_without_mlflow_or_if_tracking_is_off(monkeypatch, open_run):
    with open_run("off") as run:
        assert run is None
    monkeypatch.delitem(sys.modules, "mlflow")
    monkeypatch.setattr(sys, "meta_path", [])
    with open_run("auto") as run:
        assert run is None
    with (
        pytest.raises(ParamError, match=r"mlflow is not installed\. .*pip install mlflow, .*'mlflow'"),
        open_run("on"),
    ):
        pass


def test_requirements_name_public_versions_of_the_packages_that_a_model_imports():
    requirements = pip_requirements()
    names = [line.split("==")[0] for line in requirements]
    assert names == ["cloudpickle", "numpy", "pandas", "safetensors", "torch"]
    assert not any("+" in line for line in requirements)
    modules = [
        "torchmetrics.regression.mse",
        "google.protobuf.message",
        "google._upb._message",
        "json",
        "no_package_has_me",
        "torch.nn",
        "sparkdl.torch.sync_batch_norm",
    ]
    more = {line.split("==")[0] for line in set(pip_requirements(modules)) - set(requirements)}
    assert more == {"torchmetrics", "protobuf"}


@pytest.mark.parametrize("declared", [None, "\n", "odd_one\n"])
def test_requirements_have_a_package_whatever_it_declares(declared, tmp_path, monkeypatch):
    folder = tmp_path / "odd_one-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-one\nVersion: 1.5+local\n")
    (folder / "RECORD").write_text(
        "odd_one/__init__.py,,\nodd_one/nets.py,,\nodd_one-1.5.dist-info/RECORD,,\n"
    )
    if declared is not None:
        (folder / "top_level.txt").write_text(declared)
    monkeypatch.syspath_prepend(tmp_path)
    assert set(pip_requirements(["odd_one.nets"])) - set(pip_requirements()) == {"odd-one==1.5"}


def test_model_is_logged_in_the_experiment_of_its_run(tracked, open_run):
    there = (tracked / "artifacts").as_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tracked}/mlflow.db")
    experiment = mlflow.create_experiment("of this run", artifact_location=there)
    with open_run("on", experiment="of this run") as run:
        run.log_params({"epochs": 3})
        log_model(run, tracked, make_signature((1,)))
    assert mlflow.get_run(run.run_id).info.experiment_id == experiment
    assert not list(tracked.glob("mlruns/*")), "MLflow 2 makes the folder"
    if mlflow.__version__ >= "3":
        logged = mlflow.get_logged_model(run.model_uri.removeprefix("models:/"))
        assert (logged.experiment_id, logged.source_run_id) == (experiment, run.run_id)
        assert (logged.params, logged.status) == ({"epochs": "3"}, "READY")


SUMMARY = TrainingSummary(
    history=tuple(
        EpochRecord(
            epoch=epoch,
            loss=loss,
            rows=1,
            seconds=1.0,
            rows_per_s=1.0,
            data_wait_share=0.25,
            learning_rate=0.1,
            metrics={"val_loss": val_loss, "x": x},
            rank_seconds=(),
        )
        for epoch, loss, val_loss, x in ((1, 0.5, 2.0, 1.0), (2, 0.25, 0.5, math.nan), (3, 0.125, 4.0, 1.0))
    ),
    model_epoch=2,
)
ROWS = tracking.LoggedDataset(
    name="rows", digest="abc", source_type="local", source="{}", schema="{}", profile="{}"
)


def fit_with_summary(tracked, open_run):
    with open_run("on") as run:
        run.log_dataset(ROWS)
        for record in SUMMARY.history:
            run.log_metrics(record.epoch, {**record.values, "rows_per_s": 1.0})
        for step in range(5):
            run.log_metrics(step, {"step/loss": 1.0, "system/here/disk": 9.0})
        log_values(run, SUMMARY, is_best=True)
        log_model(run, tracked, make_signature((1,)), summary=SUMMARY)
    return run


def check_values_in_mlflow(run_id, model_uri):
    """Check that run and model have the values of the model's epoch, each once."""
    client, run = mlflow.MlflowClient(), mlflow.get_run(run_id)
    assert (run.data.metrics["model_epoch"], run.data.metrics["best_val_loss"]) == (2, 0.5)
    assert (run.data.metrics["best_loss"], run.data.metrics["val_loss"]) == (0.25, 4.0)
    history = client.get_metric_history(run_id, "val_loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 2.0), (2, 0.5), (3, 4.0)]
    if mlflow.__version__ < "3":
        return
    (model,) = mlflow.search_logged_models(filter_string="metrics.val_loss < 1", output_format="list")
    assert f"models:/{model.model_id}" == model_uri
    assert {(metric.key, metric.value, metric.step) for metric in model.metrics} == {
        ("loss", 0.25, 2),
        ("val_loss", 0.5, 2),
    }
    assert {(metric.dataset_name, metric.dataset_digest) for metric in model.metrics} == {("rows", "abc")}
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(model.model_id, 2)]
    assert not mlflow.search_logged_models(filter_string="metrics.val_loss > 1", output_format="list")
    datasets = [{"dataset_name": "rows", "dataset_digest": "abc"}]
    assert mlflow.search_logged_models(
        filter_string="metrics.loss < 0.3", datasets=datasets, output_format="list"
    )


def test_run_and_model_have_the_values_of_the_models_epoch(tracked, open_run):
    run = fit_with_summary(tracked, open_run)
    check_values_in_mlflow(run.run_id, run.model_uri)


def test_run_that_is_sent_later_has_the_same_values(tracked, open_run):
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    fit_with_summary(tracked, partial(open_run, wait_s=0))
    mlflow.set_tracking_uri(f"sqlite:///{tracked}/mlflow.db")
    (sent,) = sparkdl.mlflow.send_kept(tracked / "store", tracking_uri=f"sqlite:///{tracked}/mlflow.db")
    check_values_in_mlflow(sent.run_id, sent.model_uri)


def test_code_of_the_fit_is_logged_with_its_model(tracked, open_run):
    (tracked / "nets_of_a_job.py").write_text("made = 17")
    with tracking.log_with_fits(files={}, code=[tracked / "nets_of_a_job.py"]), open_run("on") as run:
        log_model(run, tracked, make_signature((1,)))
    there = Path(mlflow.artifacts.download_artifacts(run.model_uri))
    assert (there / "code" / "nets_of_a_job.py").read_text() == "made = 17"
    assert mlflow.models.Model.load(str(there)).flavors["python_function"]["code"] == "code"


@pytest.mark.skipif(ANY_TYPE, reason="this MLflow has a type for images")
def test_row_that_mlflow_cannot_load_again_is_not_logged_as_an_example(tracked, open_run):
    picture = Column(name="x", dtype="object", kind="image")
    signature = replace(make_signature(), inputs=replace(make_inputs("x"), columns=(picture,)))
    with open_run("on") as run:
        log_model(run, tracked, signature, {"x": column_of(np.zeros((2, 2, 3), np.uint8))})
    info = mlflow.models.get_model_info(run.model_uri)
    assert info.signature is not None
    assert info.saved_input_example_info is None


def test_first_row_without_nulls_is_the_example_and_mlflow_says_nothing_if_there_is_none(tracked, open_run):
    nullable = Column(name="x", dtype="float64").with_nulls(None)
    signature = replace(make_signature(), inputs=replace(make_inputs("x"), columns=(nullable,)))
    examples = {}
    for name, values in (("some", [np.nan, 2.5, 3.5]), ("none", [np.nan, np.nan])):
        (tracked / name).mkdir()
        with open_run("on") as run, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            log_model(run, tracked / name, signature, {"x": np.array(values)})
        assert not any("input example" in str(warning.message) for warning in caught)
        info = mlflow.models.get_model_info(run.model_uri)
        saved_at = mlflow.artifacts.download_artifacts(run.model_uri)
        if info.saved_input_example_info is not None:
            examples[name] = mlflow.models.Model.load(saved_at).load_input_example(saved_at)
    assert {name: frame["x"].tolist() for name, frame in examples.items()} == {"some": [2.5]}


def test_example_is_nested_like_the_type_of_its_column(tracked, open_run):
    """MLflow checks values against that type, including the example, and the model accepts it."""
    seen = tracked / "seen.pkl"

    def prepare(columns):
        seen.write_bytes(pickle.dumps({name: values[0] for name, values in columns.items()}))
        return {"x": np.zeros((1, 1), np.float32)}

    ragged = Column(name="", dtype="object", kind="ragged", lengths=(None, 2), element=("number", "float32"))
    columns = {
        "matrix": Column(name="", dtype="float32", shape=(2, 3)),
        "pairs": ragged,
        "uneven": replace(ragged, lengths=(None, None)),
        "words": replace(ragged, lengths=(None,), element=("string", "object")),
        **({"picture": Column(name="", dtype="object", kind="image")} if ANY_TYPE else {}),
        "name": Column(name="", dtype="object", kind="string"),
        "count": Column(name="", dtype="int32"),
    }
    columns = {name: replace(column, name=name) for name, column in columns.items()}
    inputs = replace(make_inputs("x", prepare=prepare), columns=tuple(columns.values()))
    given = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3) / 3,
        "pairs": np.arange(6, dtype=np.float32).reshape(3, 2) / 3,
        "uneven": [np.array([0.5, 1.5], np.float32), np.array([2.5], np.float32)],
        "words": np.array(["a", "bc"], dtype=object),
        **({"picture": np.arange(12, dtype=np.uint8).reshape(2, 2, 3)} if ANY_TYPE else {}),
        "name": "one",
        "count": np.int32(7),
    }
    example = {name: column_of(value) for name, value in given.items()}
    with open_run("on") as run:
        log_model(run, tracked, replace(make_signature(), inputs=inputs), example)
    served = mlflow.pyfunc.load_model(run.model_uri)
    saved_at = mlflow.artifacts.download_artifacts(run.model_uri)
    assert len(served.predict(served.metadata.load_input_example(saved_at))) == 1
    row = pickle.loads(seen.read_bytes())
    for name, value in given.items():
        if name == "uneven":
            assert [inner.tolist() for inner in row[name]] == [inner.tolist() for inner in value]
        else:
            np.testing.assert_array_equal(row[name], value, err_msg=name)
            assert getattr(row[name], "dtype", None) == getattr(value, "dtype", None), name
