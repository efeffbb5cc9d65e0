"""Padding of rows of different lengths, at their ends, to the longest row of a batch.

Used on *ranks*, for predictions, and when a fit is tried.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import DataError, ParamError


def pad_rows(rows: npt.NDArray[np.object_], *, name: str, value: float | None) -> npt.NDArray[Any]:
    """Return arrays of numbers as one array of shape ``(rows, *longest)``, in the dtype that holds them all.

    Args:
        rows: rows to pad, ``(rows,)``: arrays with the same number of dimensions, or lists of numbers nested equally
            deep.
        name: name of their column, used in error messages.
        value: padding value; None if all rows must have one shape.

    Raises:
        ParamError: if the dtype of the rows cannot hold the padding value.
        DataError: if a row holds values that are not numbers, or rows differ in shape and there is no padding value, or
            they differ in the number of dimensions.
    """
    arrays = [_numbers(row, name) for row in rows]
    if not arrays:
        return np.empty((0, 0))
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1:
        return np.stack(arrays)
    depths = {len(shape) for shape in shapes}
    if value is None or len(depths) > 1:
        some = sorted(shapes)[:: max(1, len(shapes) - 1)][:2]
        raise DataError(
            f"Rows of {name!r} differ in shape, such as {' and '.join(map(str, some))}. "
            + ("Set paddingValue to fill up shorter ones." if len(depths) == 1 else "Make them alike.")
        )
    longest = tuple(np.max(np.array(sorted(shapes)), axis=0))
    dtype = np.result_type(*{array.dtype for array in arrays})
    _check_value(value, dtype, name)
    padded = np.full((len(arrays), *longest), value, dtype)
    for place, array in zip(padded, arrays, strict=True):
        place[tuple(slice(length) for length in array.shape)] = array
    return padded


def _check_value(value: float, dtype: np.dtype[Any], name: str) -> None:
    if dtype.kind == "f":
        return
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if math.isnan(value) or value != int(value) or not least <= value <= most:
        raise ParamError(
            f"Param paddingValue is {value:g}, and {name!r} holds {dtype}. Choose a value of that type."
        )


def _numbers(row: Any, name: str) -> npt.NDArray[Any]:
    array = np.asarray(row)
    if array.dtype == object and array.ndim == 1 and all(isinstance(item, np.ndarray) for item in array):
        # Arrays of inner arrays that differ in length are not padded.
        raise DataError(
            f"Column {name!r} has arrays inside arrays that differ in length. Bring them to one shape with "
            "prepareFeatures."
        )
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"Column {name!r} holds values that are not numbers, such as {row!r:.80}. Convert them with "
            "prepareFeatures."
        )
    return array
