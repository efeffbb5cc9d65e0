"""The Params of the estimator and its model: one small mixin each, all defaults in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasSeed,
    HasWeightCol,
)
from torch import nn

from sparkdl.data import Store
from sparkdl.errors import ParamError
from sparkdl.training.predictor import DEFAULT_BATCH_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.training.losses import LossFunction
    from sparkdl.training.spec import OptimizerFactory

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
    "transport": "auto",
    "tracking": "auto",
    "showProgress": True,
    "predictionBatchSize": DEFAULT_BATCH_SIZE,
}
"""Default of every Param that has one."""


def _to_store_url(value: Any) -> str:
    return value.url if isinstance(value, Store) else TypeConverters.toString(value)


def _one_of(*choices: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in choices:
            raise TypeError(f"{value!r} is none of {', '.join(map(repr, choices))}")
        return str(value)

    return convert


class HasModel(Params):
    """Param ``model``."""

    model: Param[Any] = Param(Params._dummy(), "model", "torch.nn.Module to train; fit trains a copy")

    def getModel(self) -> Any:
        """Return the module to train."""
        return self.getOrDefault(self.model)


class HasOptimizer(Params):
    """Param ``optimizer``."""

    optimizer: Param[OptimizerFactory] = Param(
        Params._dummy(), "optimizer", "function that takes the model's parameters and returns an optimizer"
    )

    def getOptimizer(self) -> OptimizerFactory:
        """Return the function that makes the optimizer."""
        return self.getOrDefault(self.optimizer)


class HasLoss(Params):
    """Param ``loss``."""

    loss: Param[LossFunction] = Param(
        Params._dummy(), "loss", "loss of torch.nn, or a function of (outputs, labels) that returns the mean"
    )

    def getLoss(self) -> LossFunction:
        """Return the loss."""
        return self.getOrDefault(self.loss)


class HasBatchSize(Params):
    """Param ``batchSize``."""

    batchSize: Param[int] = Param(
        Params._dummy(), "batchSize", "rows per rank and step (> 0)", TypeConverters.toInt
    )

    def getBatchSize(self) -> int:
        """Return the rows per rank and step."""
        return self.getOrDefault(self.batchSize)


class HasEpochs(Params):
    """Param ``epochs``."""

    epochs: Param[int] = Param(
        Params._dummy(), "epochs", "how often every row is visited (> 0)", TypeConverters.toInt
    )

    def getEpochs(self) -> int:
        """Return the number of epochs."""
        return self.getOrDefault(self.epochs)


class HasNumWorkers(Params):
    """Param ``numWorkers``."""

    numWorkers: Param[int] = Param(
        Params._dummy(),
        "numWorkers",
        "ranks that train together, one slot of the cluster each",
        TypeConverters.toInt,
    )

    def getNumWorkers(self) -> int:
        """Return the number of ranks."""
        return self.getOrDefault(self.numWorkers)


class HasGpusPerWorker(Params):
    """Param ``gpusPerWorker``."""

    gpusPerWorker: Param[int] = Param(
        Params._dummy(),
        "gpusPerWorker",
        "GPUs of each rank: 0 trains on CPU, 1 on a GPU",
        TypeConverters.toInt,
    )

    def getGpusPerWorker(self) -> int:
        """Return the GPUs of each rank."""
        return self.getOrDefault(self.gpusPerWorker)


class HasShuffle(Params):
    """Param ``shuffle``."""

    shuffle: Param[bool] = Param(
        Params._dummy(), "shuffle", "whether each epoch has its own order of rows", TypeConverters.toBoolean
    )

    def getShuffle(self) -> bool:
        """Return whether rows are shuffled."""
        return self.getOrDefault(self.shuffle)


class HasTransport(Params):
    """Param ``transport``."""

    transport: Param[str] = Param(
        Params._dummy(),
        "transport",
        "how ranks exchange gradients: auto, native, shm, tcp or mpi",
        _one_of("auto", "native", "shm", "tcp", "mpi"),
    )

    def getTransport(self) -> str:
        """Return the transport."""
        return self.getOrDefault(self.transport)


class HasStore(Params):
    """Param ``store``."""

    store: Param[str] = Param(
        Params._dummy(),
        "store",
        "Store, path or URL for the training rows; default: $SPARKDL_STORE, else a cache folder on this machine",
        _to_store_url,
    )

    def getStore(self) -> Store:
        """Return the Store."""
        return Store(self.getOrDefault(self.store)) if self.isSet(self.store) else Store.default()


class HasTracking(Params):
    """Params ``tracking``, ``experiment`` and ``runName``."""

    tracking: Param[str] = Param(
        Params._dummy(),
        "tracking",
        "MLflow: auto (on when it is installed), on or off",
        _one_of("auto", "on", "off"),
    )
    experiment: Param[str] = Param(
        Params._dummy(), "experiment", "MLflow experiment; default: the active one", TypeConverters.toString
    )
    runName: Param[str] = Param(
        Params._dummy(),
        "runName",
        "name of the MLflow run; default: MLflow makes one up",
        TypeConverters.toString,
    )

    def getTracking(self) -> str:
        """Return ``"auto"``, ``"on"`` or ``"off"``."""
        return self.getOrDefault(self.tracking)

    def getExperiment(self) -> str | None:
        """Return the MLflow experiment, if one was chosen."""
        return self.getOrDefault(self.experiment) if self.isSet(self.experiment) else None

    def getRunName(self) -> str | None:
        """Return the name of the MLflow run, if one was chosen."""
        return self.getOrDefault(self.runName) if self.isSet(self.runName) else None


class HasShowProgress(Params):
    """Param ``showProgress``."""

    showProgress: Param[bool] = Param(
        Params._dummy(), "showProgress", "whether fit shows its progress on stderr", TypeConverters.toBoolean
    )

    def getShowProgress(self) -> bool:
        """Return whether fit shows its progress."""
        return self.getOrDefault(self.showProgress)


class HasPredictionBatchSize(Params):
    """Param ``predictionBatchSize``."""

    predictionBatchSize: Param[int] = Param(
        Params._dummy(),
        "predictionBatchSize",
        "rows per forward pass of transform (> 0)",
        TypeConverters.toInt,
    )

    def getPredictionBatchSize(self) -> int:
        """Return the rows per forward pass of transform."""
        return self.getOrDefault(self.predictionBatchSize)


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
    HasTransport,
    HasStore,
    HasTracking,
    HasShowProgress,
    HasPredictionBatchSize,
):
    """Params that the estimator and its model share; each can be written as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS)


