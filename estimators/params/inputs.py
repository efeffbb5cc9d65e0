"""Entries of the table of Params for columns: features, labels, weights, validation rows, and predictions."""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast, get_args

import numpy as np
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from sparkdl.errors import ParamError, list_names
from sparkdl.estimators.params.base import OneOf, ParamsT, check_callable, to_numbers
from sparkdl.estimators.params.table import AsGiven, Entry, above, at_least, between, optional, param
from sparkdl.estimators.scoring.columns import PREDICTION_TYPES, ScoredColumn
from sparkdl.model.inputs import DEFAULT_BATCH_SIZE, GivenBy, PrepareFunction
from sparkdl.training.spec import AugmentFunction

PASSED_BY: tuple[str, ...] = get_args(GivenBy)

BALANCED = "balanced"
"""Value of classWeights and sampling that makes all classes count equally."""


def _to_names(value: Any) -> str | list[str]:
    """Convert to the name of a column, or to a list of distinct names."""
    if isinstance(value, str):
        return value
    names = list(value) if isinstance(value, list | tuple) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{reprlib.repr(value)} is neither a column's name nor a list of names")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise TypeError(f"the list names {twice!r} more than once; name each column once")
    return names


Labels: TypeAlias = Sequence[Any]
"""Class labels: strings, booleans or whole numbers."""


_LISTS = (list, tuple, range, np.ndarray)


def _to_labels(value: Any) -> Sequence[Any]:
    """Convert to a list of labels, or to a list of such lists, with None for a column whose labels are not given."""
    if isinstance(value, _LISTS) and any(one is None or isinstance(one, _LISTS) for one in value):
        return [None if one is None else to_label_list(one) for one in value]
    return to_label_list(value)


def to_label_list(value: Any) -> list[Any]:
    """Convert to the labels of the classes of one output.

    Raises:
        TypeError: if they are not distinct, or of another type.
    """
    items = list(value) if isinstance(value, _LISTS) else []
    values = [one.item() if isinstance(one, np.generic) else one for one in items]
    labels = [int(one) if isinstance(one, float) and one.is_integer() else one for one in values]
    kinds = {type(label) for label in labels}
    if len(labels) < 2 or len(kinds) > 1 or not kinds <= {str, bool, int} or len(set(labels)) < len(labels):
        raise TypeError(
            f"{value!r} are not two labels or more, each once, that are all strings, booleans or whole numbers"
        )
    return labels


class HasFeatureColumns(HasFeaturesCol):
    """pyspark's Param ``featuresCol``, for one or more columns."""

    featuresCol: Entry[Any] = Entry(
        _to_names,
        "feature column, or a list of feature columns",
        default="features",
        more="The columns hold numbers, vectors or arrays. Integers stay integers if the model takes integers, as an "
        "embedding does.",
    )
    setFeaturesCol = featuresCol.setter()

    def getFeaturesCols(self) -> list[str]:
        """Return the feature columns, always as a list."""
        names: str | list[str] = self.getOrDefault(self.featuresCol)
        return [names] if isinstance(names, str) else list(names)


class HasLabelColumns(HasLabelCol):
    """pyspark's Param ``labelCol``, for one or more columns, and ``lossWeights``."""

    labelCol: Entry[Any] = Entry(
        _to_names,
        "label column, or a list with one label column for each output of the model",
        default="label",
        more="Class labels are whole numbers from 0, as integers or doubles, or any integers, booleans or strings. The "
        "latter are indexed in ascending order, and predictions have their values. Decimals become doubles. With a "
        "list of columns, the model returns a tuple in the order of the list, or a dict by column name.",
    )
    setLabelCol = labelCol.setter()
    lossWeights, getLossWeights, setLossWeights = optional(
        to_numbers,
        "weights of the losses of the label columns in their sum (> 0); default: 1 for each",
        check=above(0),
        more="They cannot be set together with trainStep.",
    )

    def getLabelCols(self) -> list[str]:
        """Return the label columns, always as a list."""
        names: str | list[str] = self.getOrDefault(self.labelCol)
        return [names] if isinstance(names, str) else list(names)


def _to_class_weights(value: Any) -> Any:
    """Convert to ``"balanced"``, a list of numbers, or a dict of numbers by label."""
    if isinstance(value, str):
        return OneOf(BALANCED)(value)
    if isinstance(value, Mapping):
        labels = [label.item() if isinstance(label, np.generic) else label for label in value]
        return dict(zip(labels, to_numbers(list(value.values())), strict=True))
    return to_numbers(value)


def _check_class_weights(param: Param[Any], value: Any) -> None:
    weights = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, str):
        return
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ParamError(
            f"Param {param.name} must be numbers of at least 0 that are not all 0, got {value}: {param.doc}."
        )


