"""Params of the ready-made estimators, and the arguments that their constructors share.

The Params are those beside the Params of all estimators, with one small mixin for each group.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ForwardRef, TypedDict, TypeVar, cast

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasLabelCol

from sparkdl.errors import ParamError
from sparkdl.estimators.params.base import ParamsT
from sparkdl.estimators.params.estimator import _SharedParams, default_values
from sparkdl.estimators.params.inputs import HasLabels, HasScoredColumns, labels_by_column
from sparkdl.estimators.params.training import HasCallbacks, HasMetrics, HasScheduler
from sparkdl.estimators.ready_made.classes import count_classes
from sparkdl.estimators.torch_estimator import TorchEstimator

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset, Store
    from sparkdl.training.callbacks import Callback
    from sparkdl.training.learning_rate import SchedulerFactory
    from sparkdl.training.metrics import Metric


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

    def setLearningRate(self: ParamsT, value: float) -> ParamsT:
        """Set the learning rate."""
        return self._set(learningRate=value)

    def setWeightDecay(self: ParamsT, value: float) -> ParamsT:
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

    def setDropout(self: ParamsT, value: float) -> ParamsT:
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

    def setHiddenSizes(self: ParamsT, value: Sequence[int]) -> ParamsT:
        """Set the widths of the hidden layers."""
        return self._set(hiddenSizes=value)

    def setCategoricalCols(self: ParamsT, value: Sequence[str]) -> ParamsT:
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


T = TypeVar("T", bound=type)


class SharedArguments(TypedDict, total=False):
    """Params that mean what they mean in a :class:`TorchEstimator`; None leaves one as it is."""

    predictionCol: str | None
    weightCol: str | None
    validationIndicatorCol: str | None
    validationFraction: float | None
    metrics: Mapping[str, Metric] | None
    earlyStoppingPatience: int | None
    earlyStoppingMinDelta: float | None
    bestMetric: str | None
    bestMode: str | None
    callbacks: Sequence[Callback] | None
    scheduler: SchedulerFactory | None
    schedulerInterval: str | None
    learningRateScaling: str | None
    warmupSteps: int | None
    gradientAccumulationSteps: int | None
    maxGradNorm: float | None
    precision: str | None
    syncBatchNorm: bool | None
    compileModel: bool | None
    deterministic: bool | None
    numWorkers: int | None
    gpusPerWorker: int | None
    shuffle: bool | None
    cache: str | None
    store: Store | str | None
    keepRowsSeconds: float | None
    checkpointDir: str | None
    checkpointEverySteps: int | None
    keepCheckpoints: int | None
    maxRestarts: int | None
    minWorkers: int | None
    hangTimeoutSeconds: float | None
    transport: str | None
    wire: str | None
    tracking: str | None
    experiment: str | None
    runName: str | None
    trackingTimeoutSeconds: float | None
    registeredModelName: str | None
    registeredModelAlias: str | None
    logCheckpoints: bool | None
    showProgress: bool | None
    predictionBatchSize: int | None


def with_shared_arguments(made: T, **differing: str) -> T:
    """Have ``help()`` of a class with a constructor of ``(..., **shared)`` name each of them, as TorchEstimator does.

    Its docstring has to end with the arguments of its own.

    Args:
        made: the class.
        differing: by name what is said of arguments whose defaults are others than those of TorchEstimator.
    """
    entries = {**_documented(TorchEstimator), **differing}
    documentation = inspect.getdoc(made) or ""
    shared = [f"    {name}: {entries[name]}" for name in SharedArguments.__annotations__]
    made.__doc__ = "\n".join([documentation.rstrip(), *shared, ""])
    constructor: Any = made.__init__  # type: ignore[misc]  # of a class, not of an instance
    signature = inspect.signature(constructor)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation.__forward_arg__
        )
        for name, annotation in cast("dict[str, ForwardRef]", SharedArguments.__annotations__).items()
    ]
    constructor.__signature__ = signature.replace(parameters=[*own, *added])
    return made


def _documented(made: type) -> dict[str, str]:
    text = inspect.getdoc(made) or ""
    arguments = text[text.index("Args:") :]
    found: list[tuple[str, str]] = re.findall(
        r"^    (\w+): (.*(?:\n     .*)*)", arguments, flags=re.MULTILINE
    )
    return dict(found)
