"""Converts the pandas columns of a served request to the dtypes of the model's training data.

Runs wherever a model is served; imports neither mlflow nor Spark nor Arrow. Values that the dtype of the training
cannot hold raise an error, and so do timestamps without a time zone if the training had instants, and
those with one if it had clock times or dates. Spark's
``toPandas()`` and pandas UDFs make such timestamps of instants, in the session's time zone; when its clock is put back,
two instants have one clock time. pandas treats None, NaN, NA and NaT alike as missing values, and a null in JSON
becomes one of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sparkdl.data import Column
from sparkdl.errors import DataError
from sparkdl.model.inputs import rectangular_array


class _MissingValueError(Exception):
    """A row holds a missing value that the column cannot have."""


def to_column_dtype(values: Any, column: Column, *, allow_nan: bool = False) -> npt.NDArray[Any]:
    """Return rows as an array of shape ``(rows, *column.shape)`` in the dtype of the column.

    Args:
        values: one value per row: a number, string or the like, or a list or array of them.
        column: the column on which the model was trained.
        allow_nan: whether missing values in a column of floating-point numbers become NaN instead of raising an error.

    Raises:
        DataError: if a row holds a missing value that the model does not take, a wrong number of values, or a value
            that the dtype cannot hold: a fraction for an integer, a number out of its range, a text for a number.
    """
    if column.takes_nulls:
        return _with_missing(values, column)
    allow_nan = allow_nan and _is_floating(column)
    try:
        return _to_column_dtype(values, column, allow_nan)
    except _MissingValueError:
        raise _missing_values(values, column, allow_nan) from None


def _with_missing(values: Any, column: Column) -> npt.NDArray[Any]:
    """Return rows as for :func:`to_column_dtype`, with NaN, NaT or None for missing values and in missing rows."""
    rows = list(values)
    present = [index for index, row in enumerate(rows) if not _is_null(row)]
    shown = replace(column, takes_nulls=False)
    given = _to_column_dtype([rows[index] for index in present], shown, allow_nan=column.kind == "number")
    missing = {"f": np.nan, "M": "NaT"}.get(given.dtype.kind)
    whole = np.full((len(rows), *column.shape), missing, given.dtype)
    whole[present] = given
    return whole


def _is_floating(column: Column) -> bool:
    kind, dtype = column.element if column.kind == "ragged" else (column.kind, column.dtype)
    return kind == "number" and np.dtype(dtype).kind == "f"


def _to_column_dtype(values: Any, column: Column, allow_nan: bool) -> npt.NDArray[Any]:
    if column.kind == "ragged":
        return _objects(
            [_to_ragged(row, column.lengths, column, index, allow_nan) for index, row in enumerate(values)]
        )
    if column.kind == "image":
        return _objects(
            [_cast(_array(row, column, index), "uint8", column, index) for index, row in enumerate(values)]
        )
    if column.kind != "number":
        rows = [_row(value, column, index) for index, value in enumerate(values)]
        return _to_dtype(np.stack(rows), column) if rows else np.empty((0, *column.shape), column.dtype)
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
    # One by one, as a dtype that holds all rows may hold none of them exactly.
    return np.stack([_cast(row, column.dtype, column, index) for index, row in enumerate(rows)])


def _row(value: Any, column: Column, index: int, allow_nan: bool = False) -> npt.NDArray[Any]:
    row = _array(value, column, index, allow_nan)
    if row.size != math.prod(column.shape):
        raise DataError(
            f"Row {index} of column {column.name!r} has {row.size} values, and the model takes "
            f"{math.prod(column.shape)}."
        )
    if row.ndim > 1 and _long_sides(row.shape) != _long_sides(column.shape):
        raise DataError(
            f"Row {index} of column {column.name!r} has the shape {row.shape}, and the model takes {column.shape}, or "
            f"one list of {row.size} values."
        )
    return row.reshape(column.shape)


def _long_sides(shape: Sequence[int]) -> list[int]:
    """The lengths of the dimensions that say how values are arranged."""
    return [length for length in shape if length != 1]


def _to_ragged(value: Any, lengths: Sequence[int | None], column: Column, index: int, allow_nan: bool) -> Any:
    """A ragged row as in training: an array, or a list of arrays if inner lists may differ in length."""
    if _is_null(value):
        raise _MissingValueError
    if None in lengths[1:]:
        if not isinstance(value, list | tuple | np.ndarray):
            raise DataError(
                f"Row {index} of column {column.name!r} holds {value!r} where the model takes lists of lists."
            )
        return [_to_ragged(inner, lengths[1:], column, index, allow_nan) for inner in value]
    kind, dtype = column.element
    row = _array(value, column, index, allow_nan)
    row = row.reshape(0, *lengths[1:]) if not row.size else row
    if not row.ndim or row.shape[1:] != tuple(lengths[1:]):
        raise DataError(
            f"Row {index} of column {column.name!r} has the shape {row.shape}, and the model takes lists of "
            f"{' x '.join(map(str, lengths[1:])) or 'single values'}."
        )
    if kind != "number":
        return _to_dtype(row, column)
    numbers = _cast(row, dtype, column, index)
    if not allow_nan and numbers.dtype.kind == "f" and np.isnan(numbers).any():
        raise _MissingValueError
    return numbers


def _array(value: Any, column: Column, index: int, allow_nan: bool = False) -> npt.NDArray[Any]:
    """A row as an array without nulls; with ``allow_nan``, NaN replaces them."""
    kind = column.element[0] if column.kind == "ragged" else column.kind
    if isinstance(value, np.ndarray | np.datetime64) and value.dtype.kind == "M":
        value = value.astype("datetime64[us]")  # as objects, nanoseconds would be integers
    if isinstance(
        value, bytearray | memoryview
    ):  # an array of its bytes, to NumPy; toPandas() makes bytearrays
        value = bytes(value)
    try:
        row = rectangular_array(value) if kind in ("number", "image") else np.asarray(value, object)
    except ValueError as error:
        raise DataError(f"Row {index} of column {column.name!r} has lists that differ in length.") from error
    if row.dtype == object:
        is_null = np.array([_is_null(item) for item in row.flat], bool).reshape(row.shape)
        if is_null.any():
            if not allow_nan:
                raise _MissingValueError
            row = np.where(is_null, np.nan, row)
    return row


def _to_dtype(values: npt.NDArray[np.object_], column: Column) -> npt.NDArray[Any]:
    """Values that are not numbers in the dtype of the column."""
    kind, dtype = column.element if column.kind == "ragged" else (column.kind, column.dtype)
    if kind not in ("date", "timestamp"):
        return values.astype(dtype)
    to_number = _days if kind == "date" else _microseconds
    numbers = [to_number(value, column) for value in values.flat]
    return np.array(numbers, np.int64).view(dtype).reshape(values.shape)


def _days(value: Any, column: Column) -> int:
    """A date as days since 1970. No numbers: pandas and JavaScript write milliseconds, Arrow and NumPy days."""
    if isinstance(value, int | float | np.number):
        raise DataError(
            f"Column {column.name!r} holds {value!r}, which is not a date. Give one as '2026-01-31'."
        )
    days, rest = divmod(_microseconds(value, column), _MICROSECONDS_OF_DAY)
    if rest:
        raise DataError(
            f"Column {column.name!r} holds {value!r}, and the model was trained on dates: give that without the time."
        )
    return days


_MICROSECONDS_OF_DAY = 24 * 60 * 60 * 10**6

_ISO_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d(?:[T ]\d\d(?::?\d\d(?::?\d\d(?:\.\d+)?)?)?)?)(?:(Z)|([+-]\d\d):?(\d\d)?)?",
    re.IGNORECASE,
)
_EPOCH = datetime(1970, 1, 1)


def _microseconds(value: Any, column: Column) -> int:
    """A timestamp as microseconds since 1970, rounded down; numbers are such microseconds."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < 2**63:
        return int(value)
    if isinstance(value, float | np.floating) and float(value).is_integer() and abs(int(value)) < 2**53:
        return int(value)
    moment = _parse(value) if isinstance(value, str) else value
    if isinstance(moment, pd.Timestamp):
        moment = moment.to_pydatetime(warn=False)
    elif isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime.combine(moment, time())
    if isinstance(moment, datetime):
        has_zone = moment.utcoffset() is not None
        micros = (moment - (_EPOCH.replace(tzinfo=timezone.utc) if has_zone else _EPOCH)) // timedelta(
            microseconds=1
        )
    elif isinstance(moment, np.datetime64):
        has_zone, micros = False, int(moment.astype("datetime64[us]").astype(np.int64))
    else:
        kind = "date" if "date" in (column.kind, *column.element) else "timestamp"
        raise DataError(f"Column {column.name!r} holds {value!r}, which is not a {kind}.")
    if column.is_utc and not has_zone:
        raise DataError(
            f"Column {column.name!r} holds the clock time {value} without a time zone, and the model was trained on "
            "instants: which one that is depends on the zone. Give whole microseconds since 1970 in UTC, which Spark's "
            "unix_micros(column) makes, before toPandas() and for spark_udf, too; or times with their zone, as "
            "tz_localize makes in pandas, and 2026-01-31T12:00:00Z is in JSON."
        )
    if has_zone and not column.is_utc:
        raise DataError(
            f"Column {column.name!r} holds the instant {value}, and the model was trained on clock times or dates, "
            "which have no time zone. Give what clock or calendar showed, without the zone."
        )
    return micros


