"""The Params of the estimator and its model: one small mixin each, all defaults in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasPredictionCol, HasSeed, HasWeightCol
from torch import nn

from sparkdl.collective import check_transport
from sparkdl.errors import ParamError
from sparkdl.estimators.params.base import (
    CheckedParams,
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
    HasTransport,
    HasWire,
    ParamsT,
    check_callable,
    check_optimizer,
    prediction_batch_size_of,
)
from sparkdl.estimators.params.inputs import (
    HasAugment,
    HasFeatureColumns,
    HasLabelColumns,
    HasLabels,
    HasPaddingValue,
    HasPassFeaturesBy,
    HasPrepareFeatures,
    HasScoredColumns,
    HasTrainStep,
    labels_by_column,
    scored_columns_of,
)
from sparkdl.estimators.params.running import (
    HasCheckpoints,
    HasLogCheckpoints,
    HasRegistration,
    HasRestarts,
    HasTracking,
)
from sparkdl.estimators.params.training import (
    HasBestMetric,
    HasCallbacks,
    HasCompileModel,
    HasDeterministic,
    HasEarlyStopping,
    HasGradientAccumulation,
    HasLearningRateScaling,
    HasMaxGradNorm,
    HasMetrics,
    HasPrecision,
    HasScheduler,
    HasSchedulerInterval,
    HasSyncBatchNorm,
    HasValidation,
    best_goal_of,
    check_validation,
    patience_of,
)
from sparkdl.launch.hangs.watch import MIN_HANG_TIMEOUT_S
from sparkdl.model.architecture import check_has_values
from sparkdl.model.inputs import dtype_name, parameter_dtype
from sparkdl.model.predictor import DEFAULT_BATCH_SIZE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.data import ParquetDataset

DEFAULTS: dict[str, Any] = {
    "featuresCol": "features",
    "labelCol": "label",
    "passFeaturesBy": "position",
    "predictionCol": "prediction",
    "predictionType": "auto",
    "probabilityCol": "",
    "rawPredictionCol": "",
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
    "syncBatchNorm": False,
    "compileModel": False,
    "deterministic": False,
    "earlyStoppingMinDelta": 0.0,
    "keepCheckpoints": 2,
    "maxRestarts": 0,
    "transport": "auto",
    "wire": "float32",
    "tracking": "auto",
    "trackingTimeoutSeconds": 30.0,
    "logCheckpoints": False,
    "showProgress": True,
    "predictionBatchSize": DEFAULT_BATCH_SIZE,
}
"""Default of every Param that has one."""


class _SharedParams(
    HasFeatureColumns,
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
    HasWire,
    HasStore,
    HasTracking,
    HasRegistration,
    HasLogCheckpoints,
    HasShowProgress,
    HasPredictionBatchSize,
    HasSchedulerInterval,
    HasLearningRateScaling,
    HasGradientAccumulation,
    HasMaxGradNorm,
    HasPrecision,
    HasSyncBatchNorm,
    HasCompileModel,
    HasDeterministic,
    HasValidation,
    HasEarlyStopping,
    HasBestMetric,
    HasCheckpoints,
    HasRestarts,
    CheckedParams,
):
    """Params that all estimators and their models share; each can be written as JSON."""

    def setPredictionCol(self: ParamsT, value: str) -> ParamsT:
        """Set the column that transform adds."""
        return self._set(predictionCol=value)

    def setWeightCol(self: ParamsT, value: str) -> ParamsT:
        """Set the column of row weights."""
        return self._set(weightCol=value)

    def setSeed(self: ParamsT, value: int) -> ParamsT:
        """Set the seed."""
        return self._set(seed=value)


def default_values(instance: Params) -> dict[str, Any]:
    """Return the defaults of those Params that an instance has."""
    return {name: value for name, value in DEFAULTS.items() if instance.hasParam(name)}


class _TorchParams(HasScoredColumns, HasLabelColumns, _SharedParams):
    """Params that the estimator and its model share."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**default_values(self))


