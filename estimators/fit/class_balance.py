"""Weights of classes in the loss, and rows of rarer classes that an epoch has several times.

The *driver* counts the classes of the training rows. The ranks import this module, without pyspark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkdl import data
from sparkdl.data.dataset.row_choice import RepeatedRows
from sparkdl.errors import ParamError, list_names
from sparkdl.model.losses import prediction_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from sparkdl.data import ParquetDataset
    from sparkdl.data.dataset.row_choice import RowChoice, Values
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams
    from sparkdl.model.heads import Head, LabelColumn


_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class _Classes:
    """The classes of a label column.

    Attributes:
        label: label column.
        count: number of classes.
    """

    label: LabelColumn
    count: int

    def numbers(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the class of each label; one more than the last class for a label that the loss ignores."""
        numbers = self.label.class_numbers(values)
        return np.where((numbers < 0) | (numbers >= self.count), self.count, numbers)


def balance_classes(
    params: _TorchEstimatorParams,
    heads: tuple[Head, ...],
    num_classes: Sequence[int | None],
    dataset: ParquetDataset,
    training: RowChoice | None,
) -> tuple[tuple[Head, ...], RowChoice | None]:
    """Apply classWeights or sampling: return the heads with class weights, and the training rows with repetitions.

    Args:
        params: Params of the fit.
        heads: heads with the classes of their labels.
        num_classes: number of classes of each head; None for one with a single output, or without classes.
        dataset: dataset of all rows.
        training: training rows; None for all rows.

    Raises:
        ParamError: if there are several label columns, or the labels are not classes with one label per row; or
            classWeights names other labels.
        DataError: if labels of two classes are neither 0 nor 1.
    """
    given, is_resampled = params.getClassWeights(), params.getSampling() != "all"
    name = "sampling" if given is None else "classWeights"
    if given is not None and is_resampled:
        raise ParamError(
            "Params classWeights and sampling are both set, and sampling makes all classes count equally. Leave one of "
            "them out."
        ).about("classWeights", "sampling")
    if len(heads) != 1:
        raise ParamError(
            f"Param {name} is set, and labelCol names {len(heads)} columns. It takes one label column."
        ).about(name, "labelCol")
    (head,) = heads
    assert head.loss is not None, "trainStep is refused with these Params"
    if (
        prediction_kind(head.loss) == "value"
        or head.label.shape
        or (head.label.dtype != "int64" and num_classes[0] is not None)
    ):
        raise ParamError(
            f"Param {name} is set, and column {head.label.name!r} does not hold one class per row for the loss. Leave "
            f"{name} out, or set weightCol."
        ).about(name, "loss", "labelCol")
    classes = _Classes(head.label, num_classes[0] or 2)
    if given is not None and given != "balanced":
        return (replace(head, class_weights=_given_weights(given, classes)),), training
    counts = np.zeros(classes.count)
    repeated = np.zeros((len(dataset.row_counts), classes.count + 1), np.int64)
    for row_group, numbers, weights in _labels_by_row_group(
        dataset, classes, training, None if is_resampled else params._weight_column()
    ):
        counts += np.bincount(numbers, weights, minlength=classes.count + 1)[: classes.count]
        repeated[row_group] += np.bincount(numbers, minlength=classes.count + 1)
    present = np.maximum(counts, 1e-300)
    if not is_resampled:
        balanced = counts.sum() / (np.count_nonzero(counts) * present)
        weights_of = np.where(counts > 0, balanced, 1.0)
        return (replace(head, class_weights=tuple(weights_of.tolist())),), training
    largest = counts.max()
    copies = np.where(counts > 0, np.maximum(np.rint(largest / present), 1), 1).astype(np.int64)
    balanced = np.where(counts > 0, largest / present, 1.0)
    head = replace(
        head,
        class_weights=tuple((balanced / copies).tolist()),
        validation_class_weights=tuple(balanced.tolist()),
    )
    copies = np.append(copies, 1)
    rows = RepeatedRows(
        names=(head.label.name,),
        repeat=partial(_repeat, classes, copies),
        counts=tuple((repeated @ copies).tolist()),
        among=training,
    )
    return (head,), rows


def _repeat(classes: _Classes, copies: npt.NDArray[np.int64], values: Values) -> npt.NDArray[np.int64]:
    """Return how often an epoch has each row."""
    return copies[classes.numbers(values[classes.label.name])]


def _given_weights(given: Any, classes: _Classes) -> tuple[float, ...]:
    """Return the weights that the user gave, in the order of the classes.

    Raises:
        ParamError: if there are more or fewer than classes, or the dict has other labels.
    """
    names: list[Any] = list(classes.label.classes or range(classes.count))
    if isinstance(given, Mapping):
        unknown = [label for label in given if label not in names]
        if unknown:
            raise ParamError(
                f"Param classWeights names {list_names(map(repr, unknown))}, and the classes are "
                f"{list_names(map(repr, names))}."
            ).about("classWeights")
        return tuple(float(given.get(name, 1.0)) for name in names)
    if len(given) != len(names):
        raise ParamError(
            f"Param classWeights has {len(given)} weights, and there are {len(names)} classes: "
            f"{list_names(map(repr, names))}. Give a weight for each, in this order."
        ).about("classWeights")
    return tuple(map(float, given))


def _labels_by_row_group(
    dataset: ParquetDataset, classes: _Classes, training: RowChoice | None, weight: str | None
) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float64] | None]]:
    """Yield parts of the training rows: the number of their row group, their classes, and their weights, if any."""
    counts = dataset.row_counts if training is None else training.counts
    assert counts is not None, "training rows are counted"
    ends, start = np.cumsum(counts), 0
    name = classes.label.name
    columns = list(dict.fromkeys([name, *([] if weight is None else [weight])]))
    with data.ParquetFeed(
        dataset, columns=columns, batch_size=_ROWS_AT_ONCE, shuffle=False, row_filter=training
    ) as feed:
        for batch in feed.epoch(0):
            numbers = classes.numbers(batch[name])
            groups = np.searchsorted(ends, np.arange(start, start + len(numbers)), side="right")
            start += len(numbers)
            for row_group in np.unique(groups):
                rows = groups == row_group
                weights = None if weight is None else batch[weight][rows].astype(np.float64)
                yield int(row_group), numbers[rows], weights
