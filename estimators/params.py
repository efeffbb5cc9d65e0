"""The Params of the estimator and its model: one small mixin each, all defaults in one place."""

from __future__ import annotations

from typing import Any

from pyspark.ml.param import Param
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasSeed,
    HasWeightCol,
)
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.estimators.checked_params import CheckedParams
from sparkdl.estimators.checkpoint_mixins import HasCheckpoints, HasRestarts
from sparkdl.estimators.course_mixins import HasBestMetric, HasCallbacks, HasEarlyStopping
from sparkdl.estimators.param_mixins import (
    HasBatchSize,
    HasCache,
    HasEpochs,
    HasGpusPerWorker,
    HasLoss,
    HasModel,
    HasNumWorkers,
    HasOptimizer,
    HasPredictionBatchSize,
    HasShowProgress,
    HasShuffle,
    HasStore,
    HasTracking,
    HasTransport,
    P,
)
from sparkdl.estimators.update_mixins import (
    HasGradientAccumulation,
    HasLearningRateScaling,
    HasMaxGradNorm,
    HasPrecision,
    HasScheduler,
    HasSchedulerInterval,
)
from sparkdl.estimators.validation_mixins import HasMetrics, HasValidation
from sparkdl.training.predictor import DEFAULT_BATCH_SIZE

DEFAULTS: dict[str, Any] = {
    "featuresCol": "features",
    "labelCol": "label",
    "predictionCol": "prediction",
    "batchSize": 32,
    "epochs": 1,
    "numWorkers": 1,
    "gpusPerWorker": 0,
    "seed": 0,
    "shuffle": True,
    "cache": "off",
    "schedulerInterval": "epoch",
    "learningRateScaling": "none",
    "warmupSteps": 0,
    "gradientAccumulationSteps": 1,
    "precision": "float32",
    "earlyStoppingMinDelta": 0.0,
    "keepCheckpoints": 2,
    "maxRestarts": 0,
    "transport": "auto",
    "tracking": "auto",
    "showProgress": True,
    "predictionBatchSize": DEFAULT_BATCH_SIZE,
}
"""Default of every Param that has one."""


class _TorchParams(
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasWeightCol,
    HasSeed,
    HasBatchSize,
    HasEpochs,
    HasNumWorkers,
    HasGpusPerWorker,
    HasShuffle,
    HasCache,
    HasTransport,
    HasStore,
    HasTracking,
    HasShowProgress,
    HasPredictionBatchSize,
    HasSchedulerInterval,
    HasLearningRateScaling,
    HasGradientAccumulation,
    HasMaxGradNorm,
    HasPrecision,
    HasValidation,
    HasEarlyStopping,
    HasBestMetric,
    HasCheckpoints,
    HasRestarts,
    CheckedParams,
):
    """Params that the estimator and its model share; each can be written as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS)

    def setFeaturesCol(self: P, value: str) -> P:
        """Set the feature column."""
        return self._set(featuresCol=value)

    def setLabelCol(self: P, value: str) -> P:
        """Set the label column."""
        return self._set(labelCol=value)

    def setPredictionCol(self: P, value: str) -> P:
        """Set the column that transform adds."""
        return self._set(predictionCol=value)

    def setWeightCol(self: P, value: str) -> P:
        """Set the column of row weights."""
        return self._set(weightCol=value)

    def setSeed(self: P, value: int) -> P:
        """Set the seed."""
        return self._set(seed=value)


class _TorchEstimatorParams(
    _TorchParams, HasModel, HasOptimizer, HasLoss, HasScheduler, HasMetrics, HasCallbacks
):
    """Params of the estimator: the shared ones and those that hold Python objects."""

    def metric_names(self) -> list[str]:
        """Return the names of all losses and metrics that a fit has."""
        names = ["loss", *self.getMetrics()]
        has_validation = self.isSet(self.validationIndicatorCol) or self.isSet(self.validationFraction)
        return [*names, *(f"val_{name}" for name in names)] if has_validation else names

    def check_values(self) -> None:
        """Check what needs no data.

        Raises:
            ParamError: naming the Param, its value and what it may be.
        """
        for param in (self.model, self.optimizer, self.loss):
            if not self.isDefined(param):
                raise ParamError(f"Param {param.name} is not set: {param.doc}.")
        for param, least in (
            (self.batchSize, 1),
            (self.epochs, 1),
            (self.numWorkers, 1),
            (self.predictionBatchSize, 1),
            (self.gradientAccumulationSteps, 1),
            (self.warmupSteps, 0),
        ):
            value = self.getOrDefault(param)
            if value < least:
                raise ParamError(f"Param {param.name} is {value}: {param.doc}, at least {least}.")
        self._check_checkpoints()
        max_grad_norm = self.getMaxGradNorm()
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ParamError(f"Param maxGradNorm is {max_grad_norm}: {self.maxGradNorm.doc}.")
        if self.getKeepRowsSeconds() < 0:
            raise ParamError(
                f"Param keepRowsSeconds is {self.getKeepRowsSeconds()}: {self.keepRowsSeconds.doc}."
            )
        if self.getGpusPerWorker() not in (0, 1):
            raise ParamError(
                f"Param gpusPerWorker is {self.getGpusPerWorker()}: a rank trains on 0 or 1 GPUs."
            )
        if not isinstance(self.getModel(), nn.Module):
            raise ParamError(f"Param model is a {type(self.getModel()).__name__}, not a torch.nn.Module.")
        self.check_validation()
        self.check_metrics()
        self.check_callbacks()
        self.patience()
        self.best_goal(self.metric_names())
        functions: list[Param[Any]] = [self.optimizer, self.loss]
        if self.isSet(self.scheduler):
            functions.append(self.scheduler)
        for function in functions:
            given = self.getOrDefault(function)
            if isinstance(given, type) or not callable(given):
                shown = given.__name__ if isinstance(given, type) else type(given).__name__
                raise ParamError(f"Param {function.name} is {shown}: {function.doc}.")

    def _check_checkpoints(self) -> None:
        every = self.getCheckpointEverySteps()
        counts = [
            (self.keepCheckpoints, self.getKeepCheckpoints(), 1),
            (self.maxRestarts, self.getMaxRestarts(), 0),
        ]
        if every is not None:
            counts.append((self.checkpointEverySteps, every, 1))
        for param, value, least in counts:
            if value < least:
                raise ParamError(f"Param {param.name} is {value}: {param.doc}, at least {least}.")
        if not 1 <= self.getMinWorkers() <= self.getNumWorkers():
            raise ParamError(
                f"Param minWorkers is {self.getMinWorkers()} and numWorkers {self.getNumWorkers()}: "
                f"{self.minWorkers.doc}."
            )
