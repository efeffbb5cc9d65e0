"""Conversion between Arrow and NumPy, for the column types that the feed supports.

Types are described on the *driver*; values are converted on the reader threads of every *rank*. Numbers become NumPy
arrays without copying their Arrow buffers. :func:`to_arrow` converts values that were computed from a row group
back to columns of a table.

Checksums of Parquet pages are verified where pyarrow supports it, from version 15 on.

The memory of values that NumPy holds as Python objects is estimated from the first rows of a dataset, mostly on the
*driver*. A footer gives only their encoded size. For a string in a dictionary that is a fraction of a byte, while
a Python string takes 49 bytes or more.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkdl.errors import ColumnMismatchError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.data.dataset.dataset import Column

_logger = logging.getLogger(__name__)


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
"""Function that returns the advice for arrays of another length, from the column and their level inside it."""

IMAGE_FIELDS = ("origin", "height", "width", "nChannels", "mode", "data")
"""Fields of the struct that Spark's ``image`` source reads."""

ENCODED_FIELDS = ("bytes", "path")
"""Fields, sorted, of the struct in which Parquet files of Hugging Face's datasets hold an encoded image or sound."""


def is_list(arrow_type: pa.DataType) -> bool:
    """Whether values of the type are lists, of fixed length or not."""
    return bool(
        pa.types.is_list(arrow_type)
        or pa.types.is_large_list(arrow_type)
        or pa.types.is_fixed_size_list(arrow_type)
    )


_VIEWS = {"string_view": pa.string(), "binary_view": pa.binary()}
"""Types of Arrow's newer layouts, which DataFusion writes, by their names: pyarrow 15 and older do not have them."""


def plain_type(arrow_type: pa.DataType) -> pa.DataType:
    """Return the type in which the values are stored: without dictionaries (categories of pandas), views, extensions.

    Extensions are UUID and JSON of DuckDB, tensors of Arrow, and those that other libraries have registered.
    """
    if pa.types.is_dictionary(arrow_type):
        return plain_type(arrow_type.value_type)
    if isinstance(arrow_type, pa.BaseExtensionType):
        return plain_type(arrow_type.storage_type)
    if str(arrow_type) in _VIEWS:
        return _VIEWS[str(arrow_type)]
    if not is_list(arrow_type) or (element := plain_type(arrow_type.value_type)) == arrow_type.value_type:
        return arrow_type
    if pa.types.is_large_list(arrow_type):
        return pa.large_list(element)
    return pa.list_(element, getattr(arrow_type, "list_size", -1))


def value_type(arrow_type: pa.DataType) -> pa.DataType:
    """Return the type of a column's values: the stored one, and with one type for both widths of offsets.

    pandas 3 and polars write ``large_string`` where pandas 2 and Spark write ``string``.
    """
    plain = plain_type(arrow_type)
    if pa.types.is_large_string(plain):
        return pa.string()
    if pa.types.is_large_binary(plain):
        return pa.binary()
    if pa.types.is_large_list(plain):
        return pa.list_(value_type(plain.value_type))
    if is_list(plain):
        return pa.list_(value_type(plain.value_type), getattr(plain, "list_size", -1))
    if pa.types.is_struct(plain):
        return pa.struct([field.with_type(value_type(field.type)) for field in plain])
    return plain


def plain_columns(table: pa.Table, names: Sequence[str] | None) -> pa.Table:
    """Return the columns of these names, or all if that is None, in plain types; missing ones are left out.

    Asked for a column ``y.prev``, Arrow also reads the field ``prev`` of a column ``y``.
    """
    if names is not None:
        wanted = frozenset(names)
        table = table.select([index for index, name in enumerate(table.column_names) if name in wanted])
    for index, field in enumerate(table.schema):
        decoded = plain_type(field.type)
        if decoded != field.type:
            table = table.set_column(index, field.name, table.column(index).cast(decoded))
    return table


