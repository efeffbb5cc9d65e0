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
from sparkdl.training.served_columns import as_trained


class PyfuncModel:
    """What MLflow calls: ``predict`` on a DataFrame with the feature columns."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the predictions of every row.

        Args:
            model_input: a pandas DataFrame (or a dict of columns) with the feature columns: numbers, strings, bytes, or
                one list or array per row. A NumPy array of ``(rows, *shape)`` does as well where one column is all
                that the model takes, and one prediction all that it gives.
            params: unused; part of MLflow's protocol.

        Returns:
            A DataFrame on the index of the input, with the column ``prediction``, or with one named like each label
            column where there are several; a NumPy array for a NumPy array.

        Raises:
            DataError: if a feature column is missing, holds a null, rows of another length, or what the dtype that
                the model was trained on does not hold.
        """
        del params
        columns = self._predictor.signature.inputs.columns
        if isinstance(model_input, np.ndarray):
            return self._predict_array(model_input)
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        for column in columns:
            if column.name not in frame.columns:
                raise DataError(
                    f"There is no column {column.name!r}. The columns are: {', '.join(map(str, frame.columns))}."
                )
        found = self._predictor.predict(
            {column.name: as_trained(frame[column.name], column) for column in columns}
        )
        if len(found) == 1:
            found = {"prediction": next(iter(found.values()))}
        return pd.DataFrame({name: _per_row(values) for name, values in found.items()}, index=frame.index)

    def _predict_array(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        columns, outputs = self._predictor.signature.inputs.columns, self._predictor.signature.outputs
        for what, each in (("takes", columns), ("gives", outputs)):
            if len(each) > 1:
                raise DataError(
                    f"The model {what} {len(each)} columns, {', '.join(one.name for one in each)}: give a DataFrame "
                    f"with {', '.join(column.name for column in columns)} instead of an array."
                )
        (column,) = columns
        return next(iter(self._predictor.predict({column.name: as_trained(rows, column)}).values()))


def _per_row(predictions: npt.NDArray[Any]) -> Any:
    if predictions.ndim == 1:
        return predictions
    return list(predictions.reshape(len(predictions), math.prod(predictions.shape[1:])))


def _load_pyfunc(path: str) -> PyfuncModel:
    """Load the saved model in the folder ``path``; called by MLflow."""
    return PyfuncModel(Predictor(load_model(path)))
