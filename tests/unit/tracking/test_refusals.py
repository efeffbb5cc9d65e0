"""What MLflow must refuse: names are checked before a fit, and a refusal is not taken for a server that is down."""

from __future__ import annotations

from functools import partial

import mlflow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException
from torch import nn

import sparkdl.mlflow
from sparkdl.data import Store
from sparkdl.errors import ParamError
from sparkdl.estimators import TorchModel
from sparkdl.estimators.fit.tracking import save_for_mlflow
from sparkdl.model.saved_model import SavedModel
from sparkdl.tracking.logged_model import Registration, check_registration
from sparkdl.tracking.mlflow_model import is_mlflow_2
from tests.servers import fresh_mlflow
from tests.training.signatures import make_signature
from tests.unit.estimators.public_classes import make_torch_estimator

REFUSED_ALIASES = ["", "v1", "V22", "latest", "Latest", "a b", "a/b", "a:b", "a.b", "a" * 256, "é b", "a\n"]
REFUSED_NAMES = ["", "  ", "a/b", "a:b", "models:/a", ".", "..", "../a"]


@pytest.fixture
def open_run(tmp_path):
    return partial(fresh_mlflow.open_run, "on", store=Store(tmp_path / "store"))


@pytest.mark.parametrize("alias", REFUSED_ALIASES)
def test_alias_that_the_registry_refuses_is_refused_before_the_fit(alias):
    estimator = make_torch_estimator(registeredModelName="digits", registeredModelAlias=alias)
    with pytest.raises(ParamError, match="The alias of a registered model cannot be"):
        estimator._check_settings()
    with pytest.raises(ParamError, match="The alias of a registered model cannot be"):
        sparkdl.mlflow.log_model(None, registered_model_name="digits", registered_model_alias=alias)


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_name_that_the_registry_refuses_is_refused_before_the_fit(name):
    for call in (
        make_torch_estimator(registeredModelName=name)._check_settings,
        lambda: sparkdl.mlflow.log_model(None, registered_model_name=name),
        lambda: sparkdl.mlflow.autolog(registered_model_name=name),
    ):
        with pytest.raises(ParamError, match="The name of a registered model cannot be"):
            call()


def test_empty_name_of_an_experiment_is_refused():
    with pytest.raises(ParamError, match="Param experiment is ' ', an empty name"):
        make_torch_estimator(experiment=" ")._check_settings()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.sampled_from("abvV19.:/ '\"-_é"), max_size=4), st.sampled_from(["a-1", "v1", "vv", "é", "x y"])
)
def test_checks_of_names_are_those_of_mlflow(tracked, name, alias):
    try:
        check_registration(name, alias)
    except ParamError:
        if not is_mlflow_2():  # takes names that the next version refuses
            with pytest.raises(MlflowException):
                register_once(name, alias)
    else:
        register_once(name, alias)


def register_once(name, alias):
    client = mlflow.MlflowClient()
    client.create_registered_model(name)
    try:
        client.create_model_version(name, "file:/nowhere")
        client.set_registered_model_alias(name, alias, "1")
    finally:
        client.delete_registered_model(name)


def log_model(run, folder, registration):
    folder.mkdir()
    model = TorchModel(SavedModel(nn.Linear(1, 1), make_signature((1,))))
    run.log_model(save_for_mlflow(model, folder), folder, registration)


def test_name_with_a_quote_is_registered(tracked, open_run, tmp_path):
    with open_run() as run:
        log_model(run, tmp_path / "model", Registration(name="Bob's model", alias="best"))
    assert mlflow.MlflowClient().get_model_version_by_alias("Bob's model", "best").version in (1, "1")


def test_registration_that_is_always_refused_is_named_and_not_kept(tracked, open_run, tmp_path, caplog):
    with open_run() as run:
        log_model(run, tmp_path / "model", Registration(name="digits", alias="v1"))
    assert run.model_uri is not None
    assert "MLflow refuses registration" in caplog.text
    assert not (tmp_path / "store" / "unsent-runs").exists()


def test_deleted_active_run_is_refused_before_the_training_and_not_taken_for_an_outage(
    tracked, open_run, tmp_path, caplog
):
    with mlflow.start_run() as active:
        mlflow.MlflowClient().delete_run(active.info.run_id)
        with (
            open_run() as run,
            pytest.raises(ParamError, match=rf"active run {active.info.run_id} is deleted"),
        ):
            run.check_begun()
        mlflow.MlflowClient().restore_run(active.info.run_id)
    assert "MLflow refuses its run" in caplog.text
    assert "sent again" not in caplog.text
    assert not (tmp_path / "store" / "unsent-runs").exists()
