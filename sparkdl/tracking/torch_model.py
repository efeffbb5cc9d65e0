"""Loads networks of torch that MLflow's own flavor ``mlflow.pytorch`` has logged. Runs on the *driver*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import errors_as, needing

MLFLOW_SCHEMES = ("models:", "runs:", "mlflow-artifacts:")
"""Beginnings of the URIs that only MLflow resolves."""

_FLAVOR = "pytorch"


def is_logged(path: str) -> bool:
    """Whether a path is MLflow's URI of a model."""
    return path.startswith(MLFLOW_SCHEMES)


def load_logged(model_uri: str) -> Any:
    """Return the network of a logged model: a torch module, or the path of a program of ``torch.export``.

    Raises:
        ParamError: if mlflow is not installed, finds no such model, or the model is of another flavor.
    """
    with needing(f"{model_uri}, a URI of MLflow,", "mlflow", "mlflow"):
        import mlflow.pytorch
        from mlflow.models import Model
    with errors_as(ParamError, f"{model_uri} cannot be loaded by mlflow.pytorch"):
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
        flavors = Model.load(str(folder)).flavors
        if _FLAVOR not in flavors:
            own = " sparkdl.mlflow.load_model(uri) returns this one." if "sparkdl" in flavors else ""
            raise ParamError(
                f"{model_uri} was not logged by mlflow.pytorch: its flavors are {', '.join(flavors)}.{own}"
            )
        exported = folder / flavors[_FLAVOR]["model_data"] / "model.pt2"
        if exported.is_file():
            return exported
        return mlflow.pytorch.load_model(str(folder), map_location="cpu")
