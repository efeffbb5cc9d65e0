"""Checks the labels of a classification. Runs on the *driver*."""

from __future__ import annotations

import numpy as np

from sparkdl.data import ParquetDataset, check_labels
from sparkdl.errors import DataError
from sparkdl.estimators.stored_values import stored_values


def check_class_labels(dataset: ParquetDataset, name: str, num_classes: int, ignored: int | None) -> None:
    """Check that labels are whole numbers in ``[0, num_classes)``, or the one label that the loss ignores.

    Integers are judged by the footers of the files; doubles, as Spark ML writes labels, and arrays are read.

    Raises:
        DataError: naming the column and what it holds.
    """
    column = dataset.column(name)
    if not column.shape and "int" in column.dtype and ignored is None:
        check_labels(dataset, name, num_classes)
        return
    # A row of several labels often pads with torch's own ignore_index.
    allowed = ignored if ignored is not None or not column.shape else -100
    for values in stored_values(dataset, name):
        _check_values(values, name, num_classes, allowed)


def _check_values(values: np.ndarray, name: str, num_classes: int, allowed: int | None) -> None:
    bad = (values < 0) | (values >= num_classes) | (values != np.floor(values))
    if allowed is not None:
        bad &= values != allowed
    if bad.any():
        raise DataError(
            f"Labels must be whole numbers in [0, {num_classes}), but column {name!r} holds {values[bad][0]} (and "
            f"{int(bad.sum()) - 1} more like it). Number the classes from 0, or give the model more outputs."
        )
