"""One small mixin for each group of Params that say how weights are updated; :mod:`.params` puts them together."""

from __future__ import annotations

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.estimators.param_mixins import P, one_of
from sparkdl.training.learning_rate import INTERVALS, SCALINGS, SchedulerFactory
from sparkdl.training.update import PRECISIONS


class HasScheduler(Params):
    """Param ``scheduler``."""

    scheduler: Param[SchedulerFactory] = Param(
        Params._dummy(),
        "scheduler",
        "function that takes the optimizer and how often the schedule goes on, and returns a torch scheduler",
    )

    def getScheduler(self) -> SchedulerFactory | None:
        """Return the function that makes the scheduler, if there is one."""
        return self.getOrDefault(self.scheduler) if self.isSet(self.scheduler) else None

    def setScheduler(self: P, value: SchedulerFactory) -> P:
        """Set the function that makes the scheduler."""
        return self._set(scheduler=value)


class HasSchedulerInterval(Params):
    """Param ``schedulerInterval``."""

    schedulerInterval: Param[str] = Param(
        Params._dummy(),
        "schedulerInterval",
        "when the schedule goes on: epoch or step, a step being an update of the weights",
        one_of(*INTERVALS),
    )

    def getSchedulerInterval(self) -> str:
        """Return ``"epoch"`` or ``"step"``."""
        return self.getOrDefault(self.schedulerInterval)

    def setSchedulerInterval(self: P, value: str) -> P:
        """Set when the schedule goes on."""
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

    def setLearningRateScaling(self: P, value: str) -> P:
        """Set what the learning rate is multiplied with."""
        return self._set(learningRateScaling=value)

    def setWarmupSteps(self: P, value: int) -> P:
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

    def setGradientAccumulationSteps(self: P, value: int) -> P:
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

    def setMaxGradNorm(self: P, value: float) -> P:
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

    def setPrecision(self: P, value: str) -> P:
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

    def setSyncBatchNorm(self: P, value: bool) -> P:
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

    def setCompileModel(self: P, value: bool) -> P:
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

    def setDeterministic(self: P, value: bool) -> P:
        """Set whether operations that do not repeat to the bit are refused."""
        return self._set(deterministic=value)
