"""From Arrow to NumPy: what the feed makes of Arrow types, of numbers without a copy of their buffers.

Runs on the *driver* (types) and on the reader threads of every *rank* (buffers).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.errors import ColumnMismatchError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.data.dataset import Column

_PRIMITIVES: dict[pa.DataType, str] = {
    pa.bool_(): "bool",
    pa.int8(): "int8",
    pa.int16(): "int16",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.uint8(): "uint8",
    pa.uint16(): "uint16",
    pa.uint32(): "uint32",
    pa.uint64(): "uint64",
    pa.float16(): "float16",
    pa.float32(): "float32",
    pa.float64(): "float64",
}


_KINDS = {
    "string": (pa.types.is_string, pa.types.is_large_string),
    "binary": (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary),
    "decimal": (pa.types.is_decimal,),
    "date": (pa.types.is_date,),
    "timestamp": (pa.types.is_timestamp,),
}
_DTYPES = {"date": "datetime64[D]", "timestamp": "datetime64[us]"}

LengthRemedy: TypeAlias = "Callable[[Column, int], str]"
"""Says what to do about arrays of another length, of a column and how deep inside it they are."""

IMAGE_FIELDS = ("origin", "height", "width", "nChannels", "mode", "data")
"""Fields of the struct that Spark's ``image`` source reads."""


def is_list(arrow_type: pa.DataType) -> bool:
    """Whether values of the type are lists, of fixed length or not."""
    return bool(
        pa.types.is_list(arrow_type)
        or pa.types.is_large_list(arrow_type)
        or pa.types.is_fixed_size_list(arrow_type)
    )


def describe_type(name: str, arrow_type: pa.DataType) -> tuple[str, str, int]:
    """Return kind and NumPy dtype of a column's elements and how many lists are nested around them.

    They are those of :class:`sparkdl.data.Column`.

    Raises:
        DataError: if the feed has no form for such elements.
    """
    depth, element = 0, arrow_type
    while is_list(element):
        depth, element = depth + 1, element.value_type
    kind = _kind(element)
    if kind is None or (kind == "image" and depth):
        raise DataError(
            f"Column {name!r} has the Arrow type {arrow_type}. Columns have to be numbers, booleans, strings, "
            "binary, decimals, dates, timestamps, images, vectors, or arrays of them: select what is inside it as "
            "columns of their own."
        )
    return kind, _PRIMITIVES.get(element) or _DTYPES.get(kind, "object"), depth


def _kind(element: pa.DataType) -> str | None:
    if element in _PRIMITIVES:
        return "number"
    for kind, checks in _KINDS.items():
        if any(check(element) for check in checks):
            return kind
    is_image = pa.types.is_struct(element) and tuple(each.name for each in element) == IMAGE_FIELDS
    return "image" if is_image else None


def shape_of_first_row(array: pa.ChunkedArray) -> tuple[int, ...]:
    """Return the lengths of the lists in the first row, outermost first; a scalar has ``()``."""
    values = array.slice(0, 1).combine_chunks()
    shape: list[int] = []
    while is_list(values.type):
        values = values.flatten() if not shape else values.slice(0, 1).flatten()
        shape.append(len(values))
    return tuple(shape)


def to_numpy(
    array: pa.ChunkedArray, column: Column, remedy: LengthRemedy | None = None
) -> npt.NDArray[np.generic]:
    """Return the values of a column as one array of shape ``(num_rows, *column.shape)``.

    The result is a writable view of Arrow's buffer wherever Arrow made that buffer for this read alone, and a
    copy otherwise (booleans, which Arrow packs in bits; several chunks).

    Args:
        array: the values.
        column: what they have to be.
        remedy: what the reader of arrays of another length is told to do.

    Raises:
        DataError: if there are nulls, lists of another length, elements of another type than the column
            says, or timestamps that microseconds in 64 bits do not reach.
    """
    try:
        return _to_numpy(array, column, remedy)
    except pa.ArrowException as error:
        raise DataError(
            f"Column {column.name!r} of the type {array.type} cannot be given as {_describe(column)}: "
            f"{' '.join(str(error).split())}"
        ) from error


def _to_numpy(array: pa.ChunkedArray, column: Column, remedy: LengthRemedy | None) -> npt.NDArray[np.generic]:
    values = (
        array.chunk(0)
        if array.num_chunks == 1
        else pa.concat_arrays(array.chunks or [pa.array([], array.type)])
    )
    if column.kind in {"ragged", "image"}:
        return _objects_of_rows(values, column, remedy)
    num_rows = len(values)
    for level in range(len(column.shape)):
        _check_no_nulls(values, column)
        values = _flatten(values, level, column, remedy)
    _check_no_nulls(values, column)
    if column.kind != "number":
        return _without_number_type(values, column).reshape((num_rows, *column.shape))
    if _PRIMITIVES.get(values.type) != column.dtype:
        raise _other_type(array.type, column)
    return _primitive_to_numpy(values, column.dtype).reshape((num_rows, *column.shape))


