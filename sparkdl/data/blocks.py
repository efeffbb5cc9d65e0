"""Blocks: rows of several columns held in few arrays, so that slicing and shuffling costs few NumPy calls.

Scalar columns of one dtype share a matrix, one column of it each; every other column has an array of its own.
A table of 28 float columns is then cut, gathered and joined by one call instead of 28.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sparkdl.data.arrow_columns import to_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from sparkdl.data.dataset import Column

Block: TypeAlias = list[npt.NDArray[Any]]
"""Arrays of equally many rows, in the order of the layout's groups."""


class BlockLayout:
    """How columns are laid out in blocks.

    Args:
        columns: the columns, in the order in which batches name them.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        scalars: dict[str, list[Column]] = {}
        for column in columns:
            if not column.shape:
                scalars.setdefault(column.dtype, []).append(column)
        shared = [group for group in scalars.values() if len(group) > 1]
        packed = {column.name for group in shared for column in group}
        self._groups = [*shared, *([column] for column in columns if column.name not in packed)]
        self.row_bytes = sum(column.row_bytes for column in columns)

    def pack(self, table: pa.Table) -> Block:
        """Return the rows of a table as a block of writable arrays.

        Raises:
            DataError: if a column has nulls, another type or another length of arrays than the layout says.
        """
        return [
            to_numpy(table.column(group[0].name), group[0])
            if len(group) == 1
            else _pack_scalars(table, group)
            for group in self._groups
        ]

    def unpack(self, block: Block) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of a block by name as views, each of shape ``(num_rows, *column.shape)``."""
        columns = {}
        for group, array in zip(self._groups, block, strict=True):
            if len(group) == 1:
                columns[group[0].name] = array
            else:
                columns.update((column.name, array[:, index]) for index, column in enumerate(group))
        return {column.name: columns[column.name] for column in self.columns}

    def allocate(self, num_rows: int) -> Block:
        """Return a block of uninitialized rows."""
        return [
            np.empty(
                (num_rows, *group[0].shape) if len(group) == 1 else (num_rows, len(group)), group[0].dtype
            )
            for group in self._groups
        ]


def num_rows(block: Block) -> int:
    """Return how many rows a block has."""
    return len(block[0])


def slice_rows(block: Block, start: int, stop: int) -> Block:
    """Return rows ``[start, stop)`` of a block as views."""
    return [array[start:stop] for array in block]


def take_rows(block: Block, indices: npt.NDArray[np.int64]) -> Block:
    """Return copies of the rows at ``indices``."""
    return [array.take(indices, axis=0) for array in block]


def concatenate(blocks: Sequence[Block]) -> Block:
    """Return the rows of several blocks as one; a single block is returned as it is."""
    if len(blocks) == 1:
        return blocks[0]
    return [np.concatenate(arrays) for arrays in zip(*blocks, strict=True)]


def _pack_scalars(table: pa.Table, columns: Sequence[Column]) -> npt.NDArray[Any]:
    matrix = np.empty((table.num_rows, len(columns)), columns[0].dtype)
    for index, column in enumerate(columns):
        matrix[:, index] = to_numpy(table.column(column.name), column)
    return matrix
