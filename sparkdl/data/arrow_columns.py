"""From Arrow to NumPy: which Arrow types are columns of numbers, and their buffers as arrays without a copy.

Runs on the *driver* (types) and on the reader threads of every *rank* (buffers).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.errors import DataError

if TYPE_CHECKING:
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


def is_list(arrow_type: pa.DataType) -> bool:
    """Whether values of the type are lists, of fixed length or not."""
    return bool(
        pa.types.is_list(arrow_type)
        or pa.types.is_large_list(arrow_type)
        or pa.types.is_fixed_size_list(arrow_type)
    )


def describe_type(name: str, arrow_type: pa.DataType) -> tuple[str, int]:
    """Return the NumPy dtype of a column's elements and how many lists are nested around them.

    Raises:
        DataError: if the elements are no numbers or booleans.
    """
    depth, element = 0, arrow_type
    while is_list(element):
        depth, element = depth + 1, element.value_type
    if element not in _PRIMITIVES:
        raise DataError(
            f"Column {name!r} has the Arrow type {arrow_type}. Columns have to be numbers, booleans, "
            "vectors, or arrays of them of a fixed length: encode or cast it first."
        )
    return _PRIMITIVES[element], depth


def shape_of_first_row(array: pa.ChunkedArray) -> tuple[int, ...]:
    """Return the lengths of the lists in the first row, outermost first; a scalar has ``()``."""
    values = array.slice(0, 1).combine_chunks()
    shape: list[int] = []
    while is_list(values.type):
        values = values.flatten() if not shape else values.slice(0, 1).flatten()
        shape.append(len(values))
    return tuple(shape)


def to_numpy(array: pa.ChunkedArray, column: Column) -> npt.NDArray[np.generic]:
    """Return the values of a column as one array of shape ``(num_rows, *column.shape)``.

    The result is a writable view of Arrow's buffer wherever Arrow made that buffer for this read alone, and a
    copy otherwise (booleans, which Arrow packs in bits; several chunks).

    Raises:
        DataError: if there are nulls, lists of another length, or elements of another type than the column
            says.
    """
    values = (
        array.chunk(0)
        if array.num_chunks == 1
        else pa.concat_arrays(array.chunks or [pa.array([], array.type)])
    )
    num_rows = len(values)
    for length in column.shape:
        _check_no_nulls(values, column)
        values = _flatten(values, length, column)
    _check_no_nulls(values, column)
    if _PRIMITIVES.get(values.type) != column.dtype:
        raise DataError(
            f"Column {column.name!r} holds {array.type} here, but {_describe(column)} elsewhere in the data."
        )
    return _primitive_to_numpy(values, column.dtype).reshape((num_rows, *column.shape))


def _check_no_nulls(values: pa.Array, column: Column) -> None:
    if values.null_count:
        raise DataError(
            f"Column {column.name!r} has {values.null_count} nulls. Fill or drop them before the fit."
        )


def _flatten(values: pa.Array, length: int, column: Column) -> pa.Array:
    if not is_list(values.type):
        raise DataError(
            f"Column {column.name!r} holds {values.type} here, but {_describe(column)} elsewhere in the data."
        )
    if pa.types.is_fixed_size_list(values.type):
        lengths = np.array([values.type.list_size])
    else:
        lengths = np.diff(values.offsets.to_numpy())
    if len(values) and (lengths != length).any():
        least, greatest = lengths.min(), lengths.max()
        found = f"{least}" if least == greatest else f"{least} to {greatest}"
        raise DataError(f"Column {column.name!r} has arrays of {found} elements; all must have {length}.")
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
    return f"arrays of {shape} {column.dtype}" if math.prod(column.shape) and column.shape else column.dtype
