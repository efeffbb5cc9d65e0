"""The labels of a fit: checks of their values, the heads that Params describe, and the classes of labels.

Checks that the Parquet footers cannot decide read a column of the training rows again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkdl import data
from sparkdl.data import ParquetDataset
from sparkdl.errors import DataError, ParamError, count_of, list_names
from sparkdl.model.decisions import BINARY
from sparkdl.model.heads import Head, LabelColumn
from sparkdl.model.losses import (
    LossFunction,
    as_module,
    ignored_label,
    ignores_by_default,
    is_class_loss,
    needs_global_weight,
    prediction_kind,
    reduction_of,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from sparkdl.data import Column
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams


_ROWS_AT_ONCE = 1 << 16

TORCH_IGNORE_INDEX = -100
"""The label that torch's losses ignore by default."""


def _advice_on_ignored(column: str) -> str:
    """Return the advice for rows with the label that torch's losses ignore by default."""
    return (
        f"torch's losses leave out rows with the label {TORCH_IGNORE_INDEX} by default (ignore_index), and a fit takes "
        "such rows only where ignore_index is set to another number. Leave them out of the DataFrame with "
        f"df.where('{column} != {TORCH_IGNORE_INDEX}'), or label them -1 and give the loss ignore_index=-1."
    )


def stored_values(dataset: ParquetDataset, name: str) -> Iterator[np.ndarray]:
    """Yield the values of a column in flat parts; arrays are concatenated.

    Raises:
        DataError: if a file cannot be read; the message names file, row group and column.
    """
    with data.ParquetFeed(dataset, columns=[name], batch_size=_ROWS_AT_ONCE, shuffle=False) as feed:
        for batch in feed.epoch(0):
            yield batch[name].reshape(-1)


def and_more(bad: npt.NDArray[np.bool_]) -> str:
    """Return how an error counts the values after the first wrong one; nothing if that is the only one."""
    return f" (and {bad.sum() - 1} more like it)" if bad.sum() > 1 else ""


_MAX_EXACT = 2**53
"""Largest whole number up to which a double represents every whole number exactly."""