def describe_type(name: str, arrow_type: pa.DataType) -> tuple[str, str, int]:
    """Return the kind and NumPy dtype of a column's elements, and the number of lists nested around them.

    Kind and dtype are those of :class:`sparkdl.data.Column`.

    Raises:
        DataError: if the feed does not support such elements.
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
    names = tuple(field.name for field in element) if pa.types.is_struct(element) else ()
    if tuple(sorted(names)) == ENCODED_FIELDS and _kind(element.field("bytes").type) == "binary":
        return "binary"
    return "image" if names == IMAGE_FIELDS else None


def content_leaf(arrow_type: pa.DataType) -> int:
    """Return which leaf of a column in Parquet holds its values; for a struct, the leaf of the bytes or pixels."""
    while is_list(arrow_type):
        arrow_type = arrow_type.value_type
    is_encoded = pa.types.is_struct(arrow_type) and _kind(arrow_type) == "binary"
    return 0 if is_encoded and arrow_type.field(0).name == "bytes" else -1


def shape_of_first_row(array: pa.ChunkedArray) -> tuple[int, ...]:
    """Return the lengths of the first lists that are not null, outermost first; 0 for none. A scalar has ``()``."""
    values = array.combine_chunks()
    shape: list[int] = []
    while is_list(values.type):
        values = values.drop_null()
        shape.append(len(values.slice(0, 1).flatten()))
        values = values.flatten()
    return tuple(shape)


def to_numpy(
    array: pa.ChunkedArray, column: Column, remedy: LengthRemedy | None = None
) -> npt.NDArray[np.generic]:
    """Return the values of a column as one array of shape ``(num_rows, *column.shape)``.

    The result is a writable view of Arrow's buffer if Arrow made that buffer only for this read, and a
    copy otherwise (booleans, which Arrow packs in bits; several chunks).

    Args:
        array: values of the column.
        column: description that the values must match.
        remedy: returns the advice in the error for arrays of another length; None for no advice.

    Raises:
        DataError: if there are nulls, lists of another length, elements of another type than that of the
            column, or timestamps outside the range of 64-bit microseconds.
    """
    if array.num_chunks > 1:  # which Arrow cannot join above 2 GiB of strings or binary
        return np.concatenate([to_numpy(pa.chunked_array([chunk]), column, remedy) for chunk in array.chunks])
    values = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    num_rows = len(values)
    try:
        if column.kind in {"ragged", "image"}:
            return _objects_of_rows(values, column, remedy)
        for level in range(len(column.shape)):
            values = _flatten(values, level, column, remedy)
        is_missing = None
        if column.takes_nulls:
            values, is_missing = _without_nulls(values, column)
        else:
            _check_no_nulls(values, column)
        if column.kind != "number":
            others = _without_number_type(values, column)
            if is_missing is not None:
                others[is_missing] = "NaT"
            return others.reshape((num_rows, *column.shape))
    except pa.ArrowException as error:
        raise DataError(
            f"Column {column.name!r} of the type {array.type} cannot be given as {_describe(column)}: "
            f"{' '.join(str(error).split())}"
        ) from error
    if _PRIMITIVES.get(values.type) != column.dtype:
        raise _other_type(array.type, column)
    numbers = _primitive_to_numpy(values, column.dtype)
    if is_missing is not None:
        numbers[is_missing] = np.nan
    return numbers.reshape((num_rows, *column.shape))


def _without_nulls(values: pa.Array, column: Column) -> tuple[pa.Array, npt.NDArray[np.bool_] | None]:
    """Return values with nulls replaced as the column says, and a mask of those to be marked as missing; None for none.

    Objects keep their nulls, which become None.

    Raises:
        DataError: if integers above 2**53 are to become float64, for NaN.
    """
    if column.kind == "number" and column.null_value is None and not pa.types.is_floating(values.type):
        try:
            values = values.cast(pa.float64())
        except pa.ArrowInvalid as error:
            raise DataError(
                f"Column {column.name!r} may hold nulls, so its integers are read as float64, which is exact only up "
                "to 2**53 in magnitude, and some are larger. Subtract a constant from the column, cast it to double, "
                "or cast it to string if its values are categories."
            ) from error
    if not values.null_count:
        return values, None
    if column.null_value is not None:
        return values.fill_null(pa.scalar(column.null_value, values.type)), None
    if column.dtype == "object":
        return values, None
    is_missing = _primitive_to_numpy(values.is_null(), "bool")
    return values.fill_null(pa.scalar(0, values.type)), is_missing


def _without_number_type(values: pa.Array, column: Column) -> npt.NDArray[np.generic]:
    """Return strings, binary, decimals, dates or timestamps in the form that :class:`Column` describes."""
    if _kind(values.type) != column.kind:
        raise _other_type(values.type, column)
    if pa.types.is_struct(values.type):
        values = pc.struct_field(values, "bytes")
        _check_no_nulls(values, column)
    if column.kind == "date":
        return _primitive_to_numpy(values.cast(pa.date32()).cast(pa.int32()), "int32").astype(column.dtype)
    if column.kind == "timestamp":
        if values.type.unit == "ns":
            return (_primitive_to_numpy(values.cast(pa.int64()), "int64") // 1000).view(column.dtype)
        microseconds = values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())
        return _primitive_to_numpy(microseconds, "int64").view(column.dtype)
    objects = np.empty(len(values), dtype=object)
    objects[:] = values.to_pylist()
    return objects


def _objects_of_rows(
    values: pa.Array, column: Column, remedy: LengthRemedy | None
) -> npt.NDArray[np.generic]:
    """Return an object array with one array per row, for a ragged column or images."""
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
    """Return one array per list, or a list of arrays if inner lists differ in length, too."""
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
    list_lengths = pc.list_value_length(values)
    ends = np.cumsum(_primitive_to_numpy(list_lengths, str(list_lengths.type)))
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    return [elements[start:end] for start, end in zip(starts, ends, strict=True)]


def _image(row: dict[str, Any], column: Column) -> npt.NDArray[np.uint8]:
    shape = row["height"], row["width"], row["nChannels"]
    data = row["data"]
    if data is None or len(data) != math.prod(shape):
        content = "no bytes" if data is None else f"{len(data)} bytes"
        raise DataError(
            f"Column {column.name!r} has an image of {shape[0]} x {shape[1]} x {shape[2]}, which needs "
            f"{math.prod(shape)} bytes, but it holds {content}: {row['origin']}. Leave such rows out."
        )
    return np.frombuffer(data, np.uint8).reshape(shape).copy()


def _other_type(arrow_type: pa.DataType, column: Column) -> ColumnMismatchError:
    return ColumnMismatchError(
        f"Column {column.name!r} holds {arrow_type} here, but {_describe(column)} elsewhere in the data."
    )


def _check_no_nulls(values: pa.Array, column: Column) -> None:
    if values.null_count:
        raise DataError(
            f"Column {column.name!r} has {values.null_count} nulls. Fill those values, or leave their rows out."
        )


def _flatten(values: pa.Array, level: int, column: Column, remedy: LengthRemedy | None) -> pa.Array:
    length = column.shape[level]
    if not is_list(values.type):
        raise _other_type(values.type, column)
    if values.null_count and column.takes_nulls:
        places = np.full((len(values), length), -1)
        is_valid = _primitive_to_numpy(values.is_valid(), "bool")
        places[is_valid] = np.arange(is_valid.sum() * length).reshape(is_valid.sum(), length)
        inner = _flatten(values.drop_null(), level, column, remedy)
        return inner.take(pa.array(places.reshape(-1), mask=places.reshape(-1) < 0))
    _check_no_nulls(values, column)
    if pa.types.is_fixed_size_list(values.type):
        lengths = np.array([values.type.list_size])
    else:
        lengths = np.diff(_primitive_to_numpy(values.offsets, str(values.offsets.type)))
    if len(values) and (lengths != length).any():
        least, greatest = lengths.min(), lengths.max()
        actual = f"{least}" if least == greatest else f"{least} to {greatest}"
        more = f" {remedy(column, level)}" if remedy is not None else ""
        raise ColumnMismatchError(
            f"Column {column.name!r} has arrays of {actual} elements; all must have {length}.{more}"
        )
    return values.flatten()


def _primitive_to_numpy(values: pa.Array, dtype: str) -> npt.NDArray[Any]:
    """Return numbers or booleans without nulls from Arrow's buffer.

    Unlike ``values.to_numpy()`` this does not import pandas, and the array is writable, as torch requires.
    """
    buffer, start, stop = values.buffers()[1], values.offset, values.offset + len(values)
    if buffer is None:
        return np.empty(0, dtype)
    if dtype == "bool":  # which Arrow packs in bits
        return np.unpackbits(np.frombuffer(buffer, np.uint8), count=stop, bitorder="little")[start:].view(
            bool
        )
    array = np.frombuffer(buffer, dtype, stop)[start:]
    return array if array.flags.writeable else array.copy()


def values_or_nulls(values: pa.Array) -> npt.NDArray[Any]:
    """Return the rows of a column: numbers, times and durations, with NaN and NaT for nulls; other rows as objects.

    Unlike ``values.to_numpy(zero_copy_only=False)``, which returns the same, it does not import pandas.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind, has_nulls = _kind(values.type), values.null_count > 0
    if kind == "number" and not (has_nulls and pa.types.is_boolean(values.type)):
        if has_nulls and pa.types.is_integer(values.type):
            values = values.cast(pa.float64(), safe=False)
        dtype = _PRIMITIVES[values.type]
        numbers = _primitive_to_numpy(values, dtype)
        if has_nulls:
            numbers[_primitive_to_numpy(values.is_null(), "bool")] = np.nan
        return numbers
    if kind in {"date", "timestamp"} or pa.types.is_duration(values.type):
        unit = "D" if pa.types.is_date32(values.type) else getattr(values.type, "unit", "ms")
        numbers = values.cast(pa.int32() if unit == "D" else pa.int64()).cast(pa.int64())
        times = _primitive_to_numpy(numbers, "int64").view(
            f"{'timedelta' if kind is None else 'datetime'}64[{unit}]"
        )
        times[_primitive_to_numpy(values.is_null(), "bool")] = "NaT"
        return times
    rows = [
        values_or_nulls(row.values) if row.is_valid and is_list(values.type) else row.as_py()
        for row in values
    ]
    objects = np.empty(len(values), dtype=object)
    for number, row in enumerate(rows):
        objects[number] = row
    return objects


