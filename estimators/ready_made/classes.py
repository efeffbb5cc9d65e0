"""Counts the classes of a label column. Runs on the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.errors import DataError
from sparkdl.estimators.fit.labels import stored_values

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset

MOST = 1000
"""Maximum number of classes; more are taken for a mistake, such as the labels of a regression."""


def count_classes(dataset: ParquetDataset, name: str) -> int:
    """Return the number of classes, at least 2.

    Labels that are whole numbers from 0 are the numbers of the classes, as in Spark ML: the number of classes is the
    largest label plus 1. Of strings, booleans and other integers the distinct values are counted.

    Raises:
        DataError: if the column holds values that cannot be classes, only one string, or more than 1000 classes.
    """
    column = dataset.column(name)
    if column.shape or column.kind not in ("number", "string"):
        what = f"arrays of {column.shape}" if column.shape else f"{column.kind} values"
        raise DataError(
            f"Column {name!r} holds {what}, which are no classes. Give one number or string per row."
        )
    if column.dtype == "bool":
        return 2
    found: set[Any] = set()
    for values in stored_values(dataset, name):
        if column.kind == "number" and not np.isfinite(values).all():
            raise DataError(f"Column {name!r} holds labels that are no finite numbers. Leave those rows out.")
        found.update(set(values.tolist()) if column.kind == "string" else np.unique(values).tolist())
        if len(found) > MOST:
            raise DataError(
                f"Column {name!r} holds more than {MOST} different labels. For a regression take TorchRegressor."
            )
    if column.kind == "number":
        return _number_of_classes(found, name, is_integer="int" in column.dtype)
    if len(found) < 2:
        raise DataError(
            f"Column {name!r} holds the label {next(iter(found))!r} alone, and a classifier needs two at "
            "least. Name all in Param labels, where rows may lack one."
        )
    return len(found)


def _number_of_classes(labels: set[Any], name: str, *, is_integer: bool) -> int:
    low, high = min(labels), max(labels)
    if low >= 0 and high < MOST and all(label == int(label) for label in labels):
        return max(2, int(high) + 1)
    if is_integer:
        return max(2, len(labels))
    bad = next(label for label in sorted(labels) if label < 0 or label >= MOST or label != int(label))
    raise DataError(
        f"Column {name!r} holds the label {bad!r}, which is no class: doubles and decimals have to be "
        f"whole numbers from 0 to {MOST - 1}, or those that Param labels names. Number the classes with StringIndexer, "
        "or take TorchRegressor for a regression."
    )
