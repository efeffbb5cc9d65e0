"""Describes a trained model in the terms that MLflow has for what it takes and gives. Runs on the *driver*."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.model.pyfunc import DEFAULT_PARAMS, answer_names
from sparkdl.model.saved_model import modules_needed
from sparkdl.tracking import LoggedColumn, LoggedModelSpec
from sparkdl.tracking.flavor import DATA_FOLDER, MODULE_FOLDER

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from sparkdl.data import Column
    from sparkdl.estimators.torch_model import TorchModel
    from sparkdl.model.signature import ModelOutput


def save_for_mlflow(
    model: TorchModel, folder: str | os.PathLike[str], example: Mapping[str, Any] | None = None
) -> LoggedModelSpec:
    """Save a model below a local folder and return what MLflow should know about it.

    Args:
        model: the model.
        folder: that exists.
        example: one row, columns of shape ``(1, *shape)``.

    Raises:
        SerializationError: if something of the model cannot be pickled.
    """
    there = Path(folder) / DATA_FOLDER
    model.write().save(str(there))
    signature = model.saved.signature
    columns, outputs = signature.inputs.columns, signature.outputs
    return LoggedModelSpec(
        folder=there,
        model_class=f"{type(model).__module__}.{type(model).__name__}",
        inputs=tuple(_input(column) for column in columns),
        outputs=tuple(
            column
            for output, names in zip(outputs, answer_names(outputs), strict=True)
            for column in _answers(output, *names)
        ),
        example=None if example is None else {column.name: example[column.name][0] for column in columns},
        params=DEFAULT_PARAMS,
        modules=frozenset(
            {
                *modules_needed(there / MODULE_FOLDER),
                *getattr(signature.inputs.prepare, "imported_when_called", ()),
            }
        ),
        classes={output.name: output.classes for output in outputs if output.classes is not None},
    )


def _input(column: Column) -> LoggedColumn:
    if column.kind == "ragged":
        kind, dtype = column.element
        return LoggedColumn(name=column.name, kind=_kind(kind, dtype), depth=len(column.lengths))
    return LoggedColumn(name=column.name, kind=_kind(column.kind, column.dtype), depth=len(column.shape))


def _answers(output: ModelOutput, prediction: str, probability: str | None) -> list[LoggedColumn]:
    kind = {str: "string", bool: "boolean"}.get(type((output.classes or (0.0,))[0]), "double")
    columns = [LoggedColumn(name=prediction, kind=kind, depth=int(bool(output.shape)))]
    if probability is not None:
        columns.append(LoggedColumn(name=probability, kind="double", depth=1))
    return columns


def _kind(kind: str, dtype: str) -> str:
    if kind == "number":
        # The widest type of each kind: MLflow refuses a list of Python floats where the signature says float32.
        return {"b": "boolean", "i": "long", "u": "long"}.get(np.dtype(dtype).kind, "double")
    return kind if kind in ("string", "binary") else "any"