def _describe(column: Column) -> str:
    shape = " x ".join(map(str, column.shape))
    element = column.dtype if column.kind == "number" else column.kind
    return f"arrays of {shape} {element}" if math.prod(column.shape) and column.shape else element


def to_arrow(values: npt.NDArray[Any] | Sequence[Any], column: Column) -> pa.Array:
    """Return the values of all rows as an Arrow array.

    Args:
        values: one item per row, each a number or array of ``column.shape``.
        column: description that the values must match; numbers are cast within their kind, also to lower precision.

    Raises:
        DataError: if a value is missing, has another shape, or is of another kind.
    """
    if column.kind == "ragged":
        return _to_ragged(list(values), column)
    if column.dtype == "object":  # strings and other values without a NumPy dtype
        return pa.array(list(values))
    rows = _stack(values, column)
    array = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for length in reversed(column.shape):
        array = pa.FixedSizeListArray.from_arrays(array, length)
    return array


def _to_ragged(rows: list[Any], column: Column) -> pa.Array:
    """Return rows of arrays whose lengths differ as an Arrow array of lists."""
    if None in column.lengths[1:]:
        return pa.array(rows)
    inner = tuple(length for length in column.lengths[1:] if length is not None)
    for number, row in enumerate(rows):
        if row is None or np.ndim(row) != len(column.lengths) or np.shape(row)[1:] != inner:
            actual = "no value" if row is None else f"a value of the shape {np.shape(row)}"
            raise DataError(
                f"Column {column.name!r} has {actual} in row {number} of those that were read; all must have the shape "
                f"{column.lengths}."
            )
    dtype = column.element[1]
    elements = np.concatenate([np.empty((0, *inner), dtype), *rows])
    as_numbers = dataclasses.replace(column, kind="number", dtype=dtype, shape=inner, lengths=())
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), to_arrow(elements, as_numbers))


