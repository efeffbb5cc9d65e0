"""Rows of a dataset that a column of booleans marks, as those to validate on. Runs on the *driver*."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkdl.data.dataset.rows import RowFilter
from sparkdl.data.feed.feed import ParquetFeed
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from sparkdl.data.dataset.dataset import ParquetDataset
    from sparkdl.data.dataset.rows import Values

_ROWS_AT_ONCE = 1 << 16


def marked_rows(dataset: ParquetDataset, name: str) -> tuple[RowFilter, RowFilter]:
    """Return the rows in which a column is true, and those in which it is false; reads the column to count them.

    Raises:
        DataError: if the column is not one of booleans, or cannot be read.
    """
    column = dataset.column(name)
    if column.dtype != "bool" or column.shape:
        shown = f"arrays of {column.dtype}" if column.shape else column.dtype
        raise DataError(f"Column {name!r} holds {shown}, but has to say true or false of each row.")
    ends = np.cumsum(dataset.row_counts)
    marked = np.zeros(len(ends), np.int64)
    position = 0
    with ParquetFeed(dataset, columns=[name], batch_size=_ROWS_AT_ONCE, shuffle=False) as feed:
        for batch in feed.epoch(0):
            places = position + np.flatnonzero(batch[name])
            marked += np.bincount(np.searchsorted(ends, places, side="right"), minlength=len(ends))
            position += len(batch[name])
    others = np.asarray(dataset.row_counts) - marked
    return (
        RowFilter((name,), partial(_marked, name), tuple(marked.tolist())),
        RowFilter((name,), partial(_not_marked, name), tuple(others.tolist())),
    )


def _marked(name: str, values: Values) -> npt.NDArray[np.bool_]:
    return values[name]


def _not_marked(name: str, values: Values) -> npt.NDArray[np.bool_]:
    return ~values[name]
