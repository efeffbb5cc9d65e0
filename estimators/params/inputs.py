"""Mixins of Params about the inputs of a model, the labels of classifiers, and the columns of ``transform``.

There is one small mixin for each group of Params; :mod:`sparkdl.estimators.params.estimator` combines them.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, get_args

import numpy as np
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
)

from sparkdl.errors import ParamError
from sparkdl.estimators.params.base import ParamsT, one_of
from sparkdl.estimators.scoring.columns import PREDICTION_TYPES, ScoredColumn
from sparkdl.model.inputs import GivenBy, PrepareFunction
from sparkdl.training.objective import UserStep
from sparkdl.training.spec import AugmentFunction

PASSED_BY: tuple[str, ...] = get_args(GivenBy)


def _to_names(value: Any) -> str | list[str]:
    """Convert to the name of a column, or to a list of names, each once."""
    if isinstance(value, str):
        return value
    names = list(value) if isinstance(value, list | tuple) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{reprlib.repr(value)} is neither a column's name nor a list of names")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise TypeError(f"the list names {twice!r} more than once; name each column once")
    return names


def _as_list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


class HasFeatureColumns(HasFeaturesCol):
    """Param ``featuresCol``, of pyspark, for one column or several."""

    featuresCol: Param[Any] = Param(
        Params._dummy(), "featuresCol", "feature column, or a list of feature columns", _to_names
    )

    def getFeaturesCols(self) -> list[str]:
        """Return the feature columns, a list also of one."""
        return _as_list(self.getOrDefault(self.featuresCol))

    def setFeaturesCol(self: ParamsT, value: str | Sequence[str]) -> ParamsT:
        """Set the feature column, or several."""
        return self._set(featuresCol=value)


class HasPassFeaturesBy(Params):
    """Param ``passFeaturesBy``."""

    passFeaturesBy: Param[Any] = Param(
        Params._dummy(),
        "passFeaturesBy",
        "how the model is called with its features: by position, in the order of featuresCol, by name, or with one "
        "matrix of columns of one number each",
        one_of(*PASSED_BY),
    )

    def getPassFeaturesBy(self) -> GivenBy:
        """Return ``"position"``, ``"name"`` or ``"matrix"``."""
        return self.getOrDefault(self.passFeaturesBy)

    def setPassFeaturesBy(self: ParamsT, value: str) -> ParamsT:
        """Set how the model is called with its features."""
        return self._set(passFeaturesBy=value)


class HasLabelColumns(HasLabelCol):
    """Params ``labelCol``, of pyspark, for one column or several, and ``lossWeights``."""

    labelCol: Param[Any] = Param(
        Params._dummy(), "labelCol", "label column, or a list of one for each output of the model", _to_names
    )
    lossWeights: Param[list[float]] = Param(
        Params._dummy(),
        "lossWeights",
        "what the loss of each label column weighs in their sum (> 0); default: 1 each",
        TypeConverters.toListFloat,
    )

    def getLabelCols(self) -> list[str]:
        """Return the label columns, a list also of one."""
        return _as_list(self.getOrDefault(self.labelCol))

    def getLossWeights(self) -> list[float] | None:
        """Return what the loss of each label column weighs, where that was set."""
        return self.getOrDefault(self.lossWeights) if self.isSet(self.lossWeights) else None

    def setLabelCol(self: ParamsT, value: str | Sequence[str]) -> ParamsT:
        """Set the label column, or several."""
        return self._set(labelCol=value)

    def setLossWeights(self: ParamsT, value: Sequence[float]) -> ParamsT:
        """Set what the loss of each label column weighs."""
        return self._set(lossWeights=value)


class HasPaddingValue(Params):
    """Param ``paddingValue``."""

    paddingValue: Param[float] = Param(
        Params._dummy(),
        "paddingValue",
        "with which arrays of different lengths are filled up to the longest of a batch; default: all have one length",
        TypeConverters.toFloat,
    )

    def getPaddingValue(self) -> float | None:
        """Return with what arrays are filled up, if they are."""
        return self.getOrDefault(self.paddingValue) if self.isSet(self.paddingValue) else None

    def setPaddingValue(self: ParamsT, value: float) -> ParamsT:
        """Set with what arrays are filled up."""
        return self._set(paddingValue=value)


class HasPrepareFeatures(Params):
    """Param ``prepareFeatures``."""

    prepareFeatures: Param[PrepareFunction] = Param(
        Params._dummy(),
        "prepareFeatures",
        "function that makes the model's inputs of a dict of the feature columns of a batch, also in transform",
    )

    def getPrepareFeatures(self) -> PrepareFunction | None:
        """Return the function that prepares features, if there is one."""
        return self.getOrDefault(self.prepareFeatures) if self.isSet(self.prepareFeatures) else None

    def setPrepareFeatures(self: ParamsT, value: PrepareFunction) -> ParamsT:
        """Set the function that prepares features."""
        return self._set(prepareFeatures=value)


class HasAugment(Params):
    """Param ``augment``."""

    augment: Param[AugmentFunction] = Param(
        Params._dummy(),
        "augment",
        "function that takes a dict of the arrays of a batch and returns them changed, for training alone",
    )

    def getAugment(self) -> AugmentFunction | None:
        """Return the function that changes batches for training, if there is one."""
        return self.getOrDefault(self.augment) if self.isSet(self.augment) else None

    def setAugment(self: ParamsT, value: AugmentFunction) -> ParamsT:
        """Set the function that changes batches for training."""
        return self._set(augment=value)


class HasTrainStep(Params):
    """Param ``trainStep``."""

    trainStep: Param[UserStep] = Param(
        Params._dummy(),
        "trainStep",
        "function of (model, batch) that returns its mean loss, or that and the outputs, in the place of loss",
    )

    def getTrainStep(self) -> UserStep | None:
        """Return the function that finds the loss of a batch, if there is one."""
        return self.getOrDefault(self.trainStep) if self.isSet(self.trainStep) else None

    def setTrainStep(self: ParamsT, value: Callable[..., Any]) -> ParamsT:
        """Set the function that finds the loss of a batch."""
        return self._set(trainStep=value)


Labels: TypeAlias = Sequence[Any]
"""What the label column calls the classes: strings, booleans or whole numbers."""


_LISTS = (list, tuple, range, np.ndarray)


def _to_labels(value: Any) -> list[Any]:
    """Convert to a list of labels, or to a list of such lists, with None for a column whose labels are not named."""
    if isinstance(value, _LISTS) and any(one is None or isinstance(one, _LISTS) for one in value):
        return [None if one is None else _to_list(one) for one in value]
    return _to_list(value)


def _to_list(value: Any) -> list[Any]:
    given = list(value) if isinstance(value, _LISTS) else []
    each = [one.item() if isinstance(one, np.generic) else one for one in given]
    labels = [int(one) if isinstance(one, float) and one.is_integer() else one for one in each]
    kinds = {type(label) for label in labels}
    if len(labels) < 2 or len(kinds) > 1 or not kinds <= {str, bool, int} or len(set(labels)) < len(labels):
        raise TypeError(
            f"{value!r} are not two labels or more, each once, that are all strings, booleans or whole numbers"
        )
    return labels


class HasLabels(Params):
    """Param ``labels``."""

    labels: Param[Any] = Param(
        Params._dummy(),
        "labels",
        "labels of the classes, in the order of the model's outputs, or a list of such lists for several label "
        "columns; default: those that the rows hold, in ascending order",
        _to_labels,
    )

    def getLabels(self) -> list[Any] | None:
        """Return the labels of the classes, where they were named."""
        return self.getOrDefault(self.labels) if self.isSet(self.labels) else None

    def setLabels(self: ParamsT, value: Labels | Sequence[Labels | None]) -> ParamsT:
        """Set the labels of the classes."""
        return self._set(labels=value)


def labels_by_column(given: list[Any] | None, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the labels that the Param names by label column; a column whose labels are not named is left out.

    Raises:
        ParamError: if they are those of more or fewer columns.
    """
    if given is None:
        return {}
    each = given if any(one is None or isinstance(one, list) for one in given) else [given]
    if len(each) != len(names):
        raise ParamError(
            f"Param labels has the labels of {len(each)} columns, and labelCol names {len(names)}: "
            f"{', '.join(names)}. Give a list for each, or None."
        )
    return {name: labels for name, labels in zip(names, each, strict=True) if labels is not None}