class HasLabels(Params):
    """Params ``labels``, ``classWeights`` and ``sampling``."""

    labels, getLabels, setLabels = optional(
        _to_labels,
        "list of the class labels in the order of the model's outputs, or a list of such lists for several label "
        "columns; default: the labels found in the rows, in ascending order",
        more="With this Param, the rows may lack a class, as in a fold of ``CrossValidator``, and need not be read to "
        "find the classes. In a list of lists, None stands for a label column whose classes are not named.",
    )
    classWeights, getClassWeights, setClassWeights = optional(
        _to_class_weights,
        "weights of the rows of each class in the loss: balanced, a list in the order of the classes, or a dict by "
        "label (>= 0)",
        check=_check_class_weights,
        more='``"balanced"`` gives the classes of the training rows equal weight: for n rows and k classes, a row of '
        "a class with m rows has the weight n / (k m). A label that the dict lacks has weight 1. They multiply the "
        "weights of ``weightCol``, also on validation rows.",
    )
    sampling, getSampling, setSampling = param(
        OneOf("all", BALANCED),
        "training rows of an epoch: all of them once, or balanced, which repeats the rows of rarer classes",
        default="all",
        more='``"balanced"`` has each row of a class as often as brings the class closest to the size of the largest '
        "one. In the loss, weights make up for the rounding, so that without ``weightCol`` all classes count equally. "
        "Validation rows are not repeated; in ``val_loss`` they have weights in proportion to 1 / m, for m training "
        "rows of the class.",
    )


class HasRowColumns(HasWeightCol, HasValidationIndicatorCol):
    """Params for row weights, and for the rows to validate on."""

    weightCol = Entry(
        TypeConverters.toString, "column of non-negative row weights; default: all rows have equal weight"
    )
    setWeightCol = weightCol.setter()
    validationIndicatorCol = Entry(
        TypeConverters.toString,
        "column of booleans that are true for validation rows, on which the model is not trained; default: none",
    )
    setValidationIndicatorCol = validationIndicatorCol.setter()
    validationFraction, getValidationFraction, setValidationFraction = optional(
        TypeConverters.toFloat,
        "fraction of the rows, drawn at random, that are validation rows (between 0 and 1); default: none",
        check=between(0, 1),
        more="The same fraction is drawn from each row group in the Store. The same ``seed`` draws the same rows as "
        "long as the row groups stay in the Store; Spark may write the rows in another order the next time.",
    )

    def _weight_column(self) -> str | None:
        """Return the column of row weights, if one is set."""
        return (self.getWeightCol() or None) if self.isSet(self.weightCol) else None


class HasModelInputs(Params):
    """Params for how the user's model is called with the features."""

    passFeaturesBy, getPassFeaturesBy, setPassFeaturesBy = param(
        cast("Callable[[Any], GivenBy]", OneOf(*PASSED_BY)),
        "how the features are passed to the model: position (in the order of featuresCol), name (as keyword arguments "
        "with the names of the columns) or matrix (as one matrix of columns that hold one number per row)",
        default="position",
        more="The matrix has the shape ``(rows, columns)`` and the name ``features``.",
    )
    prepareFeatures, getPrepareFeatures, setPrepareFeatures = optional(
        AsGiven[PrepareFunction](),
        "function that converts a dict of the feature columns of a batch to the model's inputs, also in transform",
        check=check_callable,
        more="It is for feature columns that are not numbers (strings, bytes, images) or do not have the form that the "
        "model takes. The dict holds an array for each column, with one item per row. The function returns an array "
        "or tensor, or a dict of several.",
    )
    paddingValue, getPaddingValue, setPaddingValue = optional(
        TypeConverters.toFloat,
        "value that pads arrays to the longest array of a batch; default: all arrays have one length",
    )
    augment, getAugment, setAugment = optional(
        AsGiven[AugmentFunction](),
        "function that takes a dict of the arrays of a batch and returns a dict of changed arrays, in training only",
        check=check_callable,
        field="augment",
        more="The dict holds the inputs, labels and weights by name.",
    )


def _check_thresholds(param: Param[Any], value: Sequence[float]) -> None:
    if not all(0 <= number < math.inf for number in value) or sum(number == 0 for number in value) > 1:
        raise ParamError(
            f"Param {param.name} must be numbers of at least 0, at most one of them 0; got {value}: {param.doc}."
        )


