"""The learning rate of a fit: scaled with the number of ranks, warmed up, and changed by the user's schedule.

:class:`RangeTest` records the loss by learning rate, for ``find_learning_rate``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparkdl.errors import ParamError, TrainingError
from sparkdl.foreign_errors import errors_as

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdl.collective import Communicator
    from sparkdl.training.history import EpochRecord
    from sparkdl.training.spec import Goal

SchedulerFactory: TypeAlias = Callable[[Optimizer, int], LRScheduler]
"""Takes the optimizer and the number of steps of the scheduler in the whole fit; returns the scheduler."""

SCALINGS = ("none", "linear", "sqrt")
INTERVALS = ("epoch", "step")


def scaling_factor(scaling: str, world_size: int) -> float:
    """Return the factor of the optimizer's learning rates: 1, the number of ranks, or its square root.

    ``"linear"`` follows Goyal et al. 2017, "Accurate, Large Minibatch SGD"; ``"sqrt"`` follows Krizhevsky 2014, "One
    weird trick for parallelizing convolutional neural networks", and suits Adam.
    """
    return {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[scaling]


def make_scheduler(
    factory: SchedulerFactory, optimizer: Optimizer, num_steps: int, interval: str, watched: Goal | None
) -> LRScheduler:
    """Return ``factory(optimizer, num_steps)``.

    Args:
        factory: the user's function.
        optimizer: optimizer for the scheduler.
        num_steps: number of steps of the scheduler in the whole fit.
        interval: interval at which the scheduler is stepped.
        watched: metric that has to improve; None for the loss.

    Raises:
        ParamError: if the factory raises, returns something other than a scheduler, or returns a ReduceLROnPlateau that
            would be stepped without a metric, or with one that improves in the other direction.
    """
    with errors_as(
        ParamError, f"Param scheduler failed when called with the optimizer and {num_steps} steps"
    ):
        scheduler = factory(optimizer, num_steps)
    if not isinstance(scheduler, LRScheduler):
        raise ParamError(
            "Param scheduler must be a function that takes the optimizer and the number of steps and returns a "
            f"torch.optim.lr_scheduler.LRScheduler; it returned {type(scheduler).__name__}."
        )
    plateau = _plateau_in(scheduler)
    if plateau is not None:
        _check_plateau(plateau, scheduler, interval, watched)
    return scheduler


def _plateau_in(scheduler: LRScheduler) -> ReduceLROnPlateau | None:
    """Return the ReduceLROnPlateau that a scheduler is, or that it holds as an attribute."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return scheduler
    for value in vars(scheduler).values():
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, LRScheduler) and (plateau := _plateau_in(inner)) is not None:
                return plateau
    return None


def _check_plateau(
    plateau: ReduceLROnPlateau, scheduler: LRScheduler, interval: str, watched: Goal | None
) -> None:
    if interval != "epoch":
        raise ParamError(
            "Param scheduler makes a ReduceLROnPlateau, which looks at the loss of an epoch. "
            f"Set schedulerInterval to 'epoch'; it is {interval!r}."
        )
    if "metrics" not in inspect.signature(scheduler.step).parameters:
        raise ParamError(
            f"Param scheduler makes a {type(scheduler).__name__} that holds a ReduceLROnPlateau, and its step has no "
            "argument metrics to pass on. Return the ReduceLROnPlateau itself, or add the argument."
        )
    if plateau.mode == "max" and (watched is None or watched.mode != "max"):
        metric = "the loss" if watched is None else watched.metric
        raise ParamError(
            f"Param scheduler makes a ReduceLROnPlateau(mode='max'), and {metric}, which it follows, is better when "
            "smaller. Set bestMetric to the metric to maximize and bestMode to 'max', or make the ReduceLROnPlateau "
            "with mode='min'."
        )