class HasScoredColumns(HasRawPredictionCol, HasProbabilityCol, HasPredictionCol):
    """Params ``predictionCol``, ``probabilityCol`` and ``rawPredictionCol``, of pyspark, and ``predictionType``.

    As everywhere in Spark ML, a column whose name is the empty string is not added. pyspark's mixins come in the order
    in which its ``Classifier`` has them, from which classes here derive as well.
    """

    predictionType: Param[str] = Param(
        Params._dummy(),
        "predictionType",
        "type of predictionCol: auto (as the label column calls classes, else double or array), double, long, array or "
        "vector",
        one_of(*PREDICTION_TYPES),
    )

    def getPredictionType(self) -> str:
        """Return the type of predictionCol."""
        return self.getOrDefault(self.predictionType)

    def setPredictionType(self: ParamsT, value: str) -> ParamsT:
        """Set the type of predictionCol."""
        return self._set(predictionType=value)

    def setProbabilityCol(self: ParamsT, value: str) -> ParamsT:
        """Set the column of class probabilities that transform adds; with an empty name it adds none."""
        return self._set(probabilityCol=value)

    def setRawPredictionCol(self: ParamsT, value: str) -> ParamsT:
        """Set the column of class scores that transform adds; with an empty name it adds none."""
        return self._set(rawPredictionCol=value)


def scored_columns_of(params: HasScoredColumns) -> tuple[ScoredColumn, ...]:
    """Return the columns that transform adds, in Spark's order.

    Raises:
        ParamError: if there are none, or two of one name.
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
        given = ", ".join(f"{column.param} {column.name!r}" for column in named)
        raise ParamError(f"Two columns cannot have one name: {given}. Name them differently.")
    return named
