"""Splits the rows of a fit into training rows and validation rows.

Validation rows are drawn at random, or marked by a column of booleans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkdl import data
from sparkdl.data.dataset.row_choice import RowFilter, draw_rows
from sparkdl.errors import DataError, ParamError, ShardingError, count_of

if TYPE_CHECKING:
    from sparkdl.data.dataset.dataset import ParquetDataset
    from sparkdl.data.dataset.row_choice import RowChoice, Values
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams


_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """The number of rows, and their size in memory.

    Attributes:
        num_rows: total number of rows.
        num_marked: number of rows marked for validation by a column; None if there is no such column.
        bytes_per_row: average size in memory of the columns that are read, over the first rows.
        is_exact: whether the rows were counted; False if the numbers are estimates.
    """

    num_rows: int
    num_marked: int | None
    bytes_per_row: float
    is_exact: bool = True


def marked_rows(dataset: ParquetDataset, name: str) -> tuple[RowFilter, RowFilter]:
    """Return the rows in which a column is true, and the rows in which it is false; reads the column to count them."""
    ends = np.cumsum(dataset.row_counts)
    marked = np.zeros(len(ends), np.int64)
    position = 0
    with data.ParquetFeed(dataset, columns=[name], batch_size=_ROWS_AT_ONCE, shuffle=False) as feed:
        for batch in feed.epoch(0):
            places = position + np.flatnonzero(batch[name])
            marked += np.bincount(np.searchsorted(ends, places, side="right"), minlength=len(ends))
            position += len(batch[name])
    others = np.asarray(dataset.row_counts) - marked
    return (
        RowFilter((name,), partial(_is_marked, name, True), tuple(marked.tolist())),
        RowFilter((name,), partial(_is_marked, name, False), tuple(others.tolist())),
    )


def _is_marked(name: str, mark: bool, values: Values) -> npt.NDArray[np.bool_]:
    return values[name] if mark else ~values[name]


def split_rows(
    params: _TorchEstimatorParams, dataset: ParquetDataset
) -> tuple[RowChoice | None, RowChoice | None]:
    """Return the training rows, None for all rows, and the validation rows, None without validation.

    Raises:
        ParamError: if validationFraction leaves no training rows or no validation rows.
        DataError: if validationIndicatorCol holds the same value in all rows.
        ShardingError: if there are fewer training rows than ranks.
    """
    fraction, name = params.getValidationFraction(), validation_column(params)
    training: RowChoice | None = None
    validation: RowChoice | None = None
    if fraction is not None:
        drawn = draw_rows(dataset.row_counts, fraction, seed=params.getSeed())
        training, validation = drawn.rest(), drawn
    elif name is not None:
        validation, training = marked_rows(dataset, name)
    num_validation = sum(validation.counts or ()) if validation else 0
    num_training = dataset.num_rows - num_validation
    if fraction is not None and not (num_validation and num_training):
        which = "validate on" if num_training else "train on"
        raise ParamError(
            f"Param validationFraction is {fraction:g}, which leaves none of "
            f"{count_of(dataset.num_rows, 'row')} to {which}. "
            + ("Raise it, or bring more rows." if num_training else "Lower it.")
        )
    if name is not None and not (num_validation and num_training):
        raise DataError(
            f"Column {name!r} of validationIndicatorCol is {'true' if num_validation else 'false'} in each of the "
            f"{dataset.num_rows} rows, which leaves none to {'train' if num_validation else 'validate'} on."
        )
    if num_training < params.getNumWorkers():
        beside = f" beside {num_validation} to validate on" if num_validation else ""
        raise ShardingError(
            f"{count_of(num_training, 'row')}{beside} cannot be shared by {params.getNumWorkers()} ranks: each rank "
            f"needs at least one. Lower numWorkers to {num_training}."
        )
    return training, validation


def validation_column(params: _TorchEstimatorParams) -> str | None:
    """Return the column that marks the rows to validate on, if one is set."""
    return params.getValidationIndicatorCol() if params.isSet(params.validationIndicatorCol) else None
