"""From NumPy to Arrow: values that were computed from a row group, as columns of a table.

Runs on the reader threads of every *rank*; the way back is :func:`sparkdl.data.arrow_columns.to_numpy`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.data.dataset import Column


def to_arrow(values: npt.NDArray[Any] | Sequence[Any], column: Column) -> pa.Array:
    """Return the values of all rows as an Arrow array.

    Args:
        values: one item per row, each a number or array of ``column.shape``.
        column: what they have to be; numbers are cast within their kind, so also to less precision.

    Raises:
        DataError: if a value is missing, has another shape, or is of another kind.
    """
    if column.kind == "ragged":
        return _ragged(list(values), column)
    if column.dtype == "object":  # strings and the like, which NumPy has no types of
        return pa.array(list(values))
    rows = _stacked(values, column)
    array = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for length in reversed(column.shape):
        array = pa.FixedSizeListArray.from_arrays(array, length)
    return array


def _ragged(rows: list[Any], column: Column) -> pa.Array:
    """Return arrays that differ in their first dimension alone, as lists."""
    if None in column.lengths[1:]:
        return pa.array(rows)
    inner = tuple(length for length in column.lengths[1:] if length is not None)
    for number, row in enumerate(rows):
        if row is None or np.ndim(row) != len(column.lengths) or np.shape(row)[1:] != inner:
            found = "no value" if row is None else f"a value of the shape {np.shape(row)}"
            raise DataError(
                f"Column {column.name!r} has {found} in row {number} of those that were read; all must have the shape "
                f"{column.lengths}."
            )
    dtype = column.element[1]
    elements = np.concatenate([np.empty((0, *inner), dtype), *rows])
    as_numbers = dataclasses.replace(column, kind="number", dtype=dtype, shape=inner, lengths=())
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), to_arrow(elements, as_numbers))


def _stacked(values: npt.NDArray[Any] | Sequence[Any], column: Column) -> npt.NDArray[Any]:
    items = values if isinstance(values, np.ndarray) and values.dtype != object else list(values)
    for number, item in enumerate(items if isinstance(items, list) else ()):
        if item is None:
            raise DataError(f"Column {column.name!r} has no value in row {number} of those that were read.")
        if np.shape(item) != column.shape:
            raise DataError(
                f"Column {column.name!r} has a value of the shape {np.shape(item)} in row {number} of those that were "
                f"read; all must have {column.shape}."
            )
    rows = np.asarray(items) if len(items) else np.empty(0, column.dtype)
    if rows.size and not np.can_cast(rows.dtype, column.dtype, "same_kind"):
        raise DataError(f"Column {column.name!r} holds {rows.dtype}, which is no {column.dtype}.")
    return rows.astype(column.dtype, copy=False).reshape((len(items), *column.shape))
