"""What the footer of a Parquet file says about its columns: their place, and size and statistics of their chunks.

Arrow's Python objects for row groups and column chunks end the process if a footer is damaged: C++ raises exceptions
that they do not catch, for example if the type of a chunk is not that of the schema, or a smallest value is too short.
Only its functions that read whole footers and row groups make Python errors of them. So the parts of a footer that a
dataset's description needs are read here, in Thrift's compact protocol; a chunk takes about 15 us. Arrow has to have
accepted the footer before.

Formats: github.com/apache/parquet-format (``parquet.thrift``), github.com/apache/thrift (``thrift-compact-protocol``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")

# Fields of the Thrift structs, by the names of parquet.thrift.
_SCHEMA, _ROW_GROUPS, _COLUMN_ORDERS = 2, 4, 7
_ELEMENT_TYPE, _NUM_CHILDREN = 1, 5
_COLUMNS, _META_DATA = 1, 3
_TYPE, _TOTAL_UNCOMPRESSED_SIZE, _STATISTICS = 1, 6, 12
_MAX, _MIN, _NULL_COUNT, _MAX_VALUE, _MIN_VALUE = 1, 2, 3, 5, 6

# Types of Thrift's compact protocol. A boolean of a struct has no bytes of its own.
_FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 2, 3, 4, 5, 6, 7, 8, 9, 10, 12

_Wanted: TypeAlias = "dict[int, tuple[int, _Wanted]]"
"""Types of the fields to read, by their numbers, and of structs and lists of structs the fields inside them."""
_STATISTICS_FIELDS: _Wanted = {
    _NULL_COUNT: (_I64, {}),
    **{number: (_BINARY, {}) for number in (_MAX, _MIN, _MAX_VALUE, _MIN_VALUE)},
}
_CHUNK_FIELDS: _Wanted = {
    _TYPE: (_I32, {}),
    _TOTAL_UNCOMPRESSED_SIZE: (_I64, {}),
    _STATISTICS: (_STRUCT, _STATISTICS_FIELDS),
}
_FOOTER_FIELDS: _Wanted = {
    _SCHEMA: (_LIST, {_ELEMENT_TYPE: (_I32, {}), _NUM_CHILDREN: (_I32, {})}),
    _ROW_GROUPS: (_LIST, {_COLUMNS: (_LIST, {_META_DATA: (_STRUCT, _CHUNK_FIELDS)})}),
    _COLUMN_ORDERS: (_LIST, {}),
}

_TAIL_BYTES = 64 << 10
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class ColumnChunk:
    """The values of one leaf of the schema in one row group; numbers that the footer lacks are None.

    Attributes:
        num_bytes: size of the encoded values before compression.
        num_nulls: number of nulls.
        value_range: smallest and largest value as they are stored, in bytes.
        signed_range: as ``value_range``, in the older form that is defined only for signed numbers.
    """

    num_bytes: int
    num_nulls: int | None
    value_range: tuple[bytes, bytes] | None
    signed_range: tuple[bytes, bytes] | None

    def int_range(self, *, signed: bool) -> tuple[int, int] | None:
        """Return the smallest and largest value of a column of integers."""
        stored = self.value_range or (self.signed_range if signed else None)
        if stored is None or {len(value) for value in stored} not in ({4}, {8}):
            return None
        low, high = (int.from_bytes(value, "little", signed=signed) for value in stored)
        return low, high


def parse_footer(file: Any) -> tuple[pq.FileMetaData, list[range], list[list[ColumnChunk]]]:
    """Return the footer of an open file.

    Returns:
        Arrow's metadata; the numbers of the leaves of every field of the schema; and the chunks of every row group, by
        the number of the leaf. Do not ask the metadata for a row group's columns: Arrow ends the process if they are
        damaged.

    Raises:
        OSError, pyarrow.ArrowInvalid: as Arrow raises them for damaged footers and files that cannot be read.
    """
    tail = _read_tail(file)
    metadata = pq.read_metadata(pa.BufferReader(tail))
    length = int.from_bytes(tail[-_LENGTH_BYTES:-4], "little")
    types = [metadata.schema.column(index).physical_type for index in range(metadata.num_columns)]
    try:
        footer, _ = _read(tail, len(tail) - _LENGTH_BYTES - length, _STRUCT, _FOOTER_FIELDS)
        root, *elements = footer[_SCHEMA]
        elements.reverse()
        counts = [_count_leaves(elements) for _ in range(root.get(_NUM_CHILDREN, 0))]
        row_groups = [
            [
                _chunk(chunk[_META_DATA], type_name, has_order=_COLUMN_ORDERS in footer)
                for chunk, type_name in zip(group[_COLUMNS], types, strict=True)
            ]
            for group in footer.get(_ROW_GROUPS, ())
        ]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise pa.ArrowInvalid(f"the description of its column chunks is damaged: {error}") from error
    ends = itertools.accumulate(counts, initial=0)
    return metadata, list(itertools.starmap(range, itertools.pairwise(ends))), row_groups


def _read_tail(file: Any) -> bytes:
    """Return the last bytes of a file, with the complete footer."""
    size = file.seek(0, 2)
    needed = _TAIL_BYTES
    while True:
        file.seek(max(0, size - needed))
        tail: bytes = file.read(needed)
        needed = int.from_bytes(tail[-_LENGTH_BYTES:-4], "little") + _LENGTH_BYTES
        if needed <= len(tail) or len(tail) == size:
            return tail
        needed = min(needed, size)


def _count_leaves(elements: list[dict[int, Any]]) -> int:
    """Take a field and all that is inside it from the end of the reversed schema; return the number of its leaves."""
    element = elements.pop()
    num_children = element.get(_NUM_CHILDREN, 0)
    return (
        sum(_count_leaves(elements) for _ in range(num_children))
        if num_children
        else int(_ELEMENT_TYPE in element)
    )


def _chunk(fields: dict[int, Any], type_name: str, *, has_order: bool) -> ColumnChunk:
    if _TYPES[fields[_TYPE]] != type_name:
        raise ValueError(f"a chunk holds {_TYPES[fields[_TYPE]]}, and the schema says {type_name}")
    statistics = fields.get(_STATISTICS, {})
    return ColumnChunk(
        fields[_TOTAL_UNCOMPRESSED_SIZE],
        statistics.get(_NULL_COUNT),
        _pair(statistics, _MIN_VALUE, _MAX_VALUE) if has_order else None,  # otherwise undefined
        _pair(statistics, _MIN, _MAX),
    )


def _pair(fields: dict[int, Any], first: int, second: int) -> tuple[bytes, bytes] | None:
    return (fields[first], fields[second]) if first in fields and second in fields else None


def _read(data: bytes, at: int, kind: int, wanted: _Wanted) -> tuple[Any, int]:
    """Return the value that begins at a position, of structs only the wanted fields; and the position behind it."""
    if kind == _STRUCT:
        fields: dict[int, Any] = {}
        number = 0
        while header := data[at]:
            at += 1
            if header > 15:
                number += header >> 4
            else:
                number, at = _integer(data, at)
            kind = header & 15
            field = wanted.get(number)
            if field is not None and field[0] == kind:
                fields[number], at = _read(data, at, *field)
            elif _I16 <= kind <= _I64:  # as in _skip; most fields are integers
                while data[at] > 127:
                    at += 1
                at += 1
            elif kind > _FALSE:
                at = _skip(data, at, kind)
        return fields, at + 1
    if _I16 <= kind <= _I64:
        return _integer(data, at)
    if kind == _BINARY:
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind == _LIST:
        length, kind, at = _list_header(data, at)
        values = []
        for _ in range(length):
            value, at = _read(data, at, kind, wanted)
            values.append(value)
        return values, at
    raise ValueError(f"there is a value of Thrift's type {kind}")


def _skip(data: bytes, at: int, kind: int) -> int:
    """Return the position behind the value that begins at a position."""
    if _I16 <= kind <= _I64:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == _STRUCT:
        while header := data[at]:
            at += 1
            if header < 16:
                _, at = _integer(data, at)
            if header & 15 > _FALSE:
                at = _skip(data, at, header & 15)
        return at + 1
    if kind == _BINARY:
        length, at = _varint(data, at)
        return at + length
    if kind in (_LIST, _SET):
        length, kind, at = _list_header(data, at)
        if kind <= _BYTE:
            return at + length
        for _ in range(length):
            at = _skip(data, at, kind)
        return at
    if kind in (_BYTE, _DOUBLE):
        return at + (1 if kind == _BYTE else 8)
    raise ValueError(f"there is a value of Thrift's type {kind}")


def _list_header(data: bytes, at: int) -> tuple[int, int, int]:
    """Return length and type of a list's items, and the position of the first."""
    header = data[at]
    if header >> 4 < 15:
        return header >> 4, header & 15, at + 1
    length, at = _varint(data, at + 1)
    return length, header & 15, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 128:
        return value, at + 1
    value &= 127
    shift = 7
    while (byte := data[at := at + 1]) > 127:
        value |= (byte & 127) << shift
        shift += 7
    return value | byte << shift, at + 1
