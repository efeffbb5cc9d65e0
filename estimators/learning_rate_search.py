"""The range test of learning rates: ``estimator.find_learning_rate(df)``. Runs on the *driver*, and on the *ranks*.

The learning rate grows exponentially from one update to the next, until the loss explodes (Smith, "Cyclical Learning
Rates for Training Neural Networks", 2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch.optim.lr_scheduler import LambdaLR

from sparkdl.checks import check_counts
from sparkdl.errors import ParamError, TrainingError
from sparkdl.estimators.summary import ShownAsText, plots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, repr=False)
class LearningRates(ShownAsText):
    """The loss for growing learning rates. ``print`` and notebooks show the suggestion.

    Attributes:
        rates: learning rate of each update, until the loss exploded.
        losses: mean loss of the ranks' rows before the update, moving average with a weight of 0.9 on the past.
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


def judge(losses: Sequence[tuple[float, float]]) -> LearningRates:
    """Return the losses of a range test by learning rate, with a suggestion.

    Args:
        losses: learning rate and loss of each update, as :class:`sparkdl.training.learning_rate.RangeTest` has them.

    Raises:
        TrainingError: if there is none.
    """
    if not losses:
        raise TrainingError("The range test has no loss: the weights of all rows that it drew are 0.")
    rates, averages = np.array(losses).T
    lowest = int(averages.argmin())
    suggestion = None
    if lowest >= 2:
        slopes = np.gradient(averages[: lowest + 1], np.log(rates[: lowest + 1]))
        if slopes.min() < 0:
            suggestion = float(rates[int(slopes.argmin())])
    return LearningRates(rates=rates, losses=averages, suggestion=suggestion)
