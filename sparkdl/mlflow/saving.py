"""Saves and logs models by the flavor. Runs on the *driver*."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamTypeError
from sparkdl.tracking import Registration
from sparkdl.tracking.flavor import FlavorOptions, log_flavor, save_flavor

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from mlflow.models import Model, ModelSignature
    from mlflow.models.model import ModelInfo

    from sparkdl.estimators import TorchModel
    from sparkdl.tracking import LoggedModelSpec


def save_model(
    model: TorchModel,
    path: str | os.PathLike[str],
    mlflow_model: Model | None = None,
    *,
    signature: ModelSignature | None = None,
    input_example: Any = None,
    pip_requirements: Sequence[str] | None = None,
    extra_pip_requirements: Sequence[str] | None = None,
    code_paths: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as a model of MLflow, with the flavors ``sparkdl`` and ``python_function``.

    Args:
        model: of a fit, or loaded.
        path: local folder that does not exist, or is empty.
        mlflow_model: part of MLflow's protocol.
        signature: in the place of the one that the model tells itself.
        input_example: rows that the model takes, as a DataFrame of pandas; default: none.
        pip_requirements: what serving has to install, in the place of torch and the like in the versions that are
            installed here. sparkdl need not be among it, as the model carries its modules.
        extra_pip_requirements: what it has to install beside them, say for a ``prepareFeatures`` of your own.
        code_paths: local files and folders with modules that the model needs and no package has.
        metadata: for the MLmodel file.

    Raises:
        ParamTypeError: if ``model`` is no TorchModel.
        SerializationError: if something of the model cannot be pickled.
        mlflow.exceptions.MlflowException: if the folder is not empty, or an argument does not fit.
    """
    options = FlavorOptions(
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=tuple(extra_pip_requirements or ()),
        code_paths=code_paths,
        metadata=metadata,
    )
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        save_flavor(_saved(model, folder), path, options, mlflow_model)


def log_model(
    model: TorchModel,
    name: str = "model",
    *,
    registered_model_name: str | None = None,
    registered_model_alias: str | None = None,
    await_registration_for: int = 300,
    run_id: str | None = None,
    signature: ModelSignature | None = None,
    input_example: Any = None,
    pip_requirements: Sequence[str] | None = None,
    extra_pip_requirements: Sequence[str] | None = None,
    code_paths: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> ModelInfo:
    """Log a model in a run and return what MLflow knows of it, ``model_uri`` above all.

    Args:
        model: of a fit, or loaded.
        name: of the logged model, in MLflow 2 its folder in the run.
        registered_model_name: name under which a new version is registered; ``catalog.schema.model`` in Unity Catalog.
        registered_model_alias: alias that the new version gets.
        await_registration_for: seconds to wait until the version is ready.
        run_id: of the run; default: the active one, or a new one.
        signature: as in :func:`save_model`, and so are the arguments that follow.
        input_example: rows that the model takes.
        pip_requirements: what serving has to install.
        extra_pip_requirements: what it has to install beside what the model needs.
        code_paths: local modules.
        metadata: for the MLmodel file.

    Raises:
        ParamTypeError: if ``model`` is no TorchModel, or there is an alias and no name to register it under.
        SerializationError: if something of the model cannot be pickled.
        mlflow.exceptions.MlflowException: if the server does not take it.
    """
    if registered_model_alias is not None and registered_model_name is None:
        raise ParamTypeError("registered_model_alias needs a registered_model_name whose version gets it.")
    options = FlavorOptions(
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=tuple(extra_pip_requirements or ()),
        code_paths=code_paths,
        metadata=metadata,
    )
    registration = None
    if registered_model_name is not None:
        registration = Registration(
            name=registered_model_name, alias=registered_model_alias, await_s=await_registration_for
        )
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        return log_flavor(_saved(model, folder), options, name=name, run_id=run_id, registration=registration)


def _saved(model: Any, folder: str) -> LoggedModelSpec:
    from sparkdl.estimators.model_logging import save_for_mlflow
    from sparkdl.estimators.torch_model import TorchModel

    if not isinstance(model, TorchModel):
        raise ParamTypeError(
            f"sparkdl.mlflow takes the TorchModel that a fit returns, got {type(model).__module__}."
            f"{type(model).__name__}. A bare torch module is logged by mlflow.pytorch."
        )
    return save_for_mlflow(model, folder)
