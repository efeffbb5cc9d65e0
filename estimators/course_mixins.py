"""One small mixin for each group of Params about the course of a fit; :mod:`.params` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.errors import ParamError
from sparkdl.estimators.param_mixins import P, one_of
from sparkdl.training.callbacks import Callback, Patience
from sparkdl.training.spec import MODES, Goal


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

    def setEarlyStoppingPatience(self: P, value: int) -> P:
        """Set the epochs without an improvement after which the fit ends."""
        return self._set(earlyStoppingPatience=value)

    def setEarlyStoppingMinDelta(self: P, value: float) -> P:
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

    def setBestMetric(self: P, value: str) -> P:
        """Set the metric whose best epoch counts."""
        return self._set(bestMetric=value)

    def setBestMode(self: P, value: str) -> P:
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

    def setCallbacks(self: P, value: Sequence[Callback]) -> P:
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
