"""Params that say how a fit is tracked in MLflow; :mod:`.params` puts them together."""

from __future__ import annotations

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.estimators.param_mixins import P, one_of


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

    def setTracking(self: P, value: str) -> P:
        """Set the mode of tracking."""
        return self._set(tracking=value)

    def setExperiment(self: P, value: str) -> P:
        """Set the MLflow experiment."""
        return self._set(experiment=value)

    def setRunName(self: P, value: str) -> P:
        """Set the name of the MLflow run."""
        return self._set(runName=value)

    def setTrackingTimeoutSeconds(self: P, value: float) -> P:
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

    def setRegisteredModelName(self: P, value: str) -> P:
        """Set the name that the model is registered under."""
        return self._set(registeredModelName=value)

    def setRegisteredModelAlias(self: P, value: str) -> P:
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

    def setLogCheckpoints(self: P, value: bool) -> P:
        """Set whether checkpoints are copied into the run."""
        return self._set(logCheckpoints=value)
