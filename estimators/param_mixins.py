"""One small mixin per Param, each with its getter and setter; :mod:`.params` puts them together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from torch import nn

from sparkdl.collective import TRANSPORTS, WIRES
from sparkdl.data import Store
from sparkdl.data.store.store import KEEP_FOR
from sparkdl.errors import ParamError
from sparkdl.model.heads import LossFunction
from sparkdl.training.spec import OptimizerFactory

P = TypeVar("P", bound=Params)


def _to_store_url(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return TypeConverters.toString(os.fspath(value))
    return value.url if isinstance(value, Store) else TypeConverters.toString(value)


@dataclass(frozen=True)
class OneOf:
    """Converter of a Param that takes one of some strings, and raises TypeError for anything else."""

    choices: tuple[str, ...]

    def __call__(self, value: Any) -> str:
        """Return the value if it is one of them."""
        if value not in self.choices:
            raise TypeError(f"{value!r} is none of {', '.join(map(repr, self.choices))}")
        return str(value)


def one_of(*choices: str) -> OneOf:
    """Return a converter of a Param that takes one of some strings."""
    return OneOf(choices)


class HasModel(Params):
    """Param ``model``."""

    model: Param[Any] = Param(Params._dummy(), "model", "torch.nn.Module to train; fit trains a copy")

    def getModel(self) -> Any:
        """Return the module to train."""
        return self.getOrDefault(self.model)

    def setModel(self: P, value: nn.Module) -> P:
        """Set the module to train."""
        return self._set(model=value)


class HasOptimizer(Params):
    """Param ``optimizer``."""

    optimizer: Param[OptimizerFactory] = Param(
        Params._dummy(), "optimizer", "function that takes the model's parameters and returns an optimizer"
    )

    def getOptimizer(self) -> OptimizerFactory:
        """Return the function that makes the optimizer."""
        return self.getOrDefault(self.optimizer)

    def setOptimizer(self: P, value: OptimizerFactory) -> P:
        """Set the function that makes the optimizer."""
        return self._set(optimizer=value)


class HasLoss(Params):
    """Param ``loss``."""

    loss: Param[Any] = Param(
        Params._dummy(),
        "loss",
        "loss of torch.nn, or a function of (outputs, labels) that returns the mean; or a list of one per label column",
    )

    def getLoss(self) -> LossFunction | Sequence[LossFunction]:
        """Return the loss, or those of several label columns."""
        loss: LossFunction | Sequence[LossFunction] = self.getOrDefault(self.loss)
        return loss

    def setLoss(self: P, value: LossFunction | Sequence[LossFunction]) -> P:
        """Set the loss, or those of several label columns."""
        return self._set(loss=value)


class HasBatchSize(Params):
    """Param ``batchSize``."""

    batchSize: Param[int] = Param(
        Params._dummy(), "batchSize", "rows per rank and step (> 0)", TypeConverters.toInt
    )

    def getBatchSize(self) -> int:
        """Return the rows per rank and step."""
        return self.getOrDefault(self.batchSize)

    def setBatchSize(self: P, value: int) -> P:
        """Set the rows per rank and step."""
        return self._set(batchSize=value)


class HasEpochs(Params):
    """Param ``epochs``."""

    epochs: Param[int] = Param(
        Params._dummy(), "epochs", "how often every row is visited (> 0)", TypeConverters.toInt
    )

    def getEpochs(self) -> int:
        """Return the number of epochs."""
        return self.getOrDefault(self.epochs)

    def setEpochs(self: P, value: int) -> P:
        """Set the number of epochs."""
        return self._set(epochs=value)


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

    def setNumWorkers(self: P, value: int) -> P:
        """Set the number of ranks."""
        return self._set(numWorkers=value)


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

    def setGpusPerWorker(self: P, value: int) -> P:
        """Set the GPUs of each rank."""
        return self._set(gpusPerWorker=value)


class HasShuffle(Params):
    """Param ``shuffle``."""

    shuffle: Param[bool] = Param(
        Params._dummy(), "shuffle", "whether each epoch has its own order of rows", TypeConverters.toBoolean
    )

    def getShuffle(self) -> bool:
        """Return whether rows are shuffled."""
        return self.getOrDefault(self.shuffle)

    def setShuffle(self: P, value: bool) -> P:
        """Set whether rows are shuffled."""
        return self._set(shuffle=value)


class HasCache(Params):
    """Param ``cache``."""

    cache: Param[str] = Param(
        Params._dummy(),
        "cache",
        "whether ranks keep decoded rows after the first epoch: off, memory or disk",
        one_of("off", "memory", "disk"),
    )

    def getCache(self) -> str:
        """Return where ranks keep decoded rows."""
        return self.getOrDefault(self.cache)

    def setCache(self: P, value: str) -> P:
        """Set where ranks keep decoded rows."""
        return self._set(cache=value)


class HasTransport(Params):
    """Param ``transport``."""

    transport: Param[str] = Param(
        Params._dummy(),
        "transport",
        "how ranks exchange gradients: auto, native, shm, tcp, mpi, hierarchical or hierarchical-mpi",
        one_of(*TRANSPORTS),
    )

    def getTransport(self) -> str:
        """Return the transport."""
        return self.getOrDefault(self.transport)

    def setTransport(self: P, value: str) -> P:
        """Set the transport."""
        return self._set(transport=value)


class HasWire(Params):
    """Param ``wire``."""

    wire: Param[str] = Param(
        Params._dummy(),
        "wire",
        "how gradients of float32 travel between hosts: float32, or rounded to bfloat16 or float16, half the bytes; "
        "on GPUs with transport='hierarchical' alone",
        one_of(*WIRES),
    )

    def getWire(self) -> str:
        """Return how gradients travel between hosts."""
        return self.getOrDefault(self.wire)

    def setWire(self: P, value: str) -> P:
        """Set how gradients travel between hosts."""
        return self._set(wire=value)


class HasStore(Params):
    """Params ``store`` and ``keepRowsSeconds``."""

    store: Param[str] = Param(
        Params._dummy(),
        "store",
        "Store, path or URL for the training rows; default: $SPARKDL_STORE, else a cache folder on this machine",
        _to_store_url,
    )

    def getStore(self) -> Store:
        """Return the Store."""
        store = Store(self.getOrDefault(self.store)) if self.isSet(self.store) else Store.default()
        if not self.isSet(self.keepRowsSeconds):
            return store
        return Store(store.url, keep_for=timedelta(seconds=self.getKeepRowsSeconds()))

    def setStore(self: P, value: Store | str) -> P:
        """Set the Store, by object, path or URL."""
        return self._set(store=value)

    keepRowsSeconds: Param[float] = Param(
        Params._dummy(),
        "keepRowsSeconds",
        "how long the training rows stay in the Store after their last use; default a day, 0 removes them after a fit",
        TypeConverters.toFloat,
    )

    def getKeepRowsSeconds(self) -> float:
        """Return how long the training rows stay in the Store after their last use."""
        if self.isSet(self.keepRowsSeconds):
            return self.getOrDefault(self.keepRowsSeconds)
        return KEEP_FOR.total_seconds()

    def setKeepRowsSeconds(self: P, value: float) -> P:
        """Set how long the training rows stay in the Store after their last use."""
        return self._set(keepRowsSeconds=value)

    def _set(self: P, **params: Any) -> P:
        store = params.get("store")
        if isinstance(store, Store):  # the Param holds its URL alone
            params.setdefault("keepRowsSeconds", store.keep_for.total_seconds())
        return super()._set(**params)


class HasShowProgress(Params):
    """Param ``showProgress``."""

    showProgress: Param[bool] = Param(
        Params._dummy(), "showProgress", "whether fit shows its progress on stderr", TypeConverters.toBoolean
    )

    def getShowProgress(self) -> bool:
        """Return whether fit shows its progress."""
        return self.getOrDefault(self.showProgress)

    def setShowProgress(self: P, value: bool) -> P:
        """Set whether fit shows its progress."""
        return self._set(showProgress=value)


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

    def setPredictionBatchSize(self: P, value: int) -> P:
        """Set the rows per forward pass of transform."""
        return self._set(predictionBatchSize=value)


def prediction_batch_size_of(params: HasPredictionBatchSize) -> int:
    """Return how many rows a forward pass of ``transform`` takes.

    Raises:
        ParamError: if the number is not positive.
    """
    value = params.getPredictionBatchSize()
    if value < 1:
        raise ParamError(
            f"Param predictionBatchSize must be at least 1, got {value}: {params.predictionBatchSize.doc}."
        )
    return value
