"""Serves a saved model to MLflow as a pyfunc: pandas in, predictions out. Imports neither mlflow nor Spark.

MLflow finds :func:`_load_pyfunc` by the name ``loader_module="sparkdl.training.pyfunc"``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sparkdl.errors import DataError
from sparkdl.training.predictor import Predictor
from sparkdl.training.saved_model import load_model


class PyfuncModel:
    """What MLflow calls: ``predict`` on a DataFrame with the feature column."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the predictions of every row.

        Args:
            model_input: a pandas DataFrame (or a dict of columns) with the feature column: numbers, or one
                list or array per row. A NumPy array of ``(rows, *features_shape)`` does as well.
            params: unused; part of MLflow's protocol.

        Returns:
            A DataFrame with the column ``prediction``, on the index of the input; a NumPy array for a NumPy
            array.

        Raises:
            DataError: if the feature column is missing, holds a null, or rows of another length.
        """
        del params
        name = self._predictor.signature.features
        if isinstance(model_input, np.ndarray):
            return self._predictor.predict({name: model_input})
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        if name not in frame.columns:
            raise DataError(
                f"There is no column {name!r}. The columns are: {', '.join(map(str, frame.columns))}."
            )
        predictions = self._predictor.predict({name: self._stack(frame[name])})
        values = (
            predictions
            if predictions.ndim == 1
            else list(predictions.reshape(len(predictions), math.prod(predictions.shape[1:])))
        )
        return pd.DataFrame({"prediction": values}, index=frame.index)

    def _stack(self, column: Any) -> npt.NDArray[np.generic]:
        signature = self._predictor.signature
        size = math.prod(signature.features_shape)
        rows = [np.asarray(value) for value in column]
        for index, row in enumerate(rows):
            if row.dtype == object and any(value is None for value in row.flat):
                raise DataError(f"Row {index} of column {signature.features!r} holds a null.")
            if row.size != size:
                raise DataError(
                    f"Row {index} of column {signature.features!r} has {row.size} values, and the model takes {size}."
                )
        try:
            dtype = np.int64 if np.issubdtype(np.dtype(signature.column_dtype), np.integer) else np.float64
            stacked = (
                np.stack(rows).astype(dtype) if rows else np.empty((0, *signature.features_shape), dtype)
            )
        except (TypeError, ValueError) as error:
            raise DataError(
                f"Column {signature.features!r} holds values that are not numbers: {error}"
            ) from error
        return stacked.reshape(len(rows), *signature.features_shape)


def _load_pyfunc(path: str) -> PyfuncModel:
    """Load the saved model in the folder ``path``; called by MLflow."""
    return PyfuncModel(Predictor(load_model(path)))
