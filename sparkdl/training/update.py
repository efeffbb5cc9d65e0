"""Turns the gradients of one or several batches into one update of the weights.

:func:`make_optimizer` calls the user's optimizer factory and checks the result.
"""

from __future__ import annotations

import gc
import logging
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import errors_as
from sparkdl.model.architecture import copy_on_meta

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.data import PlannedFeed
    from sparkdl.training.distribution import ModelDistribution
    from sparkdl.training.learning_rate import LearningRate
    from sparkdl.training.precision import Precision
    from sparkdl.training.spec import OptimizerFactory


logger = logging.getLogger(__name__)


def updates_per_epoch(num_steps: int, num_batches: int) -> int:
    """Return the number of updates in an epoch of ``num_steps`` steps, one for every ``num_batches`` of them."""
    return math.ceil(num_steps / num_batches)


class UpdatePlan:
    """Which steps of an epoch lead to one update of the weights, and how many rows they have.

    Args:
        feed: feed of this rank's rows.
        num_batches: number of steps of an update; the last update of an epoch may have fewer.

    Attributes:
        num_steps: number of steps of the current epoch.
        steps_before: number of its steps that were done before the fit was resumed.
        has_steps: whether steps of the current epoch are left to do when it begins.
    """

    def __init__(self, feed: PlannedFeed, num_batches: int) -> None:
        self._feed, self._num_batches = feed, num_batches
        self.num_steps = feed.steps_per_epoch
        self._resumed: int | None = None
        self.steps_before = 0
        self.has_steps = True
        self._rows: dict[int, int] = {}
        self._rows_of_last: dict[int, int] = {}

    def begin(self, epoch: int, steps_before: int = 0, *, has_steps: bool = True) -> None:
        """Begin an epoch, counted from 1, or resume it after ``steps_before`` steps, which may be all of them."""
        self.has_steps = has_steps
        self._resumed = epoch - 1 if steps_before else None
        self.steps_before = steps_before
        rest = self._feed.steps_in(epoch - 1) if steps_before else self._feed.steps_per_epoch
        self.num_steps = steps_before + (rest if has_steps else 0)
        self._rows, self._rows_of_last = {}, {}

    def rows_of_step(self, step: int) -> int:
        """Return the number of rows of all ranks in a step, counted from 1."""
        if step not in self._rows_of_last:  # called several times in a row with one step
            self._rows_of_last = {
                step: sum(self._feed.rows_in_step(step - 1 - self.steps_before, self._resumed))
            }
        return self._rows_of_last[step]

    def is_last_of_update(self, step: int) -> bool:
        """Whether the weights are updated after a step, counted from 1."""
        return step % self._num_batches == 0 or step == self.num_steps

    def rows_of_update(self, step: int) -> int:
        """Return the number of rows of all ranks in the update to which a step belongs, counted from 1."""
        first = (step - 1) // self._num_batches * self._num_batches
        if first not in self._rows:
            steps = range(first, min(first + self._num_batches, self.num_steps))
            self._rows = {first: sum(self.rows_of_step(index + 1) for index in steps)}
        return self._rows[first]


class WeightUpdate:
    """Divides and clips the gradients, steps the optimizer, and clears the gradients.

    The gradients are averaged already: they are the same on every rank, or each rank has its part of them.

    Args:
        distribution: distribution of the module over the ranks.
        optimizer: optimizer of the module's parameters.
        learning_rate: learning rate of the optimizer.
        precision: precision whose scaler unscales the gradients first.
        max_grad_norm: maximum joint norm of all gradients, to which they are clipped; None for no clipping.

    Attributes:
        live: the tensors of the module, whose layers were looked up after the last update.
        num_skipped: number of updates since :meth:`end_epoch` that were skipped because their gradients had overflowed
            float16.
    """

    def __init__(
        self,
        distribution: ModelDistribution,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        precision: Precision,
        max_grad_norm: float | None = None,
    ) -> None:
        # On ranks only: the driver does without the c10d backend.
        from sparkdl.torch.replicas import LiveParameters

        self._distribution, self._module = distribution, distribution.module
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._scaler = precision.scaler
        self._max_grad_norm = max_grad_norm
        self._has_gradients = False
        self._num_updates = 0
        self.num_skipped = 0
        self.live = LiveParameters(self._module)
        self._module.zero_grad(set_to_none=True)

    def prepare(self, divisor: float = 1.0) -> None:
        """Divide the gradients by ``divisor``, and clip them. Collective in a divided model.

        If ``divisor`` is 0, because all rows have weight 0, :meth:`apply` only clears the gradients.
        """
        self._has_gradients = bool(divisor)
        if divisor:
            self._scaler.unscale_(self._optimizer)
            if divisor != 1.0:
                for parameter in self._module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(1 / divisor)
            if self._max_grad_norm is not None:
                self._distribution.clip_gradients(self._max_grad_norm)

    def apply(self) -> None:
        """Update the weights by the prepared gradients, and clear them. No communication."""
        self._num_updates += 1
        if self._has_gradients:
            self._step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Do what ``zero_grad`` does, but look for the module's layers, which takes longest, only after changes."""
        self.live.look()
        for parameter in self.live.parameters:
            parameter.grad = None

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
        """Continue from what :meth:`state_dict` returned."""
        self._num_updates, self.num_skipped = state["num_updates"], state["num_skipped"]

    def end_epoch(self, epoch: int) -> None:
        """Warn of updates that were skipped in an epoch, and reset the counts."""
        if self.num_skipped:
            logger.warning(
                "%d of %d updates of epoch %d were left out, as gradients had overflowed float16; the losses are scaled"
                " by %g now. Where that continues, train in bfloat16.",
                self.num_skipped,
                self._num_updates,
                epoch,
                self._scaler.get_scale(),
            )
        self._num_updates = self.num_skipped = 0


