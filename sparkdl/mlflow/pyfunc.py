"""Loads a logged model as a pyfunc of MLflow. Needs neither Spark nor Java, and imports no pyspark.

The ``loader_module`` in the MLmodel file is a copy of :mod:`sparkdl.tracking.model_loader`, which calls
:func:`_load_pyfunc`. Errors in an input are raised as MLflow's exception for bad requests, to which its scoring server
responds with status 400 and the message. To any other exception the server would respond with a message without
information.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparkdl.errors import DataError, ParamError, count_of
from sparkdl.model.saved_model import load_model
from sparkdl.model.served_model import PyfuncModel
from sparkdl.tracking.mlflow_model import MODULE_FOLDER


class ServedModel:
    """The object that ``mlflow.pyfunc`` wraps: it has ``predict`` and, as in other flavors, access to the module."""

    def __init__(self, model: PyfuncModel) -> None:
        self._model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Return predictions as :meth:`sparkdl.model.served_model.PyfuncModel.predict` does.

        Raises:
            mlflow.exceptions.MlflowException: ``INVALID_PARAMETER_VALUE`` if there are no rows, the rows or a param are
                not valid, or the module fails on the rows; ``RESOURCE_EXHAUSTED`` if there is not enough memory;
                ``BAD_REQUEST`` if the output of the module cannot be used.
        """
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import BAD_REQUEST, RESOURCE_EXHAUSTED

        num_rows = _num_rows(model_input)
        if not num_rows:
            raise MlflowException.invalid_parameter_value("There are no rows to predict. Send at least one.")
        try:
            return self._model.predict(model_input, params)
        except (DataError, ParamError) as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise MlflowException(
                f"There is not enough memory for {count_of(num_rows, 'row')}: {error}. Send fewer, or a lower "
                "batch_size.",
                error_code=RESOURCE_EXHAUSTED,
            ) from error
        except Exception as error:  # the user's module
            raise MlflowException(
                f"The model failed on {count_of(num_rows, 'row')}: {type(error).__name__}: {error}",
                error_code=BAD_REQUEST,
            ) from error

    def get_raw_model(self) -> Any:
        """Return the ``torch.nn.Module``, on CPU; for ``unwrap_python_model`` and the like."""
        return self._model.module


def _num_rows(model_input: Any) -> int:
    if isinstance(model_input, dict):
        return max((len(values) for values in model_input.values()), default=0)
    return len(model_input)


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> ServedModel:
    """Load the saved model in the folder ``path``; called by MLflow, with ``{"output": ...}`` for one column."""
    output = str((model_config or {}).get("output", ""))
    return ServedModel(PyfuncModel(load_model(Path(path) / MODULE_FOLDER), output=output))
