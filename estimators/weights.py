"""Checks the weights of the rows. Runs on the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparkdl.errors import DataError
from sparkdl.estimators.stored_values import stored_values

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset


def check_row_weights(dataset: ParquetDataset, name: str) -> None:
    """Check that a column holds one finite number of at least 0 per row, and not only zeros. Reads the column.

    Raises:
        DataError: naming the column and what it holds.
    """
    shape = dataset.column(name).shape
    if shape:
        raise DataError(f"Column {name!r} holds arrays of {shape[0]}; weightCol takes one number per row.")
    has_weight = False
    for values in stored_values(dataset, name):
        weights = values.astype(np.float64)
        bad = ~np.isfinite(weights) | (weights < 0)
        if bad.any():
            raise DataError(
                f"Weights of rows must be finite and at least 0, but column {name!r} holds {weights[bad][0]} (and "
                f"{int(bad.sum()) - 1} more like it). Mend those rows or leave them out."
            )
        has_weight = has_weight or bool((weights > 0).any())
    if not has_weight:
        raise DataError(f"Every weight in column {name!r} is 0, so no row would count.")
