"""Loads a logged model for Spark, or as a torch module. Runs on the *driver*, or where there is no Spark."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import SavedModelError
from sparkdl.tracking.flavor import FLAVOR_NAME, MODULE_FOLDER

if TYPE_CHECKING:
    import torch

    from sparkdl.estimators import TorchModel


def load_model(model_uri: str, dst_path: str | os.PathLike[str] | None = None) -> TorchModel:
    """Load a model as Spark ML has it; its ``summary.model_uri`` is the URI.

    Args:
        model_uri: as MLflow takes it: ``models:/m-1234``, ``models:/name@alias``, ``runs:/<id>/model``, a path.
        dst_path: existing local folder to download to; a temporary one by default.

    Raises:
        ImportError: if pyspark is not installed.
        SavedModelError: if it is no model of this flavor, or damaged, or of a newer version.
        mlflow.exceptions.MlflowException: if MLflow does not find it.
    """
    folder, flavor, run_id = _download(model_uri, dst_path)
    try:
        import pyspark  # noqa: F401 - asked for here, where the message can say what else to do
    except ImportError as error:
        raise ImportError(
            "sparkdl.mlflow.load_model returns a model of Spark ML and needs pyspark, which is not installed here. "
            "Without it, mlflow.pyfunc.load_model(uri) predicts, and sparkdl.mlflow.load_module(uri) returns the "
            "torch module."
        ) from error
    model: TorchModel = _class_named(flavor["model_class"]).load(str(folder))
    return model._logged_as(run_id or model.summary.run_id, str(model_uri))


def load_module(model_uri: str, dst_path: str | os.PathLike[str] | None = None) -> torch.nn.Module:
    """Load the trained module alone, on CPU and in ``eval()`` mode; arguments and errors are those of `load_model`."""
    from sparkdl.training.saved_model import load_model as load_saved

    folder, _, _ = _download(model_uri, dst_path)
    return load_saved(folder / MODULE_FOLDER).module


def _download(
    model_uri: str, dst_path: str | os.PathLike[str] | None
) -> tuple[Path, dict[str, Any], str | None]:
    """The local folder of the saved model, the flavor's part of the MLmodel file, and the run."""
    import mlflow
    from mlflow.models import Model

    there = None if dst_path is None else os.fspath(dst_path)
    root = Path(mlflow.artifacts.download_artifacts(artifact_uri=str(model_uri), dst_path=there))
    described = Model.load(str(root))
    flavor = described.flavors.get(FLAVOR_NAME)
    if flavor is None:
        raise SavedModelError(
            f"{model_uri} was not logged by sparkdl: its flavors are {', '.join(described.flavors)}. "
            "Load it by one of those."
        )
    code = described.flavors["python_function"].get("code")
    if code is not None:
        _make_importable(root / str(code))
    return root / flavor["data"], flavor, described.run_id


def _make_importable(folder: Path) -> None:
    """Do what MLflow does with ``code_paths``: the model's pickles name modules that lie there."""
    import sys

    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _class_named(name: str) -> Any:
    module, _, made = str(name).rpartition(".")
    try:
        return getattr(importlib.import_module(module), made)
    except (ImportError, AttributeError, ValueError) as error:
        raise SavedModelError(
            f"It is a {name}, which this sparkdl does not have: {error}. Install a newer sparkdl."
        ) from error
