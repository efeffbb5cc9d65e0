"""Mixins of Params about surviving interruptions, and about tracking in MLflow.

:mod:`sparkdl.estimators.params.estimator` combines them with the others.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.estimators.params.base import ParamsT, one_of


def _to_url(value: Any) -> str:
    return str(value) if isinstance(value, PurePath) else TypeConverters.toString(value)


class HasCheckpoints(Params):
    """Params ``checkpointDir``, ``checkpointEverySteps`` and ``keepCheckpoints``."""

    checkpointDir: Param[str] = Param(
        Params._dummy(),
        "checkpointDir",
        "path or URL where a fit keeps checkpoints and continues from the last one; default: none are taken",
        _to_url,
    )
    checkpointEverySteps: Param[int] = Param(
        Params._dummy(),
        "checkpointEverySteps",
        "updates of the weights from one checkpoint to the next (> 0); default: one at the end of each epoch alone",
        TypeConverters.toInt,
    )
    keepCheckpoints: Param[int] = Param(
        Params._dummy(),
        "keepCheckpoints",
        "how many of the last checkpoints stay (> 0)",
        TypeConverters.toInt,
    )

    def getCheckpointDir(self) -> str | None:
        """Return where checkpoints are kept, if they are."""
        return self.getOrDefault(self.checkpointDir) if self.isSet(self.checkpointDir) else None

    def getCheckpointEverySteps(self) -> int | None:
        """Return the updates from one checkpoint to the next; None for one at the end of each epoch alone."""
        return self.getOrDefault(self.checkpointEverySteps) if self.isSet(self.checkpointEverySteps) else None

    def getKeepCheckpoints(self) -> int:
        """Return how many of the last checkpoints stay."""
        return self.getOrDefault(self.keepCheckpoints)

    def setCheckpointDir(self: ParamsT, value: str) -> ParamsT:
        """Set where checkpoints are kept."""
        return self._set(checkpointDir=value)

    def setCheckpointEverySteps(self: ParamsT, value: int) -> ParamsT:
        """Set the updates from one checkpoint to the next."""
        return self._set(checkpointEverySteps=value)

    def setKeepCheckpoints(self: ParamsT, value: int) -> ParamsT:
        """Set how many of the last checkpoints stay."""
        return self._set(keepCheckpoints=value)


class HasRestarts(Params):
    """Params ``maxRestarts``, ``minWorkers`` and ``hangTimeoutSeconds``."""

    maxRestarts: Param[int] = Param(
        Params._dummy(),
        "maxRestarts",
        "how often a fit continues by itself from its last checkpoint when ranks were lost (>= 0)",
        TypeConverters.toInt,
    )
    minWorkers: Param[int] = Param(
        Params._dummy(),
        "minWorkers",
        "ranks with which a restarted fit makes do where slots are gone, from 1 to numWorkers; default: numWorkers",
        TypeConverters.toInt,
    )

    hangTimeoutSeconds: Param[float] = Param(
        Params._dummy(),
        "hangTimeoutSeconds",
        "seconds for which a rank may keep others waiting, or take for a step, until it counts as lost (>= 2)",
        TypeConverters.toFloat,
    )

    def getMaxRestarts(self) -> int:
        """Return how often a fit continues by itself."""
        return self.getOrDefault(self.maxRestarts)

    def getMinWorkers(self) -> int:
        """Return the ranks with which a restarted fit makes do."""
        if self.isSet(self.minWorkers):
            return self.getOrDefault(self.minWorkers)
        return int(self.getOrDefault("numWorkers"))

    def getHangTimeoutSeconds(self) -> float | None:
        """Return the seconds after which a rank hangs; None as long as none are set."""
        if self.isSet(self.hangTimeoutSeconds):
            return self.getOrDefault(self.hangTimeoutSeconds)
        return None

    def setMaxRestarts(self: ParamsT, value: int) -> ParamsT:
        """Set how often a fit continues by itself."""
        return self._set(maxRestarts=value)

    def setMinWorkers(self: ParamsT, value: int) -> ParamsT:
        """Set the ranks with which a restarted fit makes do."""
        return self._set(minWorkers=value)

    def setHangTimeoutSeconds(self: ParamsT, value: float) -> ParamsT:
        """Set the seconds after which a rank hangs."""
        return self._set(hangTimeoutSeconds=value)


class HasTracking(Params):
    """Params ``tracking``, ``experiment``, ``runName`` and ``trackingTimeoutSeconds``."""

    tracking: Param[str] = Param(
        Params._dummy(),
        "tracking",
        "MLflow: auto (on when it is installed), on or off",
        one_of("auto", "on", "off"),
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
    trackingTimeoutSeconds: Param[float] = Param(
        Params._dummy(),
        "trackingTimeoutSeconds",
        "how long a fit waits at its end for MLflow to take what it has to say, and a second more for each MiB of the "
        "model (>= 0); what is not taken is kept in the Store",
        TypeConverters.toFloat,
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

    def getTrackingTimeoutSeconds(self) -> float:
        """Return how long a fit waits for MLflow at its end."""
        return self.getOrDefault(self.trackingTimeoutSeconds)

    def setTracking(self: ParamsT, value: str) -> ParamsT:
        """Set the mode of tracking."""
        return self._set(tracking=value)

    def setExperiment(self: ParamsT, value: str) -> ParamsT:
        """Set the MLflow experiment."""
        return self._set(experiment=value)

    def setRunName(self: ParamsT, value: str) -> ParamsT:
        """Set the name of the MLflow run."""
        return self._set(runName=value)

    def setTrackingTimeoutSeconds(self: ParamsT, value: float) -> ParamsT:
        """Set how long a fit waits for MLflow at its end."""
        return self._set(trackingTimeoutSeconds=value)


class HasRegistration(Params):
    """Params ``registeredModelName`` and ``registeredModelAlias``."""

    registeredModelName: Param[str] = Param(
        Params._dummy(),
        "registeredModelName",
        "name under which MLflow registers a new version of the model; default: it is not registered",
        TypeConverters.toString,
    )
    registeredModelAlias: Param[str] = Param(
        Params._dummy(),
        "registeredModelAlias",
        "alias that the new version of the model gets; needs a registeredModelName",
        TypeConverters.toString,
    )

    def getRegisteredModelName(self) -> str | None:
        """Return the name that the model is registered under, if one was chosen."""
        return self.getOrDefault(self.registeredModelName) if self.isSet(self.registeredModelName) else None

    def getRegisteredModelAlias(self) -> str | None:
        """Return the alias of the new version, if one was chosen."""
        return self.getOrDefault(self.registeredModelAlias) if self.isSet(self.registeredModelAlias) else None

    def setRegisteredModelName(self: ParamsT, value: str) -> ParamsT:
        """Set the name that the model is registered under."""
        return self._set(registeredModelName=value)

    def setRegisteredModelAlias(self: ParamsT, value: str) -> ParamsT:
        """Set the alias of the new version."""
        return self._set(registeredModelAlias=value)


class HasLogCheckpoints(Params):
    """Param ``logCheckpoints``."""

    logCheckpoints: Param[bool] = Param(
        Params._dummy(),
        "logCheckpoints",
        "whether the checkpoints that a fit leaves are copied into its MLflow run; needs a checkpointDir",
        TypeConverters.toBoolean,
    )

    def getLogCheckpoints(self) -> bool:
        """Return whether checkpoints are copied into the run."""
        return self.getOrDefault(self.logCheckpoints)

    def setLogCheckpoints(self: ParamsT, value: bool) -> ParamsT:
        """Set whether checkpoints are copied into the run."""
        return self._set(logCheckpoints=value)