class _TorchEstimatorParams(
    _TorchParams,
    HasLabels,
    HasPassFeaturesBy,
    HasPaddingValue,
    HasModel,
    HasOptimizer,
    HasLoss,
    HasTrainStep,
    HasPrepareFeatures,
    HasAugment,
    HasScheduler,
    HasMetrics,
    HasCallbacks,
):
    """Params of the estimator: the shared ones, how the model is called, and those that hold Python objects."""

    def weight_column(self) -> str | None:
        """Return the column of row weights, if one is set."""
        return (self.getWeightCol() or None) if self.isSet(self.weightCol) else None

    def label_names(self) -> list[str]:
        """Return the label columns; with a trainStep those alone that were set, as it may need none."""
        if self.getTrainStep() is not None and not self.isSet(self.labelCol):
            return []
        return self.getLabelCols()

    def function_params(self) -> list[Param[Any]]:
        """Return the Params that hold a function and need not be set, where they are."""
        params = (self.scheduler, self.trainStep, self.prepareFeatures, self.augment)
        return [param for param in params if self.isSet(param)]

    def prepares_features(self) -> bool:
        """Whether a function makes the model's inputs of the feature columns."""
        return self.getPrepareFeatures() is not None

    def keeps_decimals(self) -> bool:
        """Whether decimals among the features stay decimals, rather than being cast to doubles."""
        return self.prepares_features()

    def vector_dtype(self) -> str:
        """Return the dtype in which vectors of Spark ML are stored: that of the model's weights."""
        dtype = dtype_name(parameter_dtype(self.getModel()))
        return "float64" if dtype == "float64" else "float32"

    def learn(self, dataset: ParquetDataset, spark: SparkSession | None = None) -> None:
        """Set what is made of the rows, once they are there; nothing, where the user has set all."""

    def further_params(self) -> dict[str, object]:
        """Return by name what MLflow is told beside the Params."""
        return {}

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
        self._check_presence()
        self.check_settings()
        if not isinstance(self.getModel(), nn.Module):
            raise ParamError(f"Param model is a {type(self.getModel()).__name__}, not a torch.nn.Module.")
        check_has_values(self.getModel(), "Param model")
        losses = self.getLoss() if self.isSet(self.loss) else []
        for loss in losses if isinstance(losses, list | tuple) else [losses]:
            check_callable(self.loss, loss)
        check_optimizer(self.optimizer, self.getOptimizer())

    def check_settings(self) -> None:
        """Check everything but the model, its optimizer and its loss.

        Raises:
            ParamError: naming the Param, its value and what it may be.
        """
        for param, least in (
            (self.batchSize, 1),
            (self.epochs, 1),
            (self.numWorkers, 1),
            (self.gradientAccumulationSteps, 1),
            (self.warmupSteps, 0),
        ):
            value = self.getOrDefault(param)
            if value < least:
                raise ParamError(f"Param {param.name} must be at least {least}, got {value}: {param.doc}.")
        prediction_batch_size_of(self)
        check_transport(self.getTransport(), self.getWire())
        self._check_checkpoints()
        max_grad_norm = self.getMaxGradNorm()
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ParamError(f"Param maxGradNorm is {max_grad_norm}: {self.maxGradNorm.doc}.")
        if self.getKeepRowsSeconds() < 0:
            raise ParamError(
                f"Param keepRowsSeconds is {self.getKeepRowsSeconds()}: {self.keepRowsSeconds.doc}."
            )
        self._check_tracking()
        if self.getGpusPerWorker() not in (0, 1):
            raise ParamError(
                f"Param gpusPerWorker is {self.getGpusPerWorker()}: a rank trains on 0 or 1 GPUs."
            )
        scored_columns_of(self)
        if self.getTrainStep() is None:
            labels_by_column(self.getLabels(), self.label_names())
        check_validation(self)
        self.check_metrics()
        self.check_callbacks()
        patience_of(self)
        best_goal_of(self, self.metric_names())
        if any(not weight > 0 for weight in self.getLossWeights() or ()):
            raise ParamError(f"Param lossWeights is {self.getLossWeights()}: {self.lossWeights.doc}.")
        for param in self.function_params():
            check_callable(param, self.getOrDefault(param))

    def _check_tracking(self) -> None:
        timeout_s = self.getTrackingTimeoutSeconds()
        if not timeout_s >= 0:
            raise ParamError(
                f"Param trackingTimeoutSeconds is {timeout_s}: {self.trackingTimeoutSeconds.doc}."
            )
        if self.getRegisteredModelAlias() is not None and self.getRegisteredModelName() is None:
            raise ParamError(
                f"Param registeredModelAlias is {self.getRegisteredModelAlias()!r}: {self.registeredModelAlias.doc}."
            )
        if self.getLogCheckpoints() and self.getCheckpointDir() is None:
            raise ParamError(f"Param logCheckpoints is True: {self.logCheckpoints.doc}.")

    def _check_presence(self) -> None:
        needed: list[Param[Any]] = [self.model, self.optimizer]
        if self.getTrainStep() is None:
            needed.append(self.loss)
        elif self.isSet(self.loss):
            raise ParamError(
                "Params loss and trainStep are both set. The loss is what trainStep returns: leave loss out."
            )
        elif self.isSet(self.labels):
            raise ParamError(
                "Params labels and trainStep are both set. A step gets labels as the column holds them: leave labels "
                "out."
            )
        elif self.getLossWeights() is not None:
            raise ParamError(
                "Params lossWeights and trainStep are both set. Weigh the losses in trainStep: leave lossWeights out."
            )
        for param in needed:
            if not self.isDefined(param):
                raise ParamError(f"Param {param.name} is not set: {param.doc}.")

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
                raise ParamError(f"Param {param.name} must be at least {least}, got {value}: {param.doc}.")
        hang_timeout_s = self.getHangTimeoutSeconds()
        if hang_timeout_s is not None and not hang_timeout_s >= MIN_HANG_TIMEOUT_S:
            raise ParamError(
                f"Param hangTimeoutSeconds must be at least {MIN_HANG_TIMEOUT_S:g}, got {hang_timeout_s:g}: "
                f"{self.hangTimeoutSeconds.doc}."
            )
        if not 1 <= self.getMinWorkers() <= self.getNumWorkers():
            raise ParamError(
                f"Param minWorkers is {self.getMinWorkers()} and numWorkers {self.getNumWorkers()}: "
                f"{self.minWorkers.doc}."
            )
