"""The base of all classes with Params, one small mixin per Param, and checks of Params that hold functions.

Errors about wrong names, types and Param maps name the Param. Each mixin has its getter and setter;
:mod:`sparkdl.estimators.params.estimator` combines them. For a class or an instance where a function is expected, the
error says what to pass instead.
"""

from __future__ import annotations

import difflib
import inspect
import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pyspark.ml.param import Param, Params, TypeConverters
from torch import nn
from torch.optim import Optimizer

from sparkdl.collective import TRANSPORTS, WIRES
from sparkdl.data import Store
from sparkdl.data.store.store import KEEP_FOR
from sparkdl.errors import ParamError, ParamTypeError
from sparkdl.model.heads import LossFunction
from sparkdl.training.spec import OptimizerFactory

if TYPE_CHECKING:
    from collections.abc import Mapping


P = TypeVar("P", bound="CheckedParams")

_TAKES: dict[Any, str] = {
    TypeConverters.toInt: "a whole number",
    TypeConverters.toFloat: "a number",
    TypeConverters.toString: "a string",
    TypeConverters.toBoolean: "True or False",
    TypeConverters.toListString: "a list of strings",
}


_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "weightCol": ("classweight", "sampleweight", "rowweight", "weight", "weightcolumn"),
    "learningRate": ("lr", "stepsize", "rate"),
    "optimizer": ("optim", "lr", "learningrate", "stepsize"),
    "loss": ("criterion", "lossfn", "lossfunction", "objective"),
    "epochs": ("maxiter", "numepoch", "nepoch", "maxepoch"),
    "batchSize": ("batch", "minibatch", "blocksize"),
    "numWorkers": ("np", "nproc", "worker", "numrank", "rank", "numproc", "numprocesse", "worldsize"),
    "gpusPerWorker": ("gpu", "usegpu", "device", "numgpu"),
    "featuresCol": ("x", "inputcol", "feature", "featurecol"),
    "labelCol": ("y", "targetcol", "target", "label"),
    "validationFraction": ("validationsplit", "valfraction", "validation", "valsplit"),
    "earlyStoppingPatience": ("earlystopping", "patience"),
    "showProgress": ("verbose", "progress", "progressbar"),
    "checkpointDir": ("checkpoint", "checkpointpath", "checkpointfolder"),
    "maxGradNorm": ("clipnorm", "gradientclipval", "gradclip"),
}
"""What other libraries call a Param, in lower case and without underscores and a final s."""


class CheckedParams(Params):
    """Base of everything here that has Params: errors say which Param, which value, and what it takes.

    None stands for a Param that is not set: who sets it takes back what was set before.
    """

    def __new__(cls: type[P], *args: Any, **kwargs: Any) -> P:  # noqa: ARG004 - as it is called with
        """Make an instance, with an error for arguments that the constructor does not take."""
        accepted = inspect.signature(cls.__init__).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values()):
            for name in kwargs:
                if name not in accepted and not isinstance(getattr(cls, name, None), Param):
                    raise ParamTypeError(_unknown(cls, name, [each for each in accepted if each != "self"]))
        return super().__new__(cls)

    _input_kwargs: dict[str, Any]
    """What the constructor was given; pyspark's ``keyword_only`` puts it there."""

    def _set_arguments(self) -> None:
        """Set what the constructor was given, and let go of it: a model that is replaced later is not kept."""
        self.setParams(**self.__dict__.pop("_input_kwargs"))

    def setParams(self: P, **params: Any) -> P:
        """Set Params by name, as the constructor does; None leaves a Param as it is.

        Raises:
            ParamError: if there is no Param of a name, or its value is of a type that it does not take.
        """
        return self._set(**{name: value for name, value in params.items() if value is not None})

    def set(self, param: Param[Any], value: Any) -> None:
        """Set a Param of this instance; see :meth:`setParams`."""
        self._shouldOwn(param)
        self._set(**{param.name: value})

    def _set(self: P, **params: Any) -> P:
        for name, given in params.items():
            if not self.hasParam(name):
                raise self._unknown(name)
            param = self.getParam(name)
            if given is None:
                self.clear(param)
                continue
            value = given.item() if isinstance(given, np.generic) else given
            try:
                super()._set(**{name: value})
            except (TypeError, ValueError) as error:
                raise _wrong_type(param, given, error) from error
        return self

    def _unknown(self, name: str) -> ParamError:
        return ParamError(_unknown(type(self), name, [param.name for param in self.params]))


