"""Turns the gradients of one or several batches into one update of the weights. Runs on a *rank*."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from sparkdl.data import ParquetFeed
    from sparkdl.training.learning_rate import LearningRate
    from sparkdl.training.precision import Precision


class UpdatePlan:
    """Which steps of an epoch lead to one update of the weights, and how many rows they have.

    Args:
        feed: of the epoch.
        num_batches: steps of an update; the last one of an epoch may have fewer.

    Attributes:
        num_steps: of an epoch.
    """

    def __init__(self, feed: ParquetFeed, num_batches: int) -> None:
        self._feed, self._num_batches = feed, num_batches
        self.num_steps = feed.steps_per_epoch

    @property
    def num_updates(self) -> int:
        """Updates of an epoch."""
        return math.ceil(self.num_steps / self._num_batches)

    def is_last_of_update(self, step: int) -> bool:
        """Whether the weights are updated after a step, counted from 1."""
        return step % self._num_batches == 0 or step == self.num_steps

    def rows_of_update(self, step: int) -> int:
        """Rows of all ranks in the update to which a step leads, counted from 1."""
        first = (step - 1) // self._num_batches * self._num_batches
        steps = range(first, min(first + self._num_batches, self.num_steps))
        return sum(sum(self._feed.rows_in_step(index)) for index in steps)


class WeightUpdate:
    """Divides and clips the gradients, has the optimizer take its step, and clears them.

    Gradients are the same on every rank here, and so is what becomes of them.

    Args:
        optimizer: of the module's parameters.
        learning_rate: that the optimizer is to have.
        precision: whose scaled gradients are unscaled first.
        max_grad_norm: to which the norm of all gradients together is clipped; None for no clipping.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        precision: Precision,
        max_grad_norm: float | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._scaler = precision.scaler
        self._max_grad_norm = max_grad_norm

    def apply(self, divisor: float = 1.0) -> None:
        """Update the weights by the gradients, each divided by ``divisor``; by none of them if that is 0."""
        self._scaler.unscale_(self._optimizer)
        if divisor != 1.0:
            for gradient in self._gradients():
                gradient.mul_(1 / divisor if divisor else 0.0)
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters(), self._max_grad_norm)
        with self._learning_rate.during_update():
            self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