class HasScoredColumns(HasRawPredictionCol, HasProbabilityCol, HasPredictionCol):
    """pyspark's Params ``predictionCol``, ``probabilityCol`` and ``rawPredictionCol``, and ``predictionType``.

    As everywhere in Spark ML, a column whose name is the empty string is not added. pyspark's mixins are in the same
    order as in its ``Classifier``, from which classes of sparkdl derive as well.
    """

    predictionType, getPredictionType, setPredictionType = param(
        OneOf(*PREDICTION_TYPES),
        "type of predictionCol: auto, double, long, array or vector",
        default="auto",
        more='``"auto"`` is the type of the label column for classes, and double or array otherwise. ``"double"`` and '
        '``"long"`` give the number of the class if labels are strings; ``"vector"`` is a vector of Spark ML.',
    )
    thresholds, getThresholds, setThresholds = optional(
        to_numbers,
        "number for each class that divides its probability; the class with the largest quotient is predicted "
        "(>= 0, at most one of them 0); default: the most probable class",
        check=_check_thresholds,
        more="As in Spark ML: ``[0.9, 0.1]`` predicts the second class from a probability of 0.1 on. The order is "
        "that of the entries of ``probabilityCol``, and they apply wherever the model predicts, and not to the metrics "
        "of a fit.",
    )
    probabilityCol = Entry(
        TypeConverters.toString,
        "column that transform adds, with vectors of the probabilities of all classes; empty for no such column",
        default="",
        more="The classes are in ascending order, or in the order of ``labels``. The loss must be CrossEntropyLoss, "
        "NLLLoss, BCEWithLogitsLoss or BCELoss. With several label columns, the column is a struct with a field for "
        "each label column that has such a loss.",
    )
    setProbabilityCol = probabilityCol.setter()
    rawPredictionCol = Entry(
        TypeConverters.toString,
        "column that transform adds, with vectors of the model's scores of all classes; empty for no such column",
        default="",
        more="For two classes with one logit z, the scores are -z and z.",
    )

    # A def, as that of pyspark's models, which mypy compares.
    def setRawPredictionCol(self: ParamsT, value: str) -> ParamsT:
        """Set the column of class scores that transform adds; none if the name is empty."""
        return self._set(rawPredictionCol=value)


class HasPrediction(HasPredictionCol):
    """Params of ``transform`` that all estimators and models have."""

    predictionCol = Entry(
        TypeConverters.toString, "column of predictions that transform adds", default="prediction"
    )
    predictionBatchSize, getPredictionBatchSize, setPredictionBatchSize = param(
        TypeConverters.toInt,
        "number of rows per forward pass of transform, and of a served model (> 0)",
        default=DEFAULT_BATCH_SIZE,
        check=at_least(1),
    )

    def setPredictionCol(self: ParamsT, value: str) -> ParamsT:
        """Set the column that transform adds."""
        return self._set(predictionCol=value)


def labels_by_column(value: Sequence[Any] | None, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the labels given by Param ``labels``, by label column; columns without given labels are left out.

    Raises:
        ParamError: if labels are given for more or fewer columns than ``names``.
    """
    if value is None:
        return {}
    lists = value if any(one is None or isinstance(one, list) for one in value) else [value]
    if len(lists) != len(names):
        raise ParamError(
            f"Param labels has the labels of {len(lists)} columns, and labelCol names {len(names)}: "
            f"{list_names(names)}. Give a list for each, or None."
        )
    return {name: labels for name, labels in zip(names, lists, strict=True) if labels is not None}


def check_validation(params: HasRowColumns) -> None:
    """Check that at most one Param selects the rows to validate on.

    Raises:
        ParamError: if both Params are set.
    """
    fraction = params.getValidationFraction()
    if fraction is not None and params.isSet(params.validationIndicatorCol):
        raise ParamError(
            f"Params validationFraction ({fraction}) and validationIndicatorCol "
            f"({params.getValidationIndicatorCol()!r}) both say which rows to validate on. Set one of them."
        )


def scored_columns_of(params: HasScoredColumns) -> tuple[ScoredColumn, ...]:
    """Return the columns that transform adds, in Spark's order.

    Raises:
        ParamError: if there are none, or two have the same name.
    """
    columns = (
        ScoredColumn(name=params.getRawPredictionCol(), answer="rawPrediction"),
        ScoredColumn(name=params.getProbabilityCol(), answer="probability"),
        ScoredColumn(name=params.getPredictionCol(), type=params.getPredictionType()),
    )
    named = tuple(column for column in columns if column.name)
    if not named:
        raise ParamError(
            "Params predictionCol, probabilityCol and rawPredictionCol are all empty, so that transform adds "
            "nothing. Name one of them."
        )
    if len({column.name for column in named}) < len(named):
        shared = ", ".join(f"{column.param} {column.name!r}" for column in named)
        raise ParamError(f"Two columns cannot have one name: {shared}. Name them differently.")
    return named
