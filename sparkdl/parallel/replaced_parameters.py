"""The parameters that :func:`divide` and :func:`shard` replace, and the refusal of optimizers that still have them.

Such an optimizer would step without an error and change nothing: it was made before the model was divided.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

_replaced = WeakIdKeyDictionary()
"""Replaced parameters that somebody still has: for each its name, and the function that replaced it."""

_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@contextmanager
def noting_replaced_parameters(module: nn.Module, by: str) -> Iterator[None]:
    """Remember the parameters that the code within replaces, if somebody still has them afterwards.

    Args:
        module: module whose parameters may be replaced.
        by: name of the function that replaces them, for the error.
    """
    # Weakly, as the memory of a replaced parameter has to be free as soon as its part is made.
    before = [(name, weakref.ref(parameter)) for name, parameter in module.named_parameters()]
    yield
    kept = {id(parameter) for parameter in module.parameters()}
    for name, reference in before:
        parameter = reference()
        if parameter is not None and id(parameter) not in kept:
            _replaced[parameter] = name, by
            _checked.clear()
            _check_first_steps()


@cache
def _check_first_steps() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse an optimizer of replaced parameters in its first step.

    Raises:
        ParamError: if it has one.
    """
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _replaced:
                name, by = _replaced[parameter]
                raise ParamError(
                    f"{type(optimizer).__name__} has the parameter {name!r} as it was before {by} replaced it: its "
                    f"steps would not change the model. Make the optimizer after {by}, from model.parameters()."
                )
    _checked.add(optimizer)
