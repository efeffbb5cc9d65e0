"""Checks the labels of a classification. Runs on the *driver*."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkdl.data import ParquetDataset, check_labels
from sparkdl.data.spark.validate import TORCH_IGNORE_INDEX, advice_on_ignored
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.stored_values import stored_values
from sparkdl.model.heads import LossFunction, ignored_label, prediction_kind

_MAX_EXACT = 2**53
"""Up to which a double holds every whole number."""


def named_classes(
    dataset: ParquetDataset, name: str, labels: Sequence[Any], loss: LossFunction, num_classes: int | None
) -> tuple[Any, ...] | None:
    """Return the classes of labels that the user named; None where they are the numbers from 0 in their order.

    The column is not read for others: of integers the footers tell whether the least and the greatest are among them,
    and ranks tell the first label that is not. For the numbers from 0 :func:`check_class_labels` decides.

    Raises:
        ParamError: if the loss or the column can have no such labels.
        DataError: if the column holds other labels, or the model tells more classes apart or fewer.
    """
    column = dataset.column(name)
    if prediction_kind(loss) == "value" or column.shape:
        what = "arrays" if column.shape else "labels for a loss that is not over classes"
        raise ParamError(f"Param labels names labels of column {name!r}, which holds {what}. Leave them out.")
    held = "strings" if column.kind == "string" else "booleans" if column.dtype == "bool" else "numbers"
    given = {str: "strings", bool: "booleans"}.get(type(labels[0]), "numbers")
    if held != given:
        raise DataError(
            f"Param labels names {given}, and column {name!r} holds {held}. Name those that it holds."
        )
    most = 2 if num_classes is None else num_classes
    if len(labels) != most:
        raise DataError(
            f"Param labels names {len(labels)} labels of column {name!r}, and the model tells {most} classes apart. "
            "Give the model an output for each."
        )
    if given != "numbers":
        return tuple(labels)
    ignored = ignored_label(loss)
    if list(labels) == list(range(most)):
        check_class_labels(dataset, name, most, ignored)
        return None
    if ignored is not None:
        raise ParamError(
            f"Param labels names other labels of column {name!r} than 0 to {most - 1} in their order, and its loss has "
            f"ignore_index {ignored}, which goes with these alone. Number the classes so in the column and in labels, "
            f"or leave out the rows that hold {ignored} and give a loss without ignore_index."
        )
    check_magnitudes(labels, name)
    for value in column.value_range or ():
        if value not in labels:
            raise DataError(
                f"Column {name!r} holds {value}, which is none of the {most} labels that Param labels names. Name it "
                "there, or leave such rows out."
            )
    return tuple(labels)


def check_magnitudes(classes: Sequence[int], name: str) -> None:
    """Check that doubles hold the labels.

    Raises:
        DataError: naming one that they do not.
    """
    largest = max(map(abs, classes))
    if largest > _MAX_EXACT:
        raise DataError(
            f"Column {name!r} holds the label {largest}, and predictions are doubles, which hold whole numbers up to "
            f"2**53. Give it other labels, or cast it to strings."
        )


def check_class_labels(dataset: ParquetDataset, name: str, num_classes: int, ignored: int | None) -> None:
    """Check that labels are whole numbers in ``[0, num_classes)``, or the one label that the loss ignores.

    Integers are judged by the footers of the files. Doubles, as Spark ML writes labels, arrays, and integers beside a
    label that is ignored are read.

    Raises:
        DataError: naming the column and what it holds.
    """
    column = dataset.column(name)
    if not column.shape and "int" in column.dtype and ignored is None:
        try:
            check_labels(dataset, name, num_classes)
        except DataError as error:
            low, _ = column.value_range or (0, 0)
            if low == TORCH_IGNORE_INDEX:
                raise
            raise DataError(f"{error} Or name the classes in Param labels.") from error
        return
    # A row of several labels often pads with torch's own ignore_index.
    allowed = ignored if ignored is not None or not column.shape else -100
    for values in stored_values(dataset, name):
        bad = (values < 0) | (values >= num_classes) | (values != np.floor(values))
        if allowed is not None:
            bad &= values != allowed
        if bad.any():
            remedy = "" if column.shape else ", name them in Param labels"
            if (values == TORCH_IGNORE_INDEX).any() and not column.shape:
                raise DataError(
                    f"Column {name!r} holds the label {TORCH_IGNORE_INDEX}: {advice_on_ignored(name)}"
                )
            raise DataError(
                f"Labels must be whole numbers in [0, {num_classes}), but column {name!r} holds {values[bad][0]} "
                f"(and {int(bad.sum()) - 1} more like it). Number the classes from 0{remedy}, or give the model more "
                "outputs."
            )