def _stack(values: npt.NDArray[Any] | Sequence[Any], column: Column) -> npt.NDArray[Any]:
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
        raise DataError(
            f"Column {column.name!r} holds {rows.dtype}, which cannot be converted to {column.dtype}. Return values of "
            "that type."
        )
    return rows.astype(column.dtype, copy=False).reshape((len(items), *column.shape))


_ARGUMENT = "page_checksum_verification"

ARE_CHECKED = _ARGUMENT in inspect.signature(pq.ParquetFile.__init__).parameters
"""Whether the installed pyarrow verifies the checksums of pages."""

CHECKING: dict[str, Any] = {_ARGUMENT: True} if ARE_CHECKED else {}
"""Keyword arguments of ``ParquetFile`` that enable this verification, if it is available."""


@functools.cache
def warn_if_unchecked() -> None:
    """Warn once per process if damage can go unnoticed because pyarrow does not verify checksums."""
    if not ARE_CHECKED:
        _logger.warning(
            "pyarrow %s does not verify the checksums of Parquet pages, so corrupt values may be used in training. "
            "Install pyarrow 15 or later.",
            pa.__version__,
        )


NUM_SAMPLED = 256
"""Maximum number of sampled rows."""

SAMPLED_BYTES = 8 << 20
"""Approximate upper bound of the memory of the sampled rows, in bytes."""

