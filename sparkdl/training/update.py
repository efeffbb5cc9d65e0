"""Turns the gradients of one or several batches into one update of the weights. Runs on a *rank*."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from sparkdl.data import PlannedFeed
    from sparkdl.training.learning_rate import LearningRate
    from sparkdl.training.precision import Precision

logger = logging.getLogger(__name__)


def updates_per_epoch(num_steps: int, num_batches: int) -> int:
    """How many updates of the weights an epoch has of so many steps, ``num_batches`` of which lead to one."""
    return math.ceil(num_steps / num_batches)


class UpdatePlan:
    """Which steps of an epoch lead to one update of the weights, and how many rows they have.

    Args:
        feed: of the epoch.
        num_batches: steps of an update; the last one of an epoch may have fewer.

    Attributes:
        num_steps: of the epoch that was begun last.
        steps_before: how many of them were done before it went on.
    """

    def __init__(self, feed: PlannedFeed, num_batches: int) -> None:
        self._feed, self._num_batches = feed, num_batches
        self.num_steps = feed.steps_per_epoch
        self._resumed: int | None = None
        self.steps_before = 0
        self._rows: dict[int, int] = {}
        self._rows_of_last: dict[int, int] = {}

    @property
    def num_updates(self) -> int:
        """Updates of a whole epoch."""
        return updates_per_epoch(self._feed.steps_per_epoch, self._num_batches)

    def begin(self, epoch: int, steps_before: int = 0) -> None:
        """Begin an epoch, counted from 1, or go on with it after so many steps."""
        self._resumed = epoch - 1 if steps_before else None
        self.steps_before = steps_before
        rest = self._feed.steps_in(epoch - 1) if steps_before else self._feed.steps_per_epoch
        self.num_steps = steps_before + rest
        self._rows, self._rows_of_last = {}, {}

    def rows_of_step(self, step: int) -> int:
        """Rows of all ranks in a step, counted from 1."""
        if step not in self._rows_of_last:  # asked for several times in a row
            self._rows_of_last = {
                step: sum(self._feed.rows_in_step(step - 1 - self.steps_before, self._resumed))
            }
        return self._rows_of_last[step]

    def is_last_of_update(self, step: int) -> bool:
        """Whether the weights are updated after a step, counted from 1."""
        return step % self._num_batches == 0 or step == self.num_steps

    def rows_of_update(self, step: int) -> int:
        """Rows of all ranks in the update to which a step leads, counted from 1."""
        first = (step - 1) // self._num_batches * self._num_batches
        if first not in self._rows:
            steps = range(first, min(first + self._num_batches, self.num_steps))
            self._rows = {first: sum(self.rows_of_step(index + 1) for index in steps)}
        return self._rows[first]


class WeightUpdate:
    """Divides and clips the gradients, has the optimizer take its step, and clears them.

    Gradients are the same on every rank here, and so is what becomes of them.

    Args:
        module: whose gradients they are.
        optimizer: of the module's parameters.
        learning_rate: that the optimizer is to have.
        precision: whose scaled gradients are unscaled first.
        max_grad_norm: to which the norm of all gradients together is clipped; None for no clipping.

    Attributes:
        num_skipped: updates that were left out since :meth:`end_epoch`, as their gradients had overflowed float16.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        precision: Precision,
        max_grad_norm: float | None = None,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._scaler = precision.scaler
        self._max_grad_norm = max_grad_norm
        self._num_updates = 0
        self.num_skipped = 0
        module.zero_grad(set_to_none=True)

    @property
    def optimizer(self) -> Optimizer:
        """Of the module's parameters."""
        return self._optimizer

    def apply(self, divisor: float = 1.0) -> None:
        """Update the weights by the gradients, each divided by ``divisor``; not at all if that is 0."""
        self._num_updates += 1
        if divisor:
            self._scaler.unscale_(self._optimizer)
            if divisor != 1.0:
                for parameter in self._module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(1 / divisor)
            if self._max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._module.parameters(), self._max_grad_norm)
            self._step()
        self._module.zero_grad(set_to_none=True)

    def _step(self) -> None:
        scale = self._scaler.get_scale() if self._scaler.is_enabled() else 0.0
        with self._learning_rate.during_update():
            self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._scaler.is_enabled() and self._scaler.get_scale() < scale:
            self.num_skipped += 1
        else:
            self._learning_rate.advance()

    def state_dict(self) -> dict[str, int]:
        """Return the counts of the epoch."""
        return {"num_updates": self._num_updates, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on with what :meth:`state_dict` returned."""
        self._num_updates, self.num_skipped = state["num_updates"], state["num_skipped"]

    def end_epoch(self, epoch: int) -> None:
        """Warn of updates that were left out in an epoch, and count anew."""
        if self.num_skipped:
            logger.warning(
                "%d of %d updates of epoch %d were left out, as gradients had overflowed float16; the losses are scaled"
                " by %g now. Where that goes on, train in bfloat16.",
                self.num_skipped,
                self._num_updates,
                epoch,
                self._scaler.get_scale(),
            )
        self._num_updates = self.num_skipped = 0
