"""Params that say how a fit survives interruptions; :mod:`.params` puts them together."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.estimators.param_mixins import P


def _to_url(value: Any) -> str:
    return str(value) if isinstance(value, PurePath) else TypeConverters.toString(value)


class HasCheckpoints(Params):
    """Params ``checkpointDir``, ``checkpointEverySteps`` and ``keepCheckpoints``."""

    checkpointDir: Param[str] = Param(
        Params._dummy(),
        "checkpointDir",
        "path or URL where a fit keeps checkpoints and goes on from the last one; default: none are taken",
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

    def setCheckpointDir(self: P, value: str) -> P:
        """Set where checkpoints are kept."""
        return self._set(checkpointDir=value)

    def setCheckpointEverySteps(self: P, value: int) -> P:
        """Set the updates from one checkpoint to the next."""
        return self._set(checkpointEverySteps=value)

    def setKeepCheckpoints(self: P, value: int) -> P:
        """Set how many of the last checkpoints stay."""
        return self._set(keepCheckpoints=value)


class HasRestarts(Params):
    """Params ``maxRestarts``, ``minWorkers`` and ``hangTimeoutSeconds``."""

    maxRestarts: Param[int] = Param(
        Params._dummy(),
        "maxRestarts",
        "how often a fit goes on by itself from its last checkpoint when ranks were lost (>= 0)",
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
        """Return how often a fit goes on by itself."""
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

    def setMaxRestarts(self: P, value: int) -> P:
        """Set how often a fit goes on by itself."""
        return self._set(maxRestarts=value)

    def setMinWorkers(self: P, value: int) -> P:
        """Set the ranks with which a restarted fit makes do."""
        return self._set(minWorkers=value)

    def setHangTimeoutSeconds(self: P, value: float) -> P:
        """Set the seconds after which a rank hangs."""
        return self._set(hangTimeoutSeconds=value)
