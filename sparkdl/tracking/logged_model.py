"""Logs a saved model to MLflow as a pyfunc that needs no Spark. Runs on the *driver*."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from mlflow.types.schema import Array, DataType

_REQUIREMENTS = ("cloudpickle", "numpy", "pandas", "safetensors", "sparkdl", "torch")


@dataclass(frozen=True, kw_only=True)
class LoggedModelSpec:
    """A saved model and what MLflow should know about it.

    Attributes:
        folder: local folder of the saved model.
        loader_module: module with ``_load_pyfunc(path)``.
        column: name of the input column.
        dtype: NumPy dtype of its elements.
        shape: shape of one row; ``()`` for a scalar.
        example: one row, ``shape``; the input example.
        prediction_shape: shape of one prediction.
        name: name of the logged model in the run.
    """

    folder: str | os.PathLike[str]
    loader_module: str
    column: str
    dtype: str
    shape: tuple[int, ...]
    example: Any
    prediction_shape: tuple[int, ...]
    name: str = "model"


def log_pyfunc(run_id: str, model: LoggedModelSpec) -> str:
    """Log the model in a run and return its URI.

    Raises:
        mlflow.exceptions.MlflowException: if the server does not take it.
    """
    import mlflow

    arguments: dict[str, Any] = {
        "loader_module": model.loader_module,
        "data_path": os.fspath(model.folder),
        "signature": signature_of(model),
        "input_example": _example(model),
        "pip_requirements": pip_requirements(),
    }
    # MLflow 3 calls the argument by another name, and takes the old one with a warning.
    is_version_2 = int(mlflow.__version__.split(".", maxsplit=1)[0]) < 3
    arguments["artifact_path" if is_version_2 else "name"] = model.name
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id:
        return str(mlflow.pyfunc.log_model(**arguments).model_uri)
    with mlflow.start_run(run_id=run_id, nested=active is not None):
        return str(mlflow.pyfunc.log_model(**arguments).model_uri)


def pip_requirements() -> list[str]:
    """Return what a process that serves the model has to install, in the versions that are installed here."""
    return [_requirement(package) for package in _REQUIREMENTS]


def _requirement(package: str) -> str:
    try:
        # The build tag of a local version ("+cpu", "+cu128") is in no public index.
        return f"{package}=={metadata.version(package).split('+', maxsplit=1)[0]}"
    except metadata.PackageNotFoundError:
        return package


def signature_of(model: LoggedModelSpec) -> ModelSignature:
    """Return MLflow's signature: one column in, the column ``prediction`` out."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    return ModelSignature(
        inputs=Schema([ColSpec(_column_type(model.dtype, model.shape), model.column)]),
        outputs=Schema([ColSpec(_array_of(DataType.double, len(model.prediction_shape) > 0), "prediction")]),
    )


def _column_type(dtype: str, shape: tuple[int, ...]) -> DataType | Array:
    from mlflow.types import DataType

    # The widest type of each kind: MLflow refuses a list of Python floats where the signature says float32.
    kind = np.dtype(dtype).kind
    element = {"b": DataType.boolean, "i": DataType.long, "u": DataType.long}.get(kind, DataType.double)
    return _array_of(element, len(shape) > 0)


def _array_of(element: DataType, is_array: bool) -> DataType | Array:
    from mlflow.types.schema import Array

    return Array(element) if is_array else element


def _example(model: LoggedModelSpec) -> Any:
    import pandas as pd

    value = np.asarray(model.example)
    cast = value.astype(np.float64) if value.dtype.kind == "f" else value
    row = cast.reshape(-1).tolist() if model.shape else cast.reshape(()).item()
    return pd.DataFrame({model.column: [row]})
