"""Columns of pandas as a model was trained on them: in their dtypes, and nothing that these do not hold.

Runs wherever a model is served; imports neither Spark nor Arrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sparkdl.data import Column
from sparkdl.errors import DataError
from sparkdl.training.rectangular import rectangular_array


def as_trained(values: Any, column: Column) -> npt.NDArray[Any]:
    """Return rows as an array of shape ``(rows, *column.shape)`` in the dtype of the column.

    Args:
        values: a value per row: a number, string or the like, or a list or array of them.
        column: as the model was trained on it.

    Raises:
        DataError: if a row holds a null, another number of values, or one that the dtype does not hold: a fraction
            for an integer, a number out of its range, a text for a number.
    """
    if column.kind == "ragged":
        return _objects([_ragged(row, column.lengths, column, index) for index, row in enumerate(values)])
    if column.kind == "image":
        return _objects(
            [_cast(_array(row, column, index), "uint8", column, index) for index, row in enumerate(values)]
        )
    if column.kind != "number":
        rows = [_row(value, column, index) for index, value in enumerate(values)]
        return np.stack(rows).astype(column.dtype) if rows else np.empty((0, *column.shape), column.dtype)
    return _numbers(values, column)


def _numbers(values: Any, column: Column) -> npt.NDArray[Any]:
    if isinstance(values, pd.Series) and isinstance(values.dtype, np.dtype):  # others may hold nulls
        values = values.to_numpy()
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and len(values):
        _row(values[0], column, 0)
        return _cast(values.reshape(len(values), *column.shape), column.dtype, column)
    rows = [_row(value, column, index) for index, value in enumerate(values)]
    if not rows:
        return np.empty((0, *column.shape), column.dtype)
    if len({row.dtype for row in rows}) == 1:
        return _cast(np.stack(rows), column.dtype, column)
    # One by one, as what holds all of them may hold none exactly.
    return np.stack([_cast(row, column.dtype, column, index) for index, row in enumerate(rows)])


def _row(value: Any, column: Column, index: int) -> npt.NDArray[Any]:
    row = _array(value, column, index)
    if row.size != math.prod(column.shape):
        raise DataError(
            f"Row {index} of column {column.name!r} has {row.size} values, and the model takes "
            f"{math.prod(column.shape)}."
        )
    return row.reshape(column.shape)


def _ragged(value: Any, lengths: Sequence[int | None], column: Column, index: int) -> Any:
    """An array, or where inner lists differ in length a list of them, as the feed gives it in training."""
    if None in lengths[1:]:
        return [_ragged(inner, lengths[1:], column, index) for inner in value]
    kind, dtype = column.element
    row = _array(value, column, index)
    row = row.reshape(0, *lengths[1:]) if not row.size else row
    if row.shape[1:] != tuple(lengths[1:]):
        raise DataError(
            f"Row {index} of column {column.name!r} has the shape {row.shape}, and the model takes lists of "
            f"{' x '.join(map(str, lengths[1:])) or 'single values'}."
        )
    return _cast(row, dtype, column, index) if kind == "number" else row.astype(dtype)


def _array(value: Any, column: Column, index: int) -> npt.NDArray[Any]:
    """A row as an array, without nulls."""
    kind = column.element[0] if column.kind == "ragged" else column.kind
    try:
        row = rectangular_array(value) if kind in ("number", "image") else np.asarray(value, object)
    except ValueError as error:
        raise DataError(f"Row {index} of column {column.name!r} has lists that differ in length.") from error
    if row.dtype == object and any(_is_null(each) for each in row.flat):
        raise _holds_null(column, index)
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
    place = tuple(np.argwhere(lost)[0])
    index = place[0] if row is None else row
    if np.isnan(values[place]):
        raise _holds_null(column, index)
    raise DataError(
        f"Row {index} of column {column.name!r} holds {values[place].item()!r}, and the model was trained on {dtype}, "
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


def _holds_null(column: Column, index: int) -> DataError:
    return DataError(f"Row {index} of column {column.name!r} holds a null.")
