"""Blocks: rows of several columns held in few arrays, so that slicing and shuffling take few NumPy calls.

Scalar columns of one dtype share a matrix, with one matrix column each; every other column has its own array.
A table of 28 float columns is then sliced, gathered or concatenated by one call instead of 28.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sparkdl.data.dataset.arrow import bytes_of, to_numpy
from sparkdl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkdl.data.dataset.dataset import Column

Block: TypeAlias = list[npt.NDArray[Any]]
"""Arrays with the same number of rows, in the order of the layout's groups."""


@dataclass(frozen=True)
class _ColumnGroup:
    """The columns of one array of a block, and their name in batches: one for the array, or one per column."""

    columns: tuple[Column, ...]
    names: str | tuple[str, ...]
    is_matrix: bool = True


class BlockLayout:
    """Layout of columns in blocks.

    Args:
        columns: columns in their order in batches; or a mapping from a name in batches to a column, or to several
            scalar columns of one dtype, which form one matrix with one matrix column each.

    Attributes:
        columns: columns that are read.
        row_bytes: bytes of a row in memory.

    Raises:
        DataError: if the columns of a matrix are arrays or differ in dtype.
    """

    def __init__(self, columns: Sequence[Column] | Mapping[str, Column | Sequence[Column]]) -> None:
        fields = columns if isinstance(columns, Mapping) else {column.name: column for column in columns}
        scalars: dict[str, dict[str, Column]] = {}
        for name, field in fields.items():
            if not isinstance(field, Sequence) and not field.shape:
                scalars.setdefault(field.dtype, {})[name] = field
        shared = [group for group in scalars.values() if len(group) > 1]
        packed = {name for group in shared for name in group}
        self._groups = [_ColumnGroup(tuple(group.values()), tuple(group)) for group in shared]
        for name, field in fields.items():
            if isinstance(field, Sequence):
                self._groups.append(_ColumnGroup(_matrix(name, field), name))
            elif name not in packed:
                self._groups.append(_ColumnGroup((field,), name, is_matrix=False))
        places: dict[str, tuple[int, int | None]] = {}
        for index, group in enumerate(self._groups):
            if isinstance(group.names, str):
                places[group.names] = index, None
            else:
                places.update((name, (index, number)) for number, name in enumerate(group.names))
        self._places = [(name, *places[name]) for name in fields]
        self.columns = tuple(
            {column.name: column for group in self._groups for column in group.columns}.values()
        )
        self.row_bytes = sum(column.row_bytes for group in self._groups for column in group.columns)

    def pack(self, table: pa.Table) -> Block:
        """Return the rows of a table as a block of writable arrays.

        Raises:
            DataError: if a column has nulls, or another type or length of arrays than in the layout.
        """
        return [
            _pack_scalars(table, group.columns)
            if group.is_matrix
            else to_numpy(table.column(group.columns[0].name), group.columns[0], _take_any_length)
            for group in self._groups
        ]

    def unpack(self, block: Block) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of a block by name as views, each of shape ``(num_rows, *column.shape)``."""
        return {
            name: block[group] if column is None else block[group][:, column]
            for name, group, column in self._places
        }

    def allocate(self, num_rows: int) -> Block:
        """Return a block of uninitialized rows."""
        return [
            np.empty(
                (num_rows, len(group.columns)) if group.is_matrix else (num_rows, *group.columns[0].shape),
                group.columns[0].dtype,
            )
            for group in self._groups
        ]


def num_rows(block: Block) -> int:
    """Return how many rows a block has."""
    return len(block[0])


def num_bytes(block: Block) -> int:
    """Return how many bytes the rows of a block take, with the objects in them."""
    return sum(
        array.nbytes + sum(map(bytes_of, array.flat) if array.dtype.hasobject else ()) for array in block
    )


def slice_rows(block: Block, start: int, stop: int) -> Block:
    """Return rows ``[start, stop)`` of a block as views."""
    return [array[start:stop] for array in block]


def take_rows(block: Block, indices: npt.NDArray[np.int64]) -> Block:
    """Return copies of the rows at ``indices``."""
    return [array.take(indices, axis=0) for array in block]


def put_rows(block: Block, indices: npt.NDArray[np.int64], rows: Block) -> None:
    """Write rows to the positions ``indices`` of a block, which must be distinct."""
    for target, source in zip(block, rows, strict=True):
        if not target.size:  # lists without elements
            continue
        if target.ndim > 1 and not target.dtype.hasobject and source.flags.c_contiguous:
            # With one item per row, this is three times as fast as assigning by a list of indices.
            np.put(_as_items(target), indices, _as_items(source))
        else:
            target[indices] = source


def concatenate(blocks: Sequence[Block]) -> Block:
    """Return the rows of several blocks as one block; a single block is returned unchanged."""
    if len(blocks) == 1:
        return blocks[0]
    return [np.concatenate(arrays) for arrays in zip(*blocks, strict=True)]


def own_objects(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of an object array, with copies of the arrays and lists in it; other objects are immutable."""
    copied = array.copy()
    items = copied.reshape(-1)
    for index, value in enumerate(items):
        if isinstance(value, (np.ndarray, list)):
            items[index] = _own(value)
    return copied


def _own(value: Any) -> Any:
    if isinstance(value, list):
        return [_own(item) for item in value]
    return own_objects(value) if value.dtype.hasobject else value.copy()


def _as_items(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    row_bytes = array.nbytes // max(1, len(array))
    return array.reshape(-1).view(f"V{row_bytes}") if row_bytes else array.reshape(-1)


def _matrix(name: str, field: Sequence[Column]) -> tuple[Column, ...]:
    columns: tuple[Column, ...] = tuple(field)
    if not columns:
        raise DataError(f"The matrix {name!r} has no columns; name at least one.")
    for column in columns:
        if column.shape or column.dtype != columns[0].dtype:
            held = f"arrays of {column.dtype}" if column.shape else column.dtype
            raise DataError(
                f"The columns of the matrix {name!r} must be scalars of one type, but {columns[0].name!r} holds "
                f"{columns[0].dtype} and {column.name!r} {held}. Cast them to one type, or give each of them a name of "
                "its own in columns."
            )
    return columns


def _take_any_length(column: Column, level: int) -> str:
    """Return the advice for arrays of differing lengths: what to pass to a feed or an estimator."""
    shape = tuple(None if index == level else known for index, known in enumerate(column.shape))
    return (
        f"A ParquetFeed takes arrays of any length with shapes={{{column.name!r}: {shape}}}, an estimator with "
        "paddingValue."
    )


def _pack_scalars(table: pa.Table, columns: Sequence[Column]) -> npt.NDArray[Any]:
    matrix = np.empty((table.num_rows, len(columns)), columns[0].dtype)
    arrays = [to_numpy(table.column(column.name), column) for column in columns]
    if matrix.dtype.kind in "biuf":
        from sparkdl._native import join_columns  # what only describes data runs without it

        join_columns(arrays, matrix)
    else:
        for index, array in enumerate(arrays):
            matrix[:, index] = array
    return matrix
