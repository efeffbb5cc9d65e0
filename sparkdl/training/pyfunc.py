"""Serves a saved model to MLflow as a pyfunc: pandas in, predictions out. Imports neither mlflow nor Spark.

MLflow finds :func:`_load_pyfunc` by the name ``loader_module="sparkdl.training.pyfunc"``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sparkdl.data import Column
from sparkdl.errors import DataError
from sparkdl.training.predictor import Predictor
from sparkdl.training.saved_model import load_model


class PyfuncModel:
    """What MLflow calls: ``predict`` on a DataFrame with the feature columns."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the predictions of every row.

        Args:
            model_input: a pandas DataFrame (or a dict of columns) with the feature columns: numbers, strings, bytes, or
                one list or array per row. A NumPy array of ``(rows, *shape)`` does as well where one column of
                numbers is all that the model takes.
            params: unused; part of MLflow's protocol.

        Returns:
            A DataFrame on the index of the input, with the column ``prediction``, or with one named like each label
            column where there are several; a NumPy array for a NumPy array.

        Raises:
            DataError: if a feature column is missing, holds a null, or rows of another length.
        """
        del params
        columns = self._predictor.signature.inputs.columns
        if isinstance(model_input, np.ndarray):
            if len(columns) > 1:
                raise DataError(
                    f"The model takes {len(columns)} columns: give a DataFrame with "
                    f"{', '.join(column.name for column in columns)} instead of an array."
                )
            return next(iter(self._predictor.predict({columns[0].name: model_input}).values()))
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        for column in columns:
            if column.name not in frame.columns:
                raise DataError(
                    f"There is no column {column.name!r}. The columns are: {', '.join(map(str, frame.columns))}."
                )
        found = self._predictor.predict(
            {column.name: _values(frame[column.name], column) for column in columns}
        )
        if len(found) == 1:
            found = {"prediction": next(iter(found.values()))}
        return pd.DataFrame({name: _per_row(values) for name, values in found.items()}, index=frame.index)


def _per_row(predictions: npt.NDArray[Any]) -> Any:
    if predictions.ndim == 1:
        return predictions
    return list(predictions.reshape(len(predictions), math.prod(predictions.shape[1:])))


def _values(values: Any, column: Column) -> npt.NDArray[Any]:
    if column.kind == "number":
        return _stack(values, column)
    rows = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise DataError(f"Row {index} of column {column.name!r} holds a null.")
        rows[index] = np.asarray(value) if column.kind in ("ragged", "image") else value
    return rows


def _stack(values: Any, column: Column) -> npt.NDArray[np.generic]:
    size = math.prod(column.shape)
    rows = [np.asarray(value) for value in values]
    for index, row in enumerate(rows):
        if row.dtype == object and any(value is None for value in row.flat):
            raise DataError(f"Row {index} of column {column.name!r} holds a null.")
        if row.size != size:
            raise DataError(
                f"Row {index} of column {column.name!r} has {row.size} values, and the model takes {size}."
            )
    try:
        dtype = np.int64 if np.issubdtype(np.dtype(column.dtype), np.integer) else np.float64
        stacked = np.stack(rows).astype(dtype) if rows else np.empty((0, *column.shape), dtype)
    except (TypeError, ValueError) as error:
        raise DataError(f"Column {column.name!r} holds values that are not numbers: {error}") from error
    return stacked.reshape(len(rows), *column.shape)


def _load_pyfunc(path: str) -> PyfuncModel:
    """Load the saved model in the folder ``path``; called by MLflow."""
    return PyfuncModel(Predictor(load_model(path)))
