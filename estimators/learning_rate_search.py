"""The range test of learning rates: ``estimator.find_learning_rate(df)``. Runs on the *driver*, and on the *ranks*.

The learning rate grows exponentially from one update to the next, until the loss explodes (Smith, "Cyclical Learning
Rates for Training Neural Networks", 2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.lr_scheduler import LambdaLR

from sparkdl.checks import check_counts
from sparkdl.errors import ParamError
from sparkdl.estimators.summary import ShownAsText, plots
from sparkdl.training.callbacks import Callback

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn
    from torch.optim import Optimizer

    from sparkdl.training.callbacks import FitContext


_SMOOTHING = 0.9
_EXPLODED = 4.0


@dataclass(frozen=True, kw_only=True, repr=False)
class LearningRates(ShownAsText):
    """The loss for growing learning rates. ``print`` and notebooks show the suggestion.

    Attributes:
        rates: learning rate of each update, until the loss exploded.
        losses: mean loss of the ranks' batches before the update, moving average with a weight of 0.9 on the past.
        suggestion: rate at which the loss falls most per factor of the rate; None if it never falls.
    """

    rates: npt.NDArray[np.float64]
    losses: npt.NDArray[np.float64]
    suggestion: float | None

    def __str__(self) -> str:
        """Return a text with the suggestion."""
        tried = f"{len(self.rates)} learning rates from {self.rates[0]:.2g} to {self.rates[-1]:.2g}"
        if self.suggestion is None:
            return f"{tried}: the loss falls at none of them"
        return f"{tried}: the loss falls most at {self.suggestion:.2g}"

    def plot(self) -> Figure:
        """Return a matplotlib figure of the loss by learning rate, with the suggestion.

        Raises:
            ImportError: if matplotlib (the extra ``plot``) is not installed.
        """
        figure: Figure = plots().plot_rates(self.rates, self.losses, self.suggestion)
        return figure


@dataclass(frozen=True)
class RangeSchedule:
    """A schedule whose learning rates grow exponentially, the first parameter group's from ``low`` to ``high``.

    Raises:
        ParamError: if the range or the number of updates cannot be used.
    """

    low: float
    high: float
    num_updates: int

    def __post_init__(self) -> None:
        check_counts(least=10, num_updates=self.num_updates)
        if not 0 < self.low < self.high < math.inf:
            raise ParamError(
                f"low and high must be learning rates with 0 < low < high, got {self.low:g} and {self.high:g}."
            )

    def rates(self) -> npt.NDArray[np.float64]:
        """Return the rate of each update."""
        return np.geomspace(self.low, self.high, self.num_updates)

    def __call__(self, optimizer: Optimizer, num_steps: int) -> LambdaLR:
        """Return the scheduler of a rank."""
        del num_steps
        rates, first = self.rates(), float(optimizer.param_groups[0]["lr"])
        if not first > 0:
            raise ParamError("find_learning_rate needs an optimizer with a learning rate above 0.")
        return LambdaLR(optimizer, lambda update: rates[min(update, len(rates) - 1)] / first)


class LossRecorder(Callback):
    """Stores the losses of all steps in the model, which brings them to the driver."""

    _NAME = "_losses_of_range_test"

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    def on_step_end(self, context: FitContext) -> None:
        """Note the loss of this rank's rows."""
        assert context.loss is not None, "a step has a loss"
        self._losses.append(context.loss.detach().float().reshape(()))

    def on_fit_end(self, context: FitContext) -> None:
        """Average the losses over the ranks."""
        losses = torch.stack(self._losses)
        if context.world_size > 1:
            torch.distributed.all_reduce(losses)
        setattr(context.module, self._NAME, (losses / context.world_size).tolist())

    @classmethod
    def losses_in(cls, module: nn.Module) -> list[float]:
        """Return the losses that a recorder left in a module."""
        losses: list[float] = getattr(module, cls._NAME)
        return losses


def judge(losses: list[float], schedule: RangeSchedule, batches_per_update: int) -> LearningRates:
    """Return the losses of a range test by learning rate, with a suggestion.

    Args:
        losses: loss of each step.
        schedule: schedule of the learning rates.
        batches_per_update: number of steps for an update.
    """
    updates = len(losses) // batches_per_update
    values = np.array(losses[: updates * batches_per_update]).reshape(updates, -1).mean(axis=1)
    rates = schedule.rates()[:updates]
    average, smooth = 0.0, []
    for number, value in enumerate(values[: len(rates)], start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        smooth.append(average / (1 - _SMOOTHING**number))
        if not math.isfinite(value) or smooth[-1] > _EXPLODED * abs(min(smooth)):
            smooth.pop()
            break
    kept: Any = np.array(smooth)
    rates = rates[: len(kept)]
    lowest = int(kept.argmin()) if len(kept) else 0
    suggestion = None
    if lowest >= 2:
        slopes = np.gradient(kept[: lowest + 1], np.log(rates[: lowest + 1]))
        if slopes.min() < 0:
            suggestion = float(rates[int(slopes.argmin())])
    return LearningRates(rates=rates, losses=kept, suggestion=suggestion)