class _TorchEstimatorParams(_TorchParams, HasModel, HasOptimizer, HasLoss):
    """Params of the estimator: the shared ones and three that hold Python objects."""

    def check_values(self) -> None:
        """Check what needs no data.

        Raises:
            ParamError: naming the Param, its value and what it may be.
        """
        for param in (self.model, self.optimizer, self.loss):
            if not self.isDefined(param):
                raise ParamError(f"Param {param.name} is not set: {param.doc}.")
        for param in (self.batchSize, self.epochs, self.numWorkers, self.predictionBatchSize):
            value = self.getOrDefault(param)
            if value < 1:
                raise ParamError(f"Param {param.name} is {value}: {param.doc}, at least 1.")
        if self.getGpusPerWorker() not in (0, 1):
            raise ParamError(
                f"Param gpusPerWorker is {self.getGpusPerWorker()}: a rank trains on 0 or 1 GPUs."
            )
        if not isinstance(self.getModel(), nn.Module):
            raise ParamError(f"Param model is a {type(self.getModel()).__name__}, not a torch.nn.Module.")
        functions: tuple[Param[Any], ...] = (self.optimizer, self.loss)
        for function in functions:
            given = self.getOrDefault(function)
            if isinstance(given, type) or not callable(given):
                shown = given.__name__ if isinstance(given, type) else type(given).__name__
                raise ParamError(f"Param {function.name} is {shown}: {function.doc}.")