def _parse(text: str) -> Any:
    match = _ISO_TIME.fullmatch(text.strip())
    try:
        if match is None:
            return text
        moment = np.datetime64(match[1].replace(" ", "T"), "us").item()
        if match[2] is None and match[3] is None:
            return moment
        minutes = int(f"{match[3][0]}{match[4] or 0}") if match[3] else 0
        return moment.replace(tzinfo=timezone(timedelta(hours=int(match[3] or 0), minutes=minutes)))
    except ValueError:
        return text


def _cast(values: npt.NDArray[Any], dtype: str, column: Column, row: int | None = None) -> npt.NDArray[Any]:
    """Cast numbers to a dtype that must hold each of them; ``row`` is the index of their row, None for all rows."""
    if values.dtype == object and not any(isinstance(item, str | bytes) for item in values.flat):
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
    """Numbers that pandas or NumPy hold as objects: decimals, integers above 64 bits, numbers of several types."""
    try:
        array: npt.NDArray[Any] = np.array(values.tolist())
        return values.astype(np.float64) if array.dtype == object else array
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
    """Return the error that says in how many rows a column has missing values, and which row is the first."""
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
        return any(_has_missing(item, allow_nan) for item in value)
    return _is_null(value) and not (allow_nan and isinstance(value, float | np.floating))
