"""Predicts rows of pandas with a saved model: what MLflow's pyfunc calls.

Runs wherever a model is served; imports neither mlflow nor Spark nor Arrow. Columns of pandas are converted to the
dtypes that the model was trained with, and values that these dtypes cannot hold are refused. pandas has one notion of
a missing value, be it None, NaN, NA or NaT, and a null in JSON becomes one of them.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from sparkdl.data import Column
from sparkdl.errors import DataError, ParamError
from sparkdl.model.inputs import rectangular_array
from sparkdl.model.predictor import DEFAULT_BATCH_SIZE, Answer, Predictor, called, has_probabilities
from sparkdl.model.saved_model import SavedModel

if TYPE_CHECKING:
    from sparkdl.model.signature import ModelOutput


class _MissingValueError(Exception):
    """A row holds a missing value that the column cannot have."""


def as_trained(values: Any, column: Column, *, allow_nan: bool = False) -> npt.NDArray[Any]:
    """Return rows as an array of shape ``(rows, *column.shape)`` in the dtype of the column.

    Args:
        values: a value per row: a number, string or the like, or a list or array of them.
        column: as the model was trained on it.
        allow_nan: whether missing values of a column of floating-point numbers become NaN, and are no error.

    Raises:
        DataError: if a row holds a missing value, another number of values, or one that the dtype does not hold: a
            fraction for an integer, a number out of its range, a text for a number.
    """
    allow_nan = allow_nan and _is_floating(column)
    try:
        return _as_trained(values, column, allow_nan)
    except _MissingValueError:
        raise _missing_values(values, column, allow_nan) from None


def _is_floating(column: Column) -> bool:
    kind, dtype = column.element if column.kind == "ragged" else (column.kind, column.dtype)
    return kind == "number" and np.dtype(dtype).kind == "f"


def _as_trained(values: Any, column: Column, allow_nan: bool) -> npt.NDArray[Any]:
    if column.kind == "ragged":
        return _objects(
            [_ragged(row, column.lengths, column, index, allow_nan) for index, row in enumerate(values)]
        )
    if column.kind == "image":
        return _objects(
            [_cast(_array(row, column, index), "uint8", column, index) for index, row in enumerate(values)]
        )
    if column.kind != "number":
        rows = [_row(value, column, index) for index, value in enumerate(values)]
        return np.stack(rows).astype(column.dtype) if rows else np.empty((0, *column.shape), column.dtype)
    numbers = _numbers(values, column, allow_nan)
    if not allow_nan and numbers.dtype.kind == "f" and np.isnan(numbers).any():
        raise _MissingValueError
    return numbers


def _numbers(values: Any, column: Column, allow_nan: bool) -> npt.NDArray[Any]:
    if isinstance(values, pd.Series) and isinstance(values.dtype, np.dtype):  # others may hold nulls
        values = values.to_numpy()
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and len(values):
        _row(values[0], column, 0)
        return _cast(values.reshape(len(values), *column.shape), column.dtype, column)
    rows = [_row(value, column, index, allow_nan) for index, value in enumerate(values)]
    if not rows:
        return np.empty((0, *column.shape), column.dtype)
    if len({row.dtype for row in rows}) == 1:
        return _cast(np.stack(rows), column.dtype, column)
    # One by one, as what holds all of them may hold none exactly.
    return np.stack([_cast(row, column.dtype, column, index) for index, row in enumerate(rows)])


def _row(value: Any, column: Column, index: int, allow_nan: bool = False) -> npt.NDArray[Any]:
    row = _array(value, column, index, allow_nan)
    if row.size != math.prod(column.shape):
        raise DataError(
            f"Row {index} of column {column.name!r} has {row.size} values, and the model takes "
            f"{math.prod(column.shape)}."
        )
    return row.reshape(column.shape)


def _ragged(value: Any, lengths: Sequence[int | None], column: Column, index: int, allow_nan: bool) -> Any:
    """An array, or where inner lists differ in length a list of them, as the feed gives it in training."""
    if _is_null(value):
        raise _MissingValueError
    if None in lengths[1:]:
        if not isinstance(value, list | tuple | np.ndarray):
            raise DataError(
                f"Row {index} of column {column.name!r} holds {value!r} where the model takes lists of lists."
            )
        return [_ragged(inner, lengths[1:], column, index, allow_nan) for inner in value]
    kind, dtype = column.element
    row = _array(value, column, index, allow_nan)
    row = row.reshape(0, *lengths[1:]) if not row.size else row
    if row.shape[1:] != tuple(lengths[1:]):
        raise DataError(
            f"Row {index} of column {column.name!r} has the shape {row.shape}, and the model takes lists of "
            f"{' x '.join(map(str, lengths[1:])) or 'single values'}."
        )
    if kind != "number":
        return row.astype(dtype)
    numbers = _cast(row, dtype, column, index)
    if not allow_nan and numbers.dtype.kind == "f" and np.isnan(numbers).any():
        raise _MissingValueError
    return numbers


def _array(value: Any, column: Column, index: int, allow_nan: bool = False) -> npt.NDArray[Any]:
    """A row as an array, without nulls, or with NaN in their places."""
    kind = column.element[0] if column.kind == "ragged" else column.kind
    try:
        row = rectangular_array(value) if kind in ("number", "image") else np.asarray(value, object)
    except ValueError as error:
        raise DataError(f"Row {index} of column {column.name!r} has lists that differ in length.") from error
    if row.dtype == object:
        is_null = np.array([_is_null(each) for each in row.flat], bool).reshape(row.shape)
        if is_null.any():
            if not allow_nan:
                raise _MissingValueError
            row = np.where(is_null, np.nan, row)
    return row


def _cast(values: npt.NDArray[Any], dtype: str, column: Column, row: int | None = None) -> npt.NDArray[Any]:
    """Numbers in a dtype that holds each of them; of all rows, or of one."""
    if values.dtype == object and not any(isinstance(each, str | bytes) for each in values.flat):
        values = _numbers_of(values, column)
    if not values.size:
        return values.astype(dtype)
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"Column {column.name!r} holds values that are not numbers, such as {values.ravel().tolist()[0]!r}."
        )
    with np.errstate(all="ignore"):
        cast = values.astype(dtype)
    lost = np.isfinite(values) & ~np.isfinite(cast) if cast.dtype.kind == "f" else cast != values
    if not lost.any():
        return cast
    where = tuple(np.argwhere(lost)[0])
    index = where[0] if row is None else row
    if np.isnan(values[where]):
        raise _MissingValueError
    raise DataError(
        f"Row {index} of column {column.name!r} holds {values[where].item()!r}, and the model was trained on {dtype}, "
        "which has no such value."
    )


def _numbers_of(values: npt.NDArray[np.object_], column: Column) -> npt.NDArray[Any]:
    """What pandas or NumPy hold as objects: decimals, integers of more than 64 bits, numbers of several types."""
    try:
        found: npt.NDArray[Any] = np.array(values.tolist())
        return values.astype(np.float64) if found.dtype == object else found
    except (TypeError, ValueError) as error:
        raise DataError(f"Column {column.name!r} holds values that are not numbers: {error}") from error


def _objects(rows: Sequence[Any]) -> npt.NDArray[np.object_]:
    objects = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):
        objects[index] = row
    return objects


def _is_null(value: Any) -> bool:
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))


def _missing_values(values: Any, column: Column, allow_nan: bool) -> DataError:
    """Say in how many rows a column has missing values, and in which one first."""
    rows = [index for index, value in enumerate(values) if _has_missing(value, allow_nan)]
    remedy = (
        " If the model was trained to take NaN, set the param allow_nan to true."
        if _is_floating(column) and not allow_nan
        else ""
    )
    return DataError(
        f"Column {column.name!r} holds null or NaN in {len(rows)} of {len(values)} rows, the first of them row "
        f"{rows[0]}. Fill those values, or leave the rows out.{remedy}"
    )


def _has_missing(value: Any, allow_nan: bool) -> bool:
    """Whether a row has a missing value, also inside of nested lists."""
    if isinstance(value, np.ndarray):
        value = list(value.flat)
    if isinstance(value, list | tuple):
        return any(_has_missing(each, allow_nan) for each in value)
    return _is_null(value) and not (allow_nan and isinstance(value, float | np.floating))


DEFAULT_PARAMS: dict[str, Any] = {"batch_size": DEFAULT_BATCH_SIZE, "device": "cpu", "allow_nan": False}
"""Params of an inference, with their defaults: rows per forward pass, where the module runs, and whether it is given
NaN for missing values."""


def answer_names(outputs: tuple[ModelOutput, ...]) -> list[tuple[str, str | None]]:
    """Return for each output the column of its prediction, and that of its probabilities where it has them.

    ``prediction`` and ``probability`` of one output; of several the label's name, and that with ``_probability``.
    """
    names = [("prediction", "probability")]
    if len(outputs) > 1:
        names = [(output.name, f"{output.name}_probability") for output in outputs]
    return [
        (prediction, probability if has_probabilities(output) else None)
        for (prediction, probability), output in zip(names, outputs, strict=True)
    ]


class PyfuncModel:
    """What MLflow calls: ``predict`` on a DataFrame with the feature columns. Threads may call it at once."""

    def __init__(self, saved: SavedModel) -> None:
        self._saved = saved
        self._on_device = {"cpu": saved}
        self._lock = threading.Lock()

    @property
    def module(self) -> torch.nn.Module:
        """The module, on CPU."""
        return self._saved.module

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return the predictions of every row.

        Args:
            model_input: a pandas DataFrame (or a dict of columns) with the feature columns: numbers, strings, bytes, or
                one list or array per row. A NumPy array of ``(rows, *shape)`` does as well where one column is all
                that the model takes, and one prediction all that it gives.
            params: ``batch_size``, rows per forward pass, default 1024; ``device``, where the module runs: ``"cpu"``
                (default), ``"cuda"``, ``"cuda:1"``; ``allow_nan``, whether the module is given NaN for missing values
                in columns of floating-point numbers, default False.

        Returns:
            A DataFrame on the index of the input: with the column ``prediction``, what the label column calls the
            class or else a number or a list of them; and ``probability``, a list with an entry per class in ascending
            order, where the output tells them. With several label columns these are named like the label and
            ``<label>_probability``. For a NumPy array a NumPy array of the predictions.

        Raises:
            DataError: if a feature column is missing, holds a null or NaN, rows of another length, or what the dtype
                that the model was trained on does not hold; or if an answer would be NaN or infinite.
            ParamError: if a param has a value that cannot work.
        """
        given = {**DEFAULT_PARAMS, **(params or {})}
        predictor, allow_nan = self._predictor(given), given["allow_nan"]
        if not isinstance(allow_nan, bool | np.bool_):
            raise ParamError(f"The param allow_nan is {allow_nan!r}. Give True or False.")
        columns, outputs = predictor.signature.inputs.columns, predictor.signature.outputs
        if isinstance(model_input, np.ndarray):
            return self._predict_array(model_input, predictor, bool(allow_nan))
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        for column in columns:
            if column.name not in frame.columns:
                raise DataError(
                    f"There is no column {column.name!r}. The columns are: {', '.join(map(str, frame.columns))}."
                )
        names = answer_names(outputs)
        wanted: dict[str, tuple[Answer, ...]] = {
            output.name: ("prediction", "probability") if probability else ("prediction",)
            for output, (_, probability) in zip(outputs, names, strict=True)
        }
        rows = {
            column.name: as_trained(frame[column.name], column, allow_nan=bool(allow_nan))
            for column in columns
        }
        found = predictor.answer(rows, wanted)
        for output in outputs:
            _check_finite(found[output.name]["prediction"], output)
        answers: dict[str, Any] = {}
        for output, (prediction, probability) in zip(outputs, names, strict=True):
            answers[prediction] = _per_row(called(found[output.name]["prediction"], output))
            if probability is not None:
                answers[probability] = list(found[output.name]["probability"])
        return pd.DataFrame(answers, index=frame.index)

    def _predictor(self, params: Mapping[str, Any]) -> Predictor:
        batch_size = params["batch_size"]
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ParamError(
                f"The param batch_size is {batch_size!r}. Give a whole number of rows, 1 or more."
            )
        name = str(params["device"])
        with self._lock:
            if name not in self._on_device:
                # A copy, as other calls may be using the module where it is.
                module = copy.deepcopy(self._saved.module).to(_device(name))
                self._on_device[name] = SavedModel(module, self._saved.signature)
            return Predictor(self._on_device[name], batch_size=int(batch_size), device=name)

    def _predict_array(
        self, rows: npt.NDArray[Any], predictor: Predictor, allow_nan: bool
    ) -> npt.NDArray[Any]:
        columns, outputs = predictor.signature.inputs.columns, predictor.signature.outputs
        for what, each in (("takes", columns), ("gives", outputs)):
            if len(each) > 1:
                raise DataError(
                    f"The model {what} {len(each)} columns, {', '.join(one.name for one in each)}: give a DataFrame "
                    f"with {', '.join(column.name for column in columns)} instead of an array."
                )
        (column,) = columns
        answers = predictor.answer(
            {column.name: as_trained(rows, column, allow_nan=allow_nan)}, ("prediction",)
        )
        (output,) = outputs
        predictions = answers[output.name]["prediction"]
        _check_finite(predictions, output)
        return called(predictions, output)


def _check_finite(predictions: npt.NDArray[np.float64], output: ModelOutput) -> None:
    """Check that JSON, which has neither NaN nor infinity, can hold the numbers.

    Raises:
        DataError: if it does not.
    """
    if output.is_sequence or np.isfinite(predictions).all():
        return
    rows = np.asarray(~np.isfinite(predictions).all(axis=tuple(range(1, predictions.ndim))))
    raise DataError(
        f"The model's output for {output.name!r} is infinite in {int(rows.sum())} of {len(rows)} rows, the first of "
        f"them row {int(np.argmax(rows))}. Look for features that are far from those that it was trained on."
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParamError(f"The param device is {name!r}. Give 'cpu', 'cuda' or 'cuda:1'.") from error
    number_of = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= number_of:
        raise ParamError(
            f"The param device is {name!r}, and this process sees {torch.cuda.device_count()} CUDA devices. "
            "Give one that is here, or 'cpu'."
        )
    return device


def _per_row(predictions: npt.NDArray[Any]) -> Any:
    if predictions.ndim == 1:
        return predictions
    return list(predictions.reshape(len(predictions), math.prod(predictions.shape[1:])))