def named_classes(
    dataset: ParquetDataset, name: str, labels: Sequence[Any], loss: LossFunction, num_classes: int | None
) -> tuple[Any, ...] | None:
    """Return the classes for labels given in Param ``labels``; None if they are the numbers from 0 in their order.

    The column is not read to find other labels: for integers the Parquet footers show whether the least and the
    greatest are among the classes, and ranks report the first label that is not. Numbers from 0 are checked by
    :func:`check_class_labels`.

    Raises:
        ParamError: if the loss or the column cannot have such labels.
        DataError: if the column holds other labels, or the model has more or fewer classes.
    """
    column = dataset.column(name)
    if prediction_kind(loss) == "value" or column.shape:
        what = "arrays" if column.shape else "labels for a loss that is not over classes"
        raise ParamError(f"Param labels names labels of column {name!r}, which holds {what}. Leave them out.")
    held = "strings" if column.kind == "string" else "booleans" if column.dtype == "bool" else "numbers"
    kind = {str: "strings", bool: "booleans"}.get(type(labels[0]), "numbers")
    if held != kind:
        raise DataError(
            f"Param labels names {kind}, and column {name!r} holds {held}. Name those that it holds."
        )
    most = 2 if num_classes is None else num_classes
    if len(labels) != most:
        raise DataError(
            f"Param labels names {count_of(len(labels), 'label')} of column {name!r}, and the model has {most} "
            "classes. Give the model an output for each."
        )
    if kind != "numbers":
        return tuple(labels)
    ignored = ignored_label(loss)
    if list(labels) == list(range(most)):
        check_class_labels(dataset, name, most, ignored)
        return None
    if ignored is not None:
        raise ParamError(
            f"The loss of column {name!r} has ignore_index {ignored}, which is supported only if Param labels is 0 "
            f"to {most - 1} in ascending order. Number the classes from 0 in the column and in labels, or remove the "
            f"rows with the label {ignored} and use a loss without ignore_index."
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
    """Check that doubles represent the labels exactly.

    Raises:
        DataError: if they do not; the message names a label.
    """
    largest = max(map(abs, classes))
    if largest > _MAX_EXACT:
        raise DataError(
            f"Column {name!r} holds the label {largest}, and predictions are doubles, which hold whole numbers up to "
            f"2**53. Give it other labels, or cast it to strings."
        )


def check_class_labels(dataset: ParquetDataset, name: str, num_classes: int, ignored: int | None) -> None:
    """Check that labels are whole numbers in ``[0, num_classes)``, or the one label that the loss ignores.

    Integers are checked by the footers of the files. The column is read for doubles, in which Spark ML writes labels,
    for arrays, and if the loss ignores a label.

    Raises:
        DataError: if they are not; the message names the column and a value.
    """
    column = dataset.column(name)
    if not column.shape and "int" in column.dtype and ignored is None:
        low, high = column.value_range or (0, 0)
        if low >= 0 and high < num_classes:
            return
        outputs = f", or give the model {high + 1} outputs" if low >= 0 else ""
        remedy = f"Number the classes from 0{outputs}. Or name the classes in Param labels."
        if low == TORCH_IGNORE_INDEX:
            remedy = _advice_on_ignored(name)
        raise DataError(
            f"Labels must lie in [0, {num_classes}), but column {name!r} holds {low} to {high}. {remedy}"
        )
    # A row of several labels often pads with torch's own ignore_index.
    allowed = ignored if ignored is not None or not column.shape else -100
    for values in stored_values(dataset, name):
        bad = (values < 0) | (values >= num_classes) | (values != np.floor(values))
        if allowed is not None:
            bad &= values != allowed
        if bad.any():
            remedy = "" if column.shape else ", name them in Param labels"
            if np.isnan(values).any():
                raise DataError(f"Column {name!r} holds NaN, which is not a class. Leave those rows out.")
            if (values == TORCH_IGNORE_INDEX).any() and not column.shape:
                raise DataError(
                    f"Column {name!r} holds the label {TORCH_IGNORE_INDEX}: {_advice_on_ignored(name)}"
                )
            raise DataError(
                f"Labels must be whole numbers in [0, {num_classes}), but column {name!r} holds {values[bad][0]}"
                f"{and_more(bad)}. Number the classes from 0{remedy}, or give the model more outputs."
            )


def make_heads(params: _TorchEstimatorParams, dataset: ParquetDataset, loss: Any) -> tuple[Head, ...]:
    """Return the heads of a fit; dtypes and classes of labels are determined later.

    Args:
        params: Params of the fit.
        dataset: rows of the fit.
        loss: loss of all label columns, or a list with a loss for each.

    Raises:
        ParamError: if there are not as many losses or weights as label columns.
        DataError: if labels are arrays that differ in length.
    """
    names = params._label_names()
    for name in names:
        if dataset.column(name).kind == "ragged":
            raise DataError(
                f"Column {name!r} holds arrays that differ in length, which cannot be labels. Bring them to one length."
            )
    labels = [LabelColumn(name=name, shape=dataset.column(name).shape) for name in names]
    if params.getTrainStep() is not None:
        return tuple(Head(label=label, loss=None) for label in labels)
    losses = _loss_of_each(loss, names)
    weights = params.getLossWeights() or [1.0] * len(names)
    for what, values in (("loss", losses), ("lossWeights", weights)):
        if len(values) != len(names):
            raise ParamError(
                f"Param {what} has {len(values)} entries, and labelCol {len(names)}: {list_names(names)}. Give one for "
                "each."
            )
    modules = [as_module(loss) for loss in losses]
    if len({reduction_of(loss) == "sum" for loss in modules}) > 1:
        raise ParamError(
            "Param loss has losses that sum over the rows and others that do not. Give them all one reduction."
        )
    if len(names) > 1:
        for name, module in zip(names, modules, strict=True):
            _check_divisor(module, dataset.column(name))
    return tuple(
        Head(label=label, loss=loss, weight=weight)
        for label, loss, weight in zip(labels, modules, weights, strict=True)
    )


def _loss_of_each(loss: Any, names: Sequence[str]) -> list[LossFunction]:
    """Return the losses of the label columns."""
    return list(loss) if isinstance(loss, list | tuple) else [loss] * len(names)


def label_faults(params: _TorchEstimatorParams, columns: Iterable[Column]) -> Iterator[str]:
    """Yield what is wrong with the types of label columns, and what to do.

    A trainStep may use strings for anything, so they cannot be indexed as classes.
    """
    is_step = params.getTrainStep() is not None
    names = params._label_names()
    losses = [] if is_step else _loss_of_each(params.getLoss(), names)
    loss_of = dict(zip(names, losses, strict=False))
    for column in columns:
        held = f"Column {column.name!r} holds {column.kind} values"
        if column.kind == "number":
            continue
        if is_step:
            yield (
                f"{held}, and a trainStep gets labels as numbers. Make numbers of them, as Spark's StringIndexer does; "
                "or leave labelCol out where the step needs none."
            )
        elif column.kind != "string" or column.shape:
            yield f"{held}, which cannot be labels. Convert them to numbers."
        elif column.name in loss_of and prediction_kind(as_module(loss_of[column.name])) == "value":
            yield (
                f"Column {column.name!r} holds strings, which are labels for a loss over classes, such as "
                "CrossEntropyLoss. Set loss to one of these, or convert the column to numbers."
            )


def _check_divisor(loss: LossFunction, column: Column) -> None:
    """Refuse a loss that does not take the mean over the rows: an Objective averages several losses over the rows."""
    if needs_global_weight(loss, weighted=False, label_is_scalar=not column.shape):
        raise ParamError(
            f"The loss of label column {column.name!r} takes the mean over class weights or over labels that count. "
            "With several label columns, each loss has to take the mean over the rows. Leave weight and ignore_index "
            "out of it, give one label per row, or give a trainStep."
        )


def trial_labels(
    heads: Sequence[Head], dataset: ParquetDataset, row: Mapping[str, Any], named: Container[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Return the labels of one row, for the trial of the losses.

    A column whose labels may be indexed gets 0, the first class. So do the ``named`` columns, whose labels are given in
    Param ``labels``.
    """
    return {
        head.label.name: np.zeros(1, np.int64)
        if head.label.name in named or _may_be_indexed(head, dataset.column(head.label.name))
        else row[head.label.name]
        for head in heads
    }


def with_classes(
    heads: Sequence[Head],
    num_classes: Sequence[int | None],
    dataset: ParquetDataset,
    named: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[Head, ...]:
    """Return the heads with the classes of labels that are not numbers from 0.

    Classes are the labels in ``named``, or the distinct labels of the rows.

    Raises:
        DataError: if labels are not classes, or their number differs from the number of the model's classes.
        ParamError: if labels were given for a column without classes.
    """
    known = named or {}
    return tuple(
        _with_classes(head, count, dataset, known.get(head.label.name))
        for head, count in zip(heads, num_classes, strict=True)
    )


def _with_classes(
    head: Head, num_classes: int | None, dataset: ParquetDataset, named: Sequence[Any] | None
) -> Head:
    column, loss = dataset.column(head.label.name), head.loss
    if loss is None:
        return head
    if named is not None:
        indexed = named_classes(dataset, column.name, named, loss, num_classes)
        return replace(head, label=replace(head.label, classes=indexed))
    if column.kind == "string" or (column.dtype == "bool" and prediction_kind(loss) != "value"):
        most = 2 if num_classes is None else num_classes
        classes: tuple[Any, ...] | None = (
            (False, True) if column.dtype == "bool" else _distinct(dataset, column, most)
        )
        if classes is None or len(classes) != most:
            held = "more" if classes is None else f"{len(classes)} different values, fewer"
            is_fewer = column.kind == "string" and classes is not None
            remedy = ", or list all of them in Param labels if the rows may lack some" if is_fewer else ""
            outputs = "an output for each" if classes is None else count_of(len(classes), "output")
            raise DataError(
                f"Column {column.name!r} holds {held} than the {most} classes of the model. Give the "
                f"model {outputs}{remedy}."
            )
        return replace(head, label=replace(head.label, classes=classes))
    if num_classes is None:
        return _with_two_classes(head, dataset) if prediction_kind(loss) in BINARY else head
    if head.label.dtype != "int64":
        return head
    if _is_out_of_range(column, num_classes) and ignored_label(loss) is None:
        classes = _distinct(dataset, column, num_classes)
        # The label that torch ignores is not taken for a class, unless the user gives it in Param labels.
        is_telling = classes is not None and not (TORCH_IGNORE_INDEX in classes and ignores_by_default(loss))
        if classes is not None and is_telling and len(classes) == num_classes:
            check_magnitudes(classes, column.name)
            return replace(head, label=replace(head.label, classes=classes))
    check_class_labels(dataset, column.name, num_classes, ignored_label(loss))
    return head


def _with_two_classes(head: Head, dataset: ParquetDataset) -> Head:
    """Return a head whose model has one output for two classes, with the classes of integers other than 0 and 1.

    Raises:
        DataError: if labels are neither two integers nor numbers from 0 to 1; torch would compute a loss for others.
    """
    column = dataset.column(head.label.name)
    if _is_out_of_range(column, 2):
        classes = _distinct(dataset, column, 2)
        if classes is not None and len(classes) == 2:
            check_magnitudes(classes, column.name)
            return replace(head, label=replace(head.label, classes=classes))
    elif column.value_range is not None:
        return head
    for values in stored_values(dataset, column.name):
        bad = ~((values >= 0) & (values <= 1))
        if bad.any():
            raise DataError(
                f"Labels of {type(head.loss).__name__} must lie between 0 and 1, but column {column.name!r} holds "
                f"{values[bad][0]}{and_more(bad)}. Number the two classes 0 and 1, or leave those rows out."
            )
    return head


def _is_out_of_range(column: Column, num_classes: int) -> bool:
    if column.shape or "int" not in column.dtype or column.value_range is None:
        return False
    low, high = column.value_range
    return low < 0 or high >= num_classes


def _distinct(dataset: ParquetDataset, column: Column, most: int) -> tuple[Any, ...] | None:
    """Return the distinct values of a column in ascending order; None if there are more than ``most``.

    Raises:
        DataError: if numbers are not finite.
    """
    distinct: set[Any] = set()
    for values in stored_values(dataset, column.name):
        if column.kind == "number" and not np.isfinite(values).all():
            raise DataError(
                f"Column {column.name!r} holds labels that are not finite numbers. Leave those rows out."
            )
        distinct.update(values.tolist() if column.kind == "string" else np.unique(values).tolist())
        if len(distinct) > most:
            return None
    return tuple(sorted(distinct))


def _may_be_indexed(head: Head, column: Column) -> bool:
    if head.loss is None or column.shape:
        return False
    if column.kind == "string" or column.dtype == "bool":
        return prediction_kind(head.loss) != "value"
    return is_class_loss(head.loss) or ("int" in column.dtype and prediction_kind(head.loss) != "value")


MOST_CLASSES = 1000
"""Maximum number of classes; more are taken for a mistake, such as the labels of a regression."""


def count_classes(dataset: ParquetDataset, name: str) -> int:
    """Return the number of classes, at least 2.

    Labels that are whole numbers from 0 are the numbers of the classes, as in Spark ML: the number of classes is the
    largest label plus 1. For strings, booleans and other integers, the distinct values are counted.

    Raises:
        DataError: if the column holds numbers that cannot be classes, only one string, or more than 1000 classes.
    """
    column = dataset.column(name)
    if column.dtype == "bool":
        return 2
    distinct = _distinct(dataset, column, MOST_CLASSES)
    if distinct is None:
        raise DataError(
            f"Column {name!r} holds more than {MOST_CLASSES} different labels. For a regression take TorchRegressor."
        )
    if column.kind == "number":
        return _number_of_classes(distinct, name, is_integer="int" in column.dtype)
    if len(distinct) < 2:
        raise DataError(
            f"Column {name!r} holds the label {distinct[0]!r} alone, and a classifier needs at least two. If there are "
            "more classes, name all of them in Param labels."
        )
    return len(distinct)


def _number_of_classes(labels: Sequence[Any], name: str, *, is_integer: bool) -> int:
    """Return the number of classes for the distinct labels, in ascending order, of a column of numbers."""
    low, high = labels[0], labels[-1]
    if low >= 0 and high < MOST_CLASSES and all(label == int(label) for label in labels):
        return max(2, int(high) + 1)
    if is_integer:
        return max(2, len(labels))
    bad = next(label for label in labels if label < 0 or label >= MOST_CLASSES or label != int(label))
    raise DataError(
        f"Column {name!r} holds the label {bad!r}, which is not a class: doubles and decimals have to be "
        f"whole numbers from 0 to {MOST_CLASSES - 1}, or those that Param labels names. Number the classes with "
        "StringIndexer, or take TorchRegressor for a regression."
    )