def _without_number_type(values: pa.Array, column: Column) -> npt.NDArray[np.generic]:
    """Return strings, binary, decimals, dates or timestamps as they are described in :class:`Column`."""
    if _kind(values.type) != column.kind:
        raise _other_type(values.type, column)
    if column.kind == "date":
        return np.asarray(values.cast(pa.date32()).cast(pa.int32())).astype(column.dtype)
    if column.kind == "timestamp":
        if values.type.unit == "ns":
            return (np.asarray(values.cast(pa.int64())) // 1000).view(column.dtype)
        return np.array(values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())).view(column.dtype)
    objects = np.empty(len(values), dtype=object)
    objects[:] = values.to_pylist()
    return objects


def _objects_of_rows(
    values: pa.Array, column: Column, remedy: LengthRemedy | None
) -> npt.NDArray[np.generic]:
    """Return one array per row: of a ragged column, or an image."""
    _check_no_nulls(values, column)
    rows = np.empty(len(values), dtype=object)
    if column.kind == "image":
        if _kind(values.type) != "image":
            raise _other_type(values.type, column)
        rows[:] = [_image(row, column) for row in values.to_pylist()]
        return rows
    for index, row in enumerate(_ragged_rows(values, column, column.lengths, remedy)):
        rows[index] = row
    return rows


def _ragged_rows(
    values: pa.Array, column: Column, lengths: tuple[int | None, ...], remedy: LengthRemedy | None
) -> list[Any]:
    """Return for every list an array, of arrays where inner lists differ in length, too."""
    if not is_list(values.type):
        raise _other_type(values.type, column)
    _check_no_nulls(values, column)
    kind, dtype = column.element
    inner = values.flatten()
    elements: Any
    if None in lengths[1:]:
        elements = _ragged_rows(inner, column, lengths[1:], remedy)
    else:
        shape = tuple(length for length in lengths[1:] if length is not None)
        as_elements = dataclasses.replace(column, kind=kind, dtype=dtype, shape=shape, lengths=())
        elements = to_numpy(pa.chunked_array([inner]), as_elements, remedy)
    ends = np.cumsum(np.asarray(pc.list_value_length(values)))
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    return [elements[start:end] for start, end in zip(starts, ends, strict=True)]


def _image(row: dict[str, Any], column: Column) -> npt.NDArray[np.uint8]:
    shape = row["height"], row["width"], row["nChannels"]
    data = row["data"]
    if data is None or len(data) != math.prod(shape):
        found = "no bytes" if data is None else f"{len(data)} bytes"
        raise DataError(
            f"Column {column.name!r} has an image of {shape[0]} x {shape[1]} x {shape[2]} that holds {found}: "
            f"{row['origin']}. Leave such rows out."
        )
    return np.frombuffer(data, np.uint8).reshape(shape).copy()


def _other_type(found: pa.DataType, column: Column) -> ColumnMismatchError:
    return ColumnMismatchError(
        f"Column {column.name!r} holds {found} here, but {_describe(column)} elsewhere in the data."
    )


def _check_no_nulls(values: pa.Array, column: Column) -> None:
    if values.null_count:
        raise DataError(
            f"Column {column.name!r} has {values.null_count} nulls. Fill those values, or leave their rows out, and "
            "write the files again."
        )


def _flatten(values: pa.Array, level: int, column: Column, remedy: LengthRemedy | None) -> pa.Array:
    length = column.shape[level]
    if not is_list(values.type):
        raise _other_type(values.type, column)
    if pa.types.is_fixed_size_list(values.type):
        lengths = np.array([values.type.list_size])
    else:
        lengths = np.diff(values.offsets.to_numpy())
    if len(values) and (lengths != length).any():
        least, greatest = lengths.min(), lengths.max()
        found = f"{least}" if least == greatest else f"{least} to {greatest}"
        more = f" {remedy(column, level)}" if remedy is not None else ""
        raise ColumnMismatchError(
            f"Column {column.name!r} has arrays of {found} elements; all must have {length}.{more}"
        )
    return values.flatten()


def _primitive_to_numpy(values: pa.Array, dtype: str) -> npt.NDArray[np.generic]:
    buffer = values.buffers()[1]
    if dtype == "bool" or buffer is None:
        return np.asarray(values.to_numpy(zero_copy_only=False), dtype=dtype).copy()
    # frombuffer rather than to_numpy(): it is writable, as torch wants it, where the buffer is ours.
    array = np.frombuffer(buffer, dtype=dtype)[values.offset : values.offset + len(values)]
    return array if array.flags.writeable else array.copy()


def _describe(column: Column) -> str:
    shape = " x ".join(map(str, column.shape))
    element = column.dtype if column.kind == "number" else column.kind
    return f"arrays of {shape} {element}" if math.prod(column.shape) and column.shape else element
