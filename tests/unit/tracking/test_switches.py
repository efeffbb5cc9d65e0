"""The options of ``sparkdl.autolog``, with a real SQLite store of MLflow."""

from __future__ import annotations

import logging
from functools import partial

import mlflow
import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.data import Store
from sparkdl.errors import ParamError
from sparkdl.estimators import TorchModel
from sparkdl.estimators.fit.tracking import save_for_mlflow
from sparkdl.model.saved_model import SavedModel
from sparkdl.tracking import LoggedDataset
from sparkdl.tracking.start import Switches, current_switches
from tests.servers import fresh_mlflow
from tests.training.signatures import make_signature

ROWS = LoggedDataset(
    name="rows", digest="0f", source_type="local", source="{}", schema="{}", profile='{"rows": 2}'
)


@pytest.fixture
def open_run(tracked):
    yield partial(fresh_mlflow.open_run, store=Store(tracked / "store"))
    sparkdl.autolog()


@pytest.fixture
def fit(tracked, open_run):
    """A function that logs what a fit logs; it returns the run, and the model info if a model was logged."""

    def log(name="digits"):
        folder = tracked / name
        folder.mkdir()
        with open_run("auto") as run:
            run.log_dataset(ROWS)
            model = TorchModel(SavedModel(nn.Linear(1, 1), make_signature((1,))))
            run.log_model(save_for_mlflow(model, folder, {"x": [[0.5]]}), folder, None)
        uri = run.model_uri
        return mlflow.get_run(run.run_id), None if uri is None else mlflow.models.get_model_info(uri)

    return log


@pytest.mark.parametrize(
    ("switch", "missing"),
    [
        (None, set()),
        ("log_models", {"model", "signature", "example"}),
        ("log_model_signatures", {"signature"}),
        ("log_input_examples", {"example"}),
        ("log_datasets", {"dataset"}),
    ],
)
def test_only_disabled_parts_are_not_logged(fit, switch, missing):
    if switch is not None:
        sparkdl.autolog(**{switch: False})
    run, model = fit()
    there = {
        "dataset": [dataset.dataset.name for dataset in run.inputs.dataset_inputs] == ["rows"],
        "model": model is not None,
        "signature": model is not None and model.signature is not None,
        "example": model is not None and model.saved_input_example_info is not None,
    }
    assert {name for name, is_there in there.items() if not is_there} == missing
    sparkdl.autolog()
    assert current_switches() == Switches()


@pytest.mark.parametrize("rows", [None, {"x": [[0.5]]}])
def test_a_model_holds_rows_only_if_it_has_an_input_example(tmp_path, rows):
    examples = ({"x": torch.tensor([[0.5]])},)
    model = TorchModel(SavedModel(nn.Linear(1, 1), make_signature((1,)), examples))
    logged = save_for_mlflow(model, tmp_path, rows)
    assert [file.name for file in logged.folder.rglob("*examples*")] == ["examples.safetensors"] * (
        rows is not None
    )
    assert model.saved.examples == examples


def test_each_model_is_registered_under_the_given_name(fit):
    sparkdl.autolog(registered_model_name="digits of all fits", disable_for_unsupported_versions=True)
    fit("first")
    fit("second")
    found = mlflow.MlflowClient().search_model_versions("name = 'digits of all fits'")
    assert sorted(int(version.version) for version in found) == [1, 2]


def test_disabled_fits_log_nothing_unless_tracking_is_on(open_run):
    sparkdl.autolog(disable=True)
    with open_run("auto") as off, open_run("on") as on:
        pass
    assert off is None
    assert mlflow.get_run(on.run_id).info.status == "FINISHED"


def test_exclusive_fits_ignore_the_users_run_and_have_their_own_tags(open_run):
    sparkdl.autolog(exclusive=True, extra_tags={"team": "owls"})
    with mlflow.start_run() as outer, open_run("auto") as run:
        pass
    assert run.run_id != outer.info.run_id
    tags = mlflow.get_run(run.run_id).data.tags
    assert tags["team"] == "owls"
    assert "mlflow.parentRunId" not in tags


@pytest.mark.parametrize("silent", [False, True])
def test_silent_fits_log_no_warnings(open_run, tracked, caplog, silent):
    sparkdl.autolog(silent=silent)
    with caplog.at_level(logging.WARNING), open_run("on", wait_s=60) as run:
        run.flush()
        (tracked / "mlflow.db").write_bytes(b"no database any more" * 5000)
        run.log_metrics(1, {"loss": 0.5})
    assert ("to MLflow failed" in caplog.text) is not silent
    assert len(list((tracked / "store").glob("unsent-runs/*/run.json"))) == 1


def test_a_number_of_epochs_below_one_is_refused():
    with pytest.raises(ParamError, match="every_n_iter is 0"):
        sparkdl.autolog(every_n_iter=0)