def _unknown(cls: type, name: str, names: Sequence[str]) -> str:
    plain = name.lower().replace("_", "").removesuffix("s")
    near = [known for known in names if plain in _OTHER_NAMES.get(known, ())]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"The Params are: {', '.join(names)}."
    return f"{cls.__name__} has no Param {name!r}. {hint}"


def check_param_map(instance: Params, param_map: Mapping[Any, Any]) -> None:
    """Check that a Param map speaks of Params of an instance, as an entry for another one would have no effect.

    Raises:
        ParamTypeError: if a key is no Param.
        ParamError: if one belongs to something else.
    """
    for param in param_map:
        if not isinstance(param, Param):
            raise ParamTypeError(
                f"The keys of a Param map are Params, such as estimator.{instance.params[0].name}; got {param!r}."
            )
        if not instance._testOwnParam(param.parent, param.name):
            raise ParamError(
                f"The Param map sets {param.name} of {param.parent}, and this is {instance.uid}: that would have no "
                f"effect. Take the Param from this estimator (or a pipeline that holds {param.parent})."
            )


def _wrong_type(param: Param[Any], value: Any, error: Exception) -> ParamTypeError:
    takes = _TAKES.get(param.typeConverter)
    if takes is not None:
        return ParamTypeError(f"Param {param.name} takes {takes}, got {reprlib.repr(value)}: {param.doc}.")
    # Spark puts words of its own before those of the converter.
    cause = error.__context__ or error
    return ParamTypeError(f"Param {param.name} cannot be {reprlib.repr(value)}: {cause}.")


ParamsT = TypeVar("ParamsT", bound=Params)


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

    def setModel(self: ParamsT, value: nn.Module) -> ParamsT:
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

    def setOptimizer(self: ParamsT, value: OptimizerFactory) -> ParamsT:
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

    def setLoss(self: ParamsT, value: LossFunction | Sequence[LossFunction]) -> ParamsT:
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

    def setBatchSize(self: ParamsT, value: int) -> ParamsT:
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

    def setEpochs(self: ParamsT, value: int) -> ParamsT:
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

    def setNumWorkers(self: ParamsT, value: int) -> ParamsT:
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

    def setGpusPerWorker(self: ParamsT, value: int) -> ParamsT:
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

    def setShuffle(self: ParamsT, value: bool) -> ParamsT:
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

    def setCache(self: ParamsT, value: str) -> ParamsT:
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

    def setTransport(self: ParamsT, value: str) -> ParamsT:
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

    def setWire(self: ParamsT, value: str) -> ParamsT:
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

    def setStore(self: ParamsT, value: Store | str) -> ParamsT:
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

    def setKeepRowsSeconds(self: ParamsT, value: float) -> ParamsT:
        """Set how long the training rows stay in the Store after their last use."""
        return self._set(keepRowsSeconds=value)

    def _set(self: ParamsT, **params: Any) -> ParamsT:
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

    def setShowProgress(self: ParamsT, value: bool) -> ParamsT:
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

    def setPredictionBatchSize(self: ParamsT, value: int) -> ParamsT:
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


def check_callable(param: Param[Any], given: object) -> None:
    """Check that a Param holds something that can be called, and no class.

    Raises:
        ParamError: naming the Param, what it is, and what it has to be.
    """
    if isinstance(given, type):
        name = _name(given)
        if issubclass(given, nn.Module):
            raise ParamError(f"Param {param.name} is the class {given.__name__}; give an instance: {name}().")
        raise ParamError(f"Param {param.name} is the class {given.__name__}: {param.doc}.")
    if not callable(given):
        raise ParamError(f"Param {param.name} is {type(given).__name__}: {param.doc}.")


def check_optimizer(param: Param[Any], given: object) -> None:
    """Check a function of parameters that makes an optimizer; a class of optimizers is one.

    Raises:
        ParamError: naming what it is instead, and a function for an optimizer that was made already.
    """
    if isinstance(given, type) and issubclass(given, Optimizer):
        return  # called with the parameters it makes one with its own defaults, or is refused when it is tried
    if isinstance(given, Optimizer):
        rate = given.defaults.get("lr")
        options = f", lr={float(rate):g}" if rate is not None else ""
        raise ParamError(
            f"Param {param.name} is an instance of {type(given).__name__}, and each rank makes its own, for its copy "
            f"of the model. Give a function: lambda parameters: {_name(type(given))}(parameters{options})."
        )
    check_callable(param, given)


def _name(kind: type) -> str:
    """How a user most likely writes a class."""
    if kind.__module__.startswith("torch.nn."):
        return f"nn.{kind.__name__}"
    if kind.__module__.startswith("torch.optim."):
        return f"torch.optim.{kind.__name__}"
    return kind.__name__
