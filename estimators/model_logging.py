"""Logs a trained model to MLflow, in the terms that MLflow has for what it takes and gives. Runs on the *driver*."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.tracking import LoggedColumn, LoggedModelSpec
from sparkdl.training.saved_model import SavedModel, save_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.data import Column
    from sparkdl.tracking import FitRun
    from sparkdl.training.signature import ModelOutput

_logger = logging.getLogger(__name__)

_LOADER = "sparkdl.training.pyfunc"


def log_model_or_warn(saved: SavedModel, example: Mapping[str, Any], run: FitRun) -> str | None:
    """Log the model and return its URI; None without tracking, or with a warning where MLflow does not take it.

    Args:
        saved: the model.
        example: one row, columns of shape ``(1, *shape)``.
        run: of the fit.
    """
    if run.run_id is None:
        return None
    try:
        return _log_model(saved, example, run)
    except Exception as error:
        _logger.warning(
            "The model is trained, but MLflow did not take it: %s: %s. To log it later: model.save(path), then "
            "mlflow.start_run(run_id=%r) and mlflow.pyfunc.log_model(name='model', "
            "loader_module=%r, data_path=path + '/module').",
            type(error).__name__,
            error,
            run.run_id,
            _LOADER,
        )
        return None


def _log_model(saved: SavedModel, example: Mapping[str, Any], run: FitRun) -> str | None:
    columns, outputs = saved.signature.inputs.columns, saved.signature.outputs
    names = ["prediction"] if len(outputs) == 1 else [output.name for output in outputs]
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        save_model(saved, Path(folder) / "sparkdl_model")
        return run.log_model(
            LoggedModelSpec(
                folder=Path(folder) / "sparkdl_model",
                loader_module=_LOADER,
                inputs=tuple(_input(column) for column in columns),
                example={column.name: example[column.name][0] for column in columns},
                outputs=tuple(_output(name, output) for name, output in zip(names, outputs, strict=True)),
            )
        )


def _input(column: Column) -> LoggedColumn:
    if column.kind == "ragged":
        kind, dtype = column.element
        return LoggedColumn(name=column.name, kind=_kind(kind, dtype), depth=len(column.lengths))
    # Arrays of one shape are taken flat, in row-major order.
    return LoggedColumn(
        name=column.name, kind=_kind(column.kind, column.dtype), depth=int(bool(column.shape))
    )


def _output(name: str, output: ModelOutput) -> LoggedColumn:
    kind = {str: "string", bool: "boolean"}.get(type((output.classes or (0.0,))[0]), "double")
    return LoggedColumn(name=name, kind=kind, depth=int(bool(output.shape)))


def _kind(kind: str, dtype: str) -> str:
    if kind == "number":
        # The widest type of each kind: MLflow refuses a list of Python floats where the signature says float32.
        return {"b": "boolean", "i": "long", "u": "long"}.get(np.dtype(dtype).kind, "double")
    return kind if kind in ("string", "binary") else "any"