_LARGE_BYTES = SAMPLED_BYTES // NUM_SAMPLED
"""Encoded bytes of a value from which on the overhead of a Python object is negligible."""


def with_object_sizes(
    columns: Sequence[Column],
    read_rows: Callable[[list[str], int, int], pa.Table],
    chunk_bytes: Callable[[str], int],
) -> tuple[Column, ...]:
    """Return the columns with the average bytes of their objects: the sampled or the encoded size, whichever is larger.

    Args:
        columns: columns as the footers describe them.
        read_rows: function of column names, a number of rows and a number of bytes. It reads the first rows of these
            columns: at most that many, and no more once they take that many bytes.
        chunk_bytes: function that returns the bytes of a column's chunk in the file. Large values in a large chunk are
            not sampled, because a single page or dictionary can be as large as the chunk. Their encoded size is used,
            which is too small for values that repeat many times from a large dictionary.
    """
    sampled = [
        column.name
        for column in columns
        if column.dtype == "object"
        and not (column.object_bytes >= _LARGE_BYTES and chunk_bytes(column.name) > SAMPLED_BYTES)
    ]
    if not sampled:
        return tuple(columns)
    encoded_bytes = sum(column.object_bytes for column in columns if column.name in sampled)
    num_rows = min(NUM_SAMPLED, max(1, SAMPLED_BYTES // max(1, encoded_bytes)))
    sample = read_rows(sampled, num_rows, SAMPLED_BYTES)
    return tuple(
        replace(column, object_bytes=max(column.object_bytes, _mean_bytes(sample, column)))
        if column.name in sampled
        else column
        for column in columns
    )


def _mean_bytes(sample: pa.Table, column: Column) -> int:
    values = sample.column(column.name).drop_null()
    if not len(values):
        return 0
    objects: npt.NDArray[Any] = to_numpy(values, column)
    return objects.itemsize + sum(map(bytes_of, objects)) // len(objects)


def bytes_of(value: Any) -> int:
    """Return the bytes that an object takes, including the objects that it holds."""
    if isinstance(value, list):  # of arrays, where inner lists differ in length
        return sys.getsizeof(value) + sum(map(bytes_of, value))
    if not isinstance(value, np.ndarray):
        return sys.getsizeof(value)
    # For an array that is a view, getsizeof leaves out the memory that it refers to.
    held = value.nbytes + (sum(map(bytes_of, value.flat)) if value.dtype == object else 0)
    return sys.getsizeof(np.empty(0)) + held
