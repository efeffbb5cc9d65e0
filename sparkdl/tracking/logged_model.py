"""Logs a saved model to MLflow as a pyfunc that needs no Spark. Runs on the *driver*."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

_REQUIREMENTS = ("cloudpickle", "numpy", "pandas", "safetensors", "sparkdl", "torch")


@dataclass(frozen=True, kw_only=True)
class LoggedColumn:
    """A column that a model takes or gives.

    Attributes:
        name: of the column.
        kind: ``"boolean"``, ``"long"``, ``"double"``, ``"string"`` or ``"binary"``: what its elements are; ``"any"``
            where MLflow has no type for them.
        depth: how many arrays are nested around them.
    """

    name: str
    kind: str
    depth: int = 0


@dataclass(frozen=True, kw_only=True)
class LoggedModelSpec:
    """A saved model and what MLflow should know about it.

    Attributes:
        folder: local folder of the saved model.
        loader_module: module with ``_load_pyfunc(path)``.
        inputs: the input columns.
        example: one row, by the names of the columns; the input example.
        outputs: the output columns.
        name: name of the logged model in the run.
    """

    folder: str | os.PathLike[str]
    loader_module: str
    inputs: tuple[LoggedColumn, ...]
    example: Mapping[str, Any]
    outputs: tuple[LoggedColumn, ...]
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
    """Return MLflow's signature."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    return ModelSignature(
        inputs=Schema([ColSpec(_column_type(column), column.name) for column in model.inputs]),
        outputs=Schema([ColSpec(_column_type(column), column.name) for column in model.outputs]),
    )


def _column_type(column: LoggedColumn) -> Any:
    from mlflow.types import DataType
    from mlflow.types.schema import AnyType, Array

    found: Any = AnyType() if column.kind == "any" else DataType[column.kind]
    for _ in range(column.depth):
        found = Array(found)
    return found


def _example(model: LoggedModelSpec) -> Any:
    import pandas as pd

    depths = {column.name: column.depth for column in model.inputs}
    return pd.DataFrame({name: [_plain(value, depths[name])] for name, value in model.example.items()})


def _plain(value: Any, depth: int) -> Any:
    """A value of the example as JSON has it: lists and Python's own numbers, floats in double precision.

    Lists are nested as the column's type says, of which one list takes an array of any shape in row-major order.
    """
    if isinstance(value, np.ndarray) and value.dtype != object:
        cast = value.astype(np.float64) if value.dtype.kind == "f" else value
        return cast.reshape(-1).tolist() if value.ndim and depth == 1 else cast.tolist()
    if isinstance(value, np.ndarray | list):
        flat = value.reshape(-1) if isinstance(value, np.ndarray) and depth == 1 else value
        return [_plain(each, depth - 1) for each in flat]
    return value.item() if isinstance(value, np.generic) else value
