"""One small mixin for each group of Params about what goes into a model; :mod:`.params` puts them together."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol

from sparkdl.estimators.param_mixins import P, one_of
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

    def setFeaturesCol(self: P, value: str | Sequence[str]) -> P:
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

    def setPassFeaturesBy(self: P, value: str) -> P:
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

    def setLabelCol(self: P, value: str | Sequence[str]) -> P:
        """Set the label column, or several."""
        return self._set(labelCol=value)

    def setLossWeights(self: P, value: Sequence[float]) -> P:
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

    def setPaddingValue(self: P, value: float) -> P:
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

    def setPrepareFeatures(self: P, value: PrepareFunction) -> P:
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

    def setAugment(self: P, value: AugmentFunction) -> P:
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

    def setTrainStep(self: P, value: Callable[..., Any]) -> P:
        """Set the function that finds the loss of a batch."""
        return self._set(trainStep=value)
