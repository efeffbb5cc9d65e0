"""Calls the user's optimizer factory and checks what it makes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.training.spec import OptimizerFactory


def make_optimizer(factory: OptimizerFactory, module: nn.Module) -> Optimizer:
    """Return ``factory(module.parameters())``.

    Raises:
        ParamError: if the factory raises, or returns something else than an optimizer, or one of other parameters.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ParamError("Param model has no parameter that requires a gradient; there is nothing to train.")
    # The first optimizer of a process has torch import its compiler, of which a quarter of the time would go into
    # looking for garbage among what is imported.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        optimizer = factory(module.parameters())
    except Exception as error:
        raise ParamError(
            f"Param optimizer failed when called with the model's parameters: {type(error).__name__}: {error}"
        ) from error
    finally:
        if was_enabled:
            gc.enable()
    if not isinstance(optimizer, Optimizer):
        raise ParamError(
            "Param optimizer must be a function that takes the model's parameters and returns a "
            "torch.optim.Optimizer; "
            f"it returned {type(optimizer).__name__}."
        )
    own = {id(parameter) for parameter in module.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ParamError(
            f"Param optimizer returned {type(optimizer).__name__} of other parameters than those that it was called "
            "with; it would train nothing. Each rank has a copy of the model: use the function's argument."
        )
    return optimizer
