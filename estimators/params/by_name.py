"""Optimizers, losses and schedules of torch that Params name by a string."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from sparkdl.errors import ParamError, did_you_mean, list_names
from sparkdl.model.losses import LOSSES_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.model.losses import LossFunction
    from sparkdl.training.learning_rate import SchedulerFactory
    from sparkdl.training.spec import OptimizerFactory


_WITH_OTHER_STEPS = ("LBFGS", "SparseAdam")
"""Optimizers that need a closure, or take sparse gradients only."""

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(optim).items()
    if isinstance(kind, type)
    and issubclass(kind, optim.Optimizer)
    and kind is not optim.Optimizer
    and name not in _WITH_OTHER_STEPS
}


def cosine(optimizer: optim.Optimizer, num_steps: int) -> LRScheduler:
    """Return a schedule that lowers the learning rate to 0 along half a cosine."""
    return CosineAnnealingLR(optimizer, T_max=num_steps)


def linear(optimizer: optim.Optimizer, num_steps: int) -> LRScheduler:
    """Return a schedule that lowers the learning rate to 0 by equal steps."""
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=num_steps)


SCHEDULES: dict[str, SchedulerFactory] = {"cosine": cosine, "linear": linear}


def optimizer_by_name(name: str, learning_rate: float | None) -> OptimizerFactory:
    """Return the factory of a torch optimizer; its options are torch's defaults, except for the learning rate."""
    kind = _look_up("optimizer", name, OPTIMIZERS)
    return kind if learning_rate is None else partial(kind, lr=learning_rate)


def loss_by_name(name: str) -> LossFunction:
    """Return a loss of torch that takes the mean over the rows."""
    made: LossFunction = _look_up("loss", name, LOSSES_BY_NAME)()
    return made


def schedule_by_name(name: str) -> SchedulerFactory:
    """Return the factory of a schedule."""
    factory: SchedulerFactory = _look_up("scheduler", name, SCHEDULES)
    return factory


def _look_up(param: str, name: str, known: dict[str, Any]) -> Any:
    """Return what a name stands for.

    Raises:
        ParamError: if it stands for nothing; the message names what there is.
    """
    if name not in known:
        hint = did_you_mean(name, known, show=repr)
        names = list_names(sorted(known), most=20)
        text = f"Param {param} is {name!r}. By name there are {names}; or give a function (in a job file MODULE:NAME)."
        raise ParamError(f"{text} {hint}".rstrip())
    return known[name]
