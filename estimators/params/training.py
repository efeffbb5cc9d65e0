"""Mixins of Params about weight updates, the course of a fit, and validation.

There is one small mixin for each group of Params; :mod:`sparkdl.estimators.params.estimator` combines them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasValidationIndicatorCol

from sparkdl.errors import ParamError
from sparkdl.estimators.params.base import ParamsT, one_of
from sparkdl.training.callbacks import Callback, Patience
from sparkdl.training.learning_rate import INTERVALS, SCALINGS, SchedulerFactory
from sparkdl.training.metrics import Metric
from sparkdl.training.spec import MODES, Goal
from sparkdl.training.update import PRECISIONS


class HasScheduler(Params):
    """Param ``scheduler``."""

    scheduler: Param[SchedulerFactory] = Param(
        Params._dummy(),
        "scheduler",
        "function that takes the optimizer and how often the scheduler is stepped, and returns a torch scheduler",
    )

    def getScheduler(self) -> SchedulerFactory | None:
        """Return the function that makes the scheduler, if there is one."""
        return self.getOrDefault(self.scheduler) if self.isSet(self.scheduler) else None

    def setScheduler(self: ParamsT, value: SchedulerFactory) -> ParamsT:
        """Set the function that makes the scheduler."""
        return self._set(scheduler=value)


class HasSchedulerInterval(Params):
    """Param ``schedulerInterval``."""

    schedulerInterval: Param[str] = Param(
        Params._dummy(),
        "schedulerInterval",
        "when the scheduler is stepped: epoch or step, a step being an update of the weights",
        one_of(*INTERVALS),
    )

    def getSchedulerInterval(self) -> str:
        """Return ``"epoch"`` or ``"step"``."""
        return self.getOrDefault(self.schedulerInterval)

    def setSchedulerInterval(self: ParamsT, value: str) -> ParamsT:
        """Set when the scheduler is stepped."""
        return self._set(schedulerInterval=value)


class HasLearningRateScaling(Params):
    """Params ``learningRateScaling`` and ``warmupSteps``."""

    learningRateScaling: Param[str] = Param(
        Params._dummy(),
        "learningRateScaling",
        "what the optimizer's learning rate is multiplied with: none (1), linear (numWorkers) or sqrt (its root)",
        one_of(*SCALINGS),
    )
    warmupSteps: Param[int] = Param(
        Params._dummy(),
        "warmupSteps",
        "updates over which the learning rate grows to its full value (>= 0)",
        TypeConverters.toInt,
    )

    def getLearningRateScaling(self) -> str:
        """Return ``"none"``, ``"linear"`` or ``"sqrt"``."""
        return self.getOrDefault(self.learningRateScaling)

    def getWarmupSteps(self) -> int:
        """Return the updates over which the learning rate grows."""
        return self.getOrDefault(self.warmupSteps)

    def setLearningRateScaling(self: ParamsT, value: str) -> ParamsT:
        """Set what the learning rate is multiplied with."""
        return self._set(learningRateScaling=value)

    def setWarmupSteps(self: ParamsT, value: int) -> ParamsT:
        """Set the updates over which the learning rate grows."""
        return self._set(warmupSteps=value)


class HasGradientAccumulation(Params):
    """Param ``gradientAccumulationSteps``."""

    gradientAccumulationSteps: Param[int] = Param(
        Params._dummy(),
        "gradientAccumulationSteps",
        "batches of each rank whose gradients lead to one update (> 0)",
        TypeConverters.toInt,
    )

    def getGradientAccumulationSteps(self) -> int:
        """Return the batches that lead to one update."""
        return self.getOrDefault(self.gradientAccumulationSteps)

    def setGradientAccumulationSteps(self: ParamsT, value: int) -> ParamsT:
        """Set the batches that lead to one update."""
        return self._set(gradientAccumulationSteps=value)


class HasMaxGradNorm(Params):
    """Param ``maxGradNorm``."""

    maxGradNorm: Param[float] = Param(
        Params._dummy(),
        "maxGradNorm",
        "to which the norm of all gradients together is clipped (> 0); default: no clipping",
        TypeConverters.toFloat,
    )

    def getMaxGradNorm(self) -> float | None:
        """Return to which the norm of all gradients is clipped, if it is."""
        return self.getOrDefault(self.maxGradNorm) if self.isSet(self.maxGradNorm) else None

    def setMaxGradNorm(self: ParamsT, value: float) -> ParamsT:
        """Set to which the norm of all gradients is clipped."""
        return self._set(maxGradNorm=value)


class HasPrecision(Params):
    """Param ``precision``."""

    precision: Param[str] = Param(
        Params._dummy(),
        "precision",
        "in which the model computes where it bears it, by autocast: float32, bfloat16 or float16",
        one_of(*PRECISIONS),
    )

    def getPrecision(self) -> str:
        """Return the precision in which the model computes."""
        return self.getOrDefault(self.precision)

    def setPrecision(self: ParamsT, value: str) -> ParamsT:
        """Set the precision in which the model computes."""
        return self._set(precision=value)


class HasSyncBatchNorm(Params):
    """Param ``syncBatchNorm``."""

    syncBatchNorm: Param[bool] = Param(
        Params._dummy(),
        "syncBatchNorm",
        "whether BatchNorms normalize by the rows of all ranks, rather than by those of their own",
        TypeConverters.toBoolean,
    )

    def getSyncBatchNorm(self) -> bool:
        """Return whether BatchNorms normalize by the rows of all ranks."""
        return self.getOrDefault(self.syncBatchNorm)

    def setSyncBatchNorm(self: ParamsT, value: bool) -> ParamsT:
        """Set whether BatchNorms normalize by the rows of all ranks."""
        return self._set(syncBatchNorm=value)


class HasCompileModel(Params):
    """Param ``compileModel``."""

    compileModel: Param[bool] = Param(
        Params._dummy(),
        "compileModel",
        "whether each rank compiles the model by torch.compile",
        TypeConverters.toBoolean,
    )

    def getCompileModel(self) -> bool:
        """Return whether each rank compiles the model."""
        return self.getOrDefault(self.compileModel)

    def setCompileModel(self: ParamsT, value: bool) -> ParamsT:
        """Set whether each rank compiles the model."""
        return self._set(compileModel=value)


class HasDeterministic(Params):
    """Param ``deterministic``."""

    deterministic: Param[bool] = Param(
        Params._dummy(),
        "deterministic",
        "whether operations that do not repeat to the bit are refused, also on a GPU",
        TypeConverters.toBoolean,
    )

    def getDeterministic(self) -> bool:
        """Return whether operations that do not repeat to the bit are refused."""
        return self.getOrDefault(self.deterministic)

    def setDeterministic(self: ParamsT, value: bool) -> ParamsT:
        """Set whether operations that do not repeat to the bit are refused."""
        return self._set(deterministic=value)


class HasEarlyStopping(Params):
    """Params ``earlyStoppingPatience`` and ``earlyStoppingMinDelta``."""

    earlyStoppingPatience: Param[int] = Param(
        Params._dummy(),
        "earlyStoppingPatience",
        "epochs in a row without an improvement after which the fit ends (> 0); default: it never ends early",
        TypeConverters.toInt,
    )
    earlyStoppingMinDelta: Param[float] = Param(
        Params._dummy(),
        "earlyStoppingMinDelta",
        "by more than which an epoch has to be better to count as an improvement (>= 0)",
        TypeConverters.toFloat,
    )

    def getEarlyStoppingPatience(self) -> int | None:
        """Return the epochs without an improvement after which the fit ends, if it may end early."""
        param = self.earlyStoppingPatience
        return self.getOrDefault(param) if self.isSet(param) else None

    def getEarlyStoppingMinDelta(self) -> float:
        """Return by more than which an epoch has to be better."""
        return self.getOrDefault(self.earlyStoppingMinDelta)

    def setEarlyStoppingPatience(self: ParamsT, value: int) -> ParamsT:
        """Set the epochs without an improvement after which the fit ends."""
        return self._set(earlyStoppingPatience=value)

    def setEarlyStoppingMinDelta(self: ParamsT, value: float) -> ParamsT:
        """Set by more than which an epoch has to be better."""
        return self._set(earlyStoppingMinDelta=value)


def patience_of(params: HasEarlyStopping) -> Patience | None:
    """Return when to end early, as ranks take it.

    Raises:
        ParamError: naming the Param that is out of range.
    """
    epochs, min_delta = params.getEarlyStoppingPatience(), params.getEarlyStoppingMinDelta()
    if not min_delta >= 0:
        raise ParamError(f"Param earlyStoppingMinDelta is {min_delta}: {params.earlyStoppingMinDelta.doc}.")
    if epochs is None:
        return None
    if epochs < 1:
        raise ParamError(f"Param earlyStoppingPatience is {epochs}: {params.earlyStoppingPatience.doc}.")
    return Patience(epochs=epochs, min_delta=min_delta)


class HasBestMetric(Params):
    """Params ``bestMetric`` and ``bestMode``."""

    bestMetric: Param[str] = Param(
        Params._dummy(),
        "bestMetric",
        "loss, val_loss or a metric: the model is that of the epoch in which it was best; default: of the last epoch",
        TypeConverters.toString,
    )
    bestMode: Param[str] = Param(
        Params._dummy(),
        "bestMode",
        "whether bestMetric is best where it is min or max; min for a loss",
        one_of(*MODES),
    )

    def getBestMetric(self) -> str | None:
        """Return the metric whose best epoch counts, if one is set."""
        return self.getOrDefault(self.bestMetric) if self.isSet(self.bestMetric) else None

    def getBestMode(self) -> str | None:
        """Return ``"min"`` or ``"max"``, if it is set."""
        return self.getOrDefault(self.bestMode) if self.isSet(self.bestMode) else None

    def setBestMetric(self: ParamsT, value: str) -> ParamsT:
        """Set the metric whose best epoch counts."""
        return self._set(bestMetric=value)

    def setBestMode(self: ParamsT, value: str) -> ParamsT:
        """Set whether the metric is best where it is min or max."""
        return self._set(bestMode=value)


def best_goal_of(params: HasBestMetric, available: Sequence[str]) -> Goal | None:
    """Return what makes an epoch the best, as ranks take it; None where the last one counts.

    Args:
        params: of the estimator.
        available: names of losses and metrics that a fit with the other Params has.

    Raises:
        ParamError: if there is no such metric, or it is not clear what is better.
    """
    metric, mode = params.getBestMetric(), params.getBestMode()
    if metric is None:
        if mode is not None:
            raise ParamError(f"Param bestMode is {mode!r}, but bestMetric is not set. Set it, or clear both.")
        return None
    if metric not in available:
        raise ParamError(
            f"Param bestMetric is {metric!r}, but this fit has {', '.join(available)}. Choose one of them, or set "
            "metrics, validationFraction or validationIndicatorCol so that there is such a metric."
        )
    if mode is None and metric not in ("loss", "val_loss"):
        raise ParamError(
            f"Param bestMetric is {metric!r}, and bestMode is not set: whether {metric!r} is better where it is "
            "'min' or 'max' has to be said."
        )
    return Goal(metric=metric, mode=mode or "min")


class HasCallbacks(Params):
    """Param ``callbacks``."""

    callbacks: Param[Any] = Param(
        Params._dummy(), "callbacks", "list of sparkdl.estimators.Callback, of which each rank runs copies"
    )

    def getCallbacks(self) -> tuple[Callback, ...]:
        """Return the callbacks, none where they are not set."""
        return tuple(self.getOrDefault(self.callbacks)) if self.isSet(self.callbacks) else ()

    def setCallbacks(self: ParamsT, value: Sequence[Callback]) -> ParamsT:
        """Set the callbacks."""
        return self._set(callbacks=value)

    def check_callbacks(self) -> None:
        """Check what the Param holds.

        Raises:
            ParamError: naming what is no callback.
        """
        given: Any = self.getOrDefault(self.callbacks) if self.isSet(self.callbacks) else ()
        if not isinstance(given, list | tuple):
            raise ParamError(
                f"Param callbacks must be a list of sparkdl.estimators.Callback; got a {type(given).__name__}."
            )
        for callback in given:
            if not isinstance(callback, Callback):
                shown = (
                    f"the class {callback.__name__}, not one of its instances"
                    if isinstance(callback, type)
                    else f"a {type(callback).__name__}"
                )
                raise ParamError(f"Param callbacks holds {shown}: {self.callbacks.doc}.")


_NAME = re.compile(r"[A-Za-z][\w.\- ]*")
EPOCH_METRICS = ("loss", "rows_per_s", "seconds", "data_wait_share", "learning_rate", "validation_s")
"""What MLflow is told of an epoch beside the metrics, by names that these cannot have."""


class HasValidation(HasValidationIndicatorCol):
    """Params ``validationIndicatorCol`` and ``validationFraction``."""

    validationFraction: Param[float] = Param(
        Params._dummy(),
        "validationFraction",
        "share of the rows, drawn by lot, to validate on (between 0 and 1)",
        TypeConverters.toFloat,
    )

    def getValidationFraction(self) -> float | None:
        """Return the share of the rows to validate on, if it is set."""
        return self.getOrDefault(self.validationFraction) if self.isSet(self.validationFraction) else None

    def setValidationFraction(self: ParamsT, value: float) -> ParamsT:
        """Set the share of the rows to validate on."""
        return self._set(validationFraction=value)

    def setValidationIndicatorCol(self: ParamsT, value: str) -> ParamsT:
        """Set the column of booleans that are true for rows to validate on."""
        return self._set(validationIndicatorCol=value)


def check_validation(params: HasValidation) -> None:
    """Check what needs no data.

    Raises:
        ParamError: naming the Param, its value and what it may be.
    """
    fraction = params.getValidationFraction()
    if fraction is not None and not 0 < fraction < 1:
        raise ParamError(f"Param validationFraction is {fraction}: {params.validationFraction.doc}.")
    if fraction is not None and params.isSet(params.validationIndicatorCol):
        raise ParamError(
            f"Params validationFraction ({fraction}) and validationIndicatorCol "
            f"({params.getValidationIndicatorCol()!r}) both say which rows to validate on. Set one of them."
        )


class HasMetrics(Params):
    """Param ``metrics``."""

    metrics: Param[Any] = Param(
        Params._dummy(),
        "metrics",
        "by name functions of (outputs, labels) that return one value per row or their mean; or torchmetrics",
    )

    def getMetrics(self) -> dict[str, Metric]:
        """Return the metrics by name, if there are any."""
        return dict(self.getOrDefault(self.metrics)) if self.isSet(self.metrics) else {}

    def setMetrics(self: ParamsT, value: Mapping[str, Metric]) -> ParamsT:
        """Set the metrics by name."""
        return self._set(metrics=value)

    def check_metrics(self) -> None:
        """Check what needs no data.

        Raises:
            ParamError: naming the metric and what is wrong with it.
        """
        given: Any = self.getOrDefault(self.metrics) if self.isSet(self.metrics) else {}
        if not isinstance(given, Mapping):
            raise ParamError(
                "Param metrics must be a dict, such as {'mae': torch.nn.L1Loss()}, of functions of (outputs, labels) "
                "that return one value per row or their mean, or of torchmetrics metrics; got a "
                f"{type(given).__name__}."
            )
        for name, metric in given.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ParamError(
                    f"Param metrics has the name {name!r}. Choose one of letters, digits, '_', '-', '.' and spaces "
                    "that begins with a letter."
                )
            if name in EPOCH_METRICS or name.startswith("val_"):
                raise ParamError(
                    f"Param metrics has the name {name!r}, which stands for something else. Choose another; on the "
                    "validation rows 'val_' comes before it."
                )
            if not callable(metric):
                raise ParamError(
                    f"Metric {name!r} must be a function of (outputs, labels) that returns one value per row or their "
                    f"mean, or a torchmetrics metric; got a {type(metric).__name__}."
                )