class LearningRate:
    """The learning rate of one rank's optimizer; the same on every rank.

    Args:
        optimizer: optimizer, as the user's factory made it.
        factor: factor applied to the scheduled learning rates.
        warmup_steps: number of updates over which the learning rate grows linearly from ``1 / warmup_steps`` of its
            scheduled value to the full value.
        scheduler: factory of the scheduler; None for a constant learning rate.
        interval: interval at which the scheduler is stepped: ``"epoch"``, or ``"step"`` for each update of the weights.
        num_epochs: number of epochs of the fit.
        updates_per_epoch: number of updates of an epoch.
        watched: metric that has to improve; None for the loss.

    Raises:
        ParamError: as :func:`make_scheduler`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        factor: float = 1.0,
        warmup_steps: int = 0,
        scheduler: SchedulerFactory | None = None,
        interval: str = "epoch",
        num_epochs: int,
        updates_per_epoch: int,
        watched: Goal | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._factor = factor
        self._warmup_steps = warmup_steps
        self._interval = interval
        self._num_updates = 0
        self._scheduler: Any = None
        self._num_steps = num_epochs * (updates_per_epoch if interval == "step" else 1)
        if scheduler is not None:
            self._scheduler = make_scheduler(scheduler, optimizer, self._num_steps, interval, watched)
        self._plateau = None if self._scheduler is None else _plateau_in(self._scheduler)
        self._watched = watched
        self._tried = self.last = float("nan")
        """Learning rate of the first parameter group in the last update."""

    @property
    def scheduled(self) -> float:
        """Learning rate of the first parameter group in the next update, before warm-up and scaling."""
        return float(self._optimizer.param_groups[0]["lr"])

    @contextmanager
    def during_update(self) -> Iterator[None]:
        """Within this context the optimizer has the learning rate of the next update."""
        part = min(1.0, (self._num_updates + 1) / self._warmup_steps) if self._warmup_steps else 1.0
        scheduled = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate * part * self._factor
        self._tried = float(self._optimizer.param_groups[0]["lr"])
        yield
        for group, rate in zip(self._optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate

    def advance(self) -> None:
        """Advance the warm-up after an update, and the scheduler if its interval is ``"step"``.

        Raises:
            TrainingError: if the scheduler fails.
        """
        self._num_updates += 1
        self.last = self._tried
        if self._scheduler is not None and self._interval == "step":
            self._step(self._scheduler.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of warm-up and scheduler."""
        return {
            "num_updates": self._num_updates,
            "last": self.last,
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; the optimizer's state has to be loaded before."""
        self._num_updates, self.last = state["num_updates"], state["last"]
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])

    def end_epoch(self, record: EpochRecord) -> None:
        """Step the scheduler if its interval is ``"epoch"``.

        A ReduceLROnPlateau is stepped with the metric that has to improve, or with the loss if that metric improves in
        the other direction; not at all if the value is not finite.

        Raises:
            TrainingError: if the scheduler fails.
        """
        if self._scheduler is None or self._interval != "epoch":
            return
        if self._plateau is None:
            self._step(self._scheduler.step)
            return
        value = record.metrics.get("val_loss", record.loss)
        if self._watched is not None and self._watched.mode == self._plateau.mode:
            value = record.values[self._watched.metric]
        if math.isfinite(value):
            self._step(partial(self._scheduler.step, metrics=value))

    def _step(self, step: Callable[[], None]) -> None:
        name = type(self._scheduler).__name__
        with errors_as(TrainingError, f"Param scheduler: {name} failed when it continued"):
            step()


_SMOOTHING = 0.9
_EXPLODED = 4.0


class RangeTest:
    """The loss for growing learning rates, until it explodes; the same on every rank.

    Args:
        communicator: communicator of all ranks.

    Attributes:
        losses: for each update its learning rate, and the mean loss of all ranks' rows before it, a moving average.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sums = np.zeros(2)
        """Sum of the losses of this rank's rows since the last update, and the weight of the rows."""
        self._average, self._num_updates = 0.0, 0
        self.losses: list[tuple[float, float]] = []

    def add(self, loss_mean: Tensor, weight: float) -> None:
        """Add the mean loss of a batch of this rank, and the weight of its rows."""
        if weight:
            self._sums += (float(loss_mean) * weight, weight)

    def ends_before_update(self, rate: float) -> bool:
        """Note the loss of the batches of an update; return whether the test ends before the update. Collective.

        It ends if the loss is not finite, or the moving average exceeds four times the lowest one.

        Args:
            rate: learning rate of the update.

        Raises:
            TrainingError: if the first loss is not finite.
        """
        if self._communicator.world_size > 1:
            self._communicator.allreduce(self._sums, op="sum", name="losses of a range test")
        total, weight = self._sums.tolist()
        self._sums = np.zeros(2)
        if not weight:
            return False
        loss = total / weight
        if not math.isfinite(loss):
            if not self.losses:
                raise TrainingError(
                    f"The loss of the first rows is {loss}, before any update. Look for NaN and extreme values in the "
                    "data."
                )
            return True
        self._num_updates += 1
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        smooth = self._average / (1 - _SMOOTHING**self._num_updates)
        if self.losses and smooth > _EXPLODED * abs(min(least for _, least in self.losses)):
            return True
        # A rate comes again where float16 had overflowed and the update was skipped, and after the last rate.
        if not self.losses or self.losses[-1][0] != rate:
            self.losses.append((rate, smooth))
        return False
