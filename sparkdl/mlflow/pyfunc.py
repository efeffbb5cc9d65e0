"""Loads a logged model as a pyfunc of MLflow. Needs neither Spark nor Java, and imports no pyspark.

MLflow finds :func:`_load_pyfunc` by ``loader_module`` in the MLmodel file. What is wrong with an input is raised as
MLflow's exception for bad requests, which its scoring server answers by the status 400 and the message; anything else
it would answer by a message that says nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparkdl.errors import DataError, ParamError
from sparkdl.model.saved_model import load_model
from sparkdl.model.served_model import PyfuncModel
from sparkdl.tracking.flavor import MODULE_FOLDER


class ServedModel:
    """What ``mlflow.pyfunc`` wraps: ``predict`` and, as other flavors have it, the module itself."""

    def __init__(self, model: PyfuncModel) -> None:
        self._model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Return predictions as :meth:`sparkdl.model.served_model.PyfuncModel.predict` does.

        Raises:
            mlflow.exceptions.MlflowException: ``INVALID_PARAMETER_VALUE`` if there are no rows, something is wrong with
                them or with a param, or the module fails with them; ``RESOURCE_EXHAUSTED`` if that is for a lack of
                memory; ``BAD_REQUEST`` if what the module returns is of no use.
        """
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import BAD_REQUEST, RESOURCE_EXHAUSTED

        num_rows = _num_rows(model_input)
        if not num_rows:
            raise MlflowException.invalid_parameter_value("There are no rows to predict. Send one at least.")
        try:
            return self._model.predict(model_input, params)
        except (DataError, ParamError) as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise MlflowException(
                f"There is not enough memory for {num_rows} rows: {error}. Send fewer, or a lower batch_size.",
                error_code=RESOURCE_EXHAUSTED,
            ) from error
        except Exception as error:  # the user's module
            raise MlflowException(
                f"The model failed on {num_rows} rows: {type(error).__name__}: {error}",
                error_code=BAD_REQUEST,
            ) from error

    def get_raw_model(self) -> Any:
        """Return the ``torch.nn.Module``, on CPU; for ``unwrap_python_model`` and the like."""
        return self._model.module


def _num_rows(model_input: Any) -> int:
    if isinstance(model_input, dict):
        return max((len(values) for values in model_input.values()), default=0)
    return len(model_input)


def _load_pyfunc(path: str) -> ServedModel:
    """Load the saved model in the folder ``path``; called by MLflow."""
    return ServedModel(PyfuncModel(load_model(Path(path) / MODULE_FOLDER)))
