"""Params of the ready-made estimators, beside those of all estimators: one small mixin each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasLabelCol

from sparkdl.errors import ParamError
from sparkdl.estimators.course_mixins import HasCallbacks
from sparkdl.estimators.label_mixins import HasLabels, labels_by_column
from sparkdl.estimators.param_mixins import P
from sparkdl.estimators.params import _SharedParams, default_values
from sparkdl.estimators.ready_made.classes import count_classes
from sparkdl.estimators.scored_mixins import HasScoredColumns
from sparkdl.estimators.update_mixins import HasScheduler
from sparkdl.estimators.validation_mixins import HasMetrics

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset


class HasLearningRate(Params):
    """Params ``learningRate`` and ``weightDecay``."""

    learningRate: Param[float] = Param(
        Params._dummy(), "learningRate", "of the optimizer, AdamW (> 0)", TypeConverters.toFloat
    )
    weightDecay: Param[float] = Param(
        Params._dummy(),
        "weightDecay",
        "by which share of it and the learning rate a weight shrinks in each update (>= 0)",
        TypeConverters.toFloat,
    )

    def getLearningRate(self) -> float:
        """Return the learning rate."""
        return self.getOrDefault(self.learningRate)

    def getWeightDecay(self) -> float:
        """Return the weight decay."""
        return self.getOrDefault(self.weightDecay)

    def setLearningRate(self: P, value: float) -> P:
        """Set the learning rate."""
        return self._set(learningRate=value)

    def setWeightDecay(self: P, value: float) -> P:
        """Set the weight decay."""
        return self._set(weightDecay=value)


class HasDropout(Params):
    """Param ``dropout``."""

    dropout: Param[float] = Param(
        Params._dummy(),
        "dropout",
        "share of what hidden layers put out that is dropped in training (0 to below 1)",
        TypeConverters.toFloat,
    )

    def getDropout(self) -> float:
        """Return the share that is dropped."""
        return self.getOrDefault(self.dropout)

    def setDropout(self: P, value: float) -> P:
        """Set the share that is dropped."""
        return self._set(dropout=value)


class HasTable(Params):
    """Params ``hiddenSizes`` and ``categoricalCols``."""

    hiddenSizes: Param[list[int]] = Param(
        Params._dummy(),
        "hiddenSizes",
        "width of each hidden layer (> 0); an empty list for a linear model",
        TypeConverters.toListInt,
    )
    categoricalCols: Param[list[str]] = Param(
        Params._dummy(),
        "categoricalCols",
        "those of the feature columns whose numbers stand for categories; columns of strings always do",
        TypeConverters.toListString,
    )

    def getHiddenSizes(self) -> list[int]:
        """Return the widths of the hidden layers."""
        return self.getOrDefault(self.hiddenSizes)

    def getCategoricalCols(self) -> list[str]:
        """Return the columns of numbers that stand for categories."""
        return self.getOrDefault(self.categoricalCols)

    def setHiddenSizes(self: P, value: Sequence[int]) -> P:
        """Set the widths of the hidden layers."""
        return self._set(hiddenSizes=value)

    def setCategoricalCols(self: P, value: Sequence[str]) -> P:
        """Set the columns of numbers that stand for categories."""
        return self._set(categoricalCols=value)


READY_MADE_DEFAULTS: dict[str, Any] = {
    "batchSize": 64,
    "epochs": 20,
    "learningRate": 1e-3,
    "weightDecay": 1e-4,
}
"""Where they differ from those of a TorchEstimator, or are Params that it has not."""


class _ReadyMadeParams(
    HasLabelCol,
    _SharedParams,
    HasScheduler,
    HasMetrics,
    HasCallbacks,
    HasLearningRate,
    HasDropout,
):
    """Params of all ready-made estimators."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**{**default_values(self), **READY_MADE_DEFAULTS})

    def check_ranges(self) -> None:
        """Check what a ready-made estimator has of its own.

        Raises:
            ParamError: naming the Param, its value and what it may be.
        """
        fits = {
            self.learningRate: self.getLearningRate() > 0,
            self.weightDecay: self.getWeightDecay() >= 0,
            self.dropout: 0 <= self.getDropout() < 1,
        }
        for param, is_fine in fits.items():
            if not is_fine:
                raise out_of_range(self, param)


class _ReadyMadeClassifierParams(HasScoredColumns, HasLabels, _ReadyMadeParams):
    """Params of ready-made estimators of classes."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(probabilityCol="probability", rawPredictionCol="rawPrediction")

    def _count_classes(self, dataset: ParquetDataset) -> int:
        """How many classes there are: as many as labels were named, or as the rows hold."""
        name = self.getLabelCol()
        named = labels_by_column(self.getLabels(), [name]).get(name)
        return count_classes(dataset, name) if named is None else len(named)


def out_of_range(instance: Params, param: Param[Any]) -> ParamError:
    """Return the error for a Param whose value cannot work."""
    return ParamError(f"Param {param.name} is {instance.getOrDefault(param)}: {param.doc}.")