def make_optimizer(factory: OptimizerFactory, module: nn.Module) -> Optimizer:
    """Return ``factory(list(module.parameters()))``, a list so that the factory can go through it more than once.

    Raises:
        ParamError: if no parameter requires a gradient, or the factory raises, returns something other than an
            optimizer, or returns an optimizer of other parameters.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ParamError("Param model has no parameter that requires a gradient; there is nothing to train.")
    # The first optimizer of a process makes torch import its compiler; without gc.disable(), garbage collection takes
    # a quarter of the time of that import.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with errors_as(ParamError, "Param optimizer failed when called with the model's parameters"):
            optimizer = factory(list(module.parameters()))
    finally:
        if was_enabled:
            gc.enable()
    if not isinstance(optimizer, Optimizer):
        raise ParamError(
            "Param optimizer must be a function that takes the model's parameters and returns a "
            "torch.optim.Optimizer; "
            f"it returned {type(optimizer).__name__}."
        )
    trained = {id(parameter) for parameter in module.parameters()}
    if not any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
        raise ParamError(
            f"Param optimizer returned {type(optimizer).__name__} of other parameters than those that it was called "
            "with; it would train nothing. Each rank has a copy of the model: use the function's argument."
        )
    return optimizer


def optimizer_bytes(module: nn.Module, factory: OptimizerFactory) -> int | None:
    """Return the bytes of an optimizer's state after a step, which is tried on tensors without memory.

    Returns:
        The bytes; None if the optimizer reads values, or the module cannot be copied.
    """
    try:
        light = copy_on_meta(module)
        made = make_optimizer(factory, light)
        for parameter in light.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        made.step()
    except Exception:  # of the user's optimizer, or of a module that cannot be copied
        return None
    return sum(
        value.nbytes
        for state in made.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and not value.is_sparse
    )


def warn_of_untrained_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """Log a warning that names the parameters that require gradients and that no group of the optimizer holds."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in held
    ]
    if names:
        logger.warning(
            "Param optimizer holds none of %d parameters that require gradients, which are not trained: %s%s.",
            len(names),
            ", ".join(names[:_MOST_NAMED]),
            ", ..." if len(names) > _MOST_NAMED else "",
        )


_MOST_NAMED = 20


_WITH_FUSED_FORM = (torch.optim.Adam, torch.optim.AdamW)
"""Not SGD and Adagrad: only their unfused forms accept sparse gradients, which only the backward pass shows."""


def fuse(optimizer: Optimizer) -> None:
    """Make torch's Adam or AdamW on CPU update each tensor in one pass, in a third of the time of torch's default.

    This is done only if the user left the choice to torch, by giving neither ``fused`` nor ``foreach``. The result
    differs by rounding. See ``fused`` in the documentation of :class:`torch.optim.AdamW`. The identity of a fit
    describes the optimizer as the user made it, before this call.
    """
    if type(optimizer) not in _WITH_FUSED_FORM:
        return
    for group in optimizer.param_groups:
        is_open = group["fused"] is None and group["foreach"] is None and not group["differentiable"]
        if is_open and not isinstance(group["lr"], Tensor) and all(map(_fuses, group["params"])):
            group["fused"] = True


def _fuses(parameter: nn.Parameter) -> bool:
    """Whether torch 2.13's fused kernel computes what the default does; the kernel ignores strides."""
    return (
        parameter.device.type == "cpu"
        and (type(parameter.data) is Tensor or hasattr(parameter, "full_tensor"))
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.is_contiguous()
    )
