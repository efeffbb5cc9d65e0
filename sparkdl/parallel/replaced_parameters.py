"""The parameters that :func:`divide` and :func:`shard` replace, and the refusal of optimizers that still have them.

Such an optimizer would step without an error and change nothing: it was made before the model was divided.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from sparkdl.errors import ParamError
from sparkdl.model.architecture import parameter_with_hook

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn

_replaced = WeakIdKeyDictionary()
"""Replaced parameters that are still referred to: for each its name, and the function that replaced it."""

_num_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""Number of parameters that each optimizer had when it was checked."""


def tie_again(module: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Tie parameters again after their replacement: all names of one get the new parameter of its first name."""
    for first, *others in tied:
        for name in others:
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent).register_parameter(last, module.get_parameter(first))


@contextmanager
def noting_replaced_parameters(module: nn.Module, by: str) -> Iterator[None]:
    """Remember the parameters that the code within replaces, if anything still refers to them afterwards.

    New parameters get the attributes of those that they replace. Optimizer factories may read these to make groups.

    Args:
        module: module whose parameters may be replaced.
        by: name of the function that replaces them, for the error.

    Raises:
        ParamError: if a parameter has a hook on its gradient, which would stay with the replaced one.
    """
    hooked = parameter_with_hook(module)
    if hooked is not None:
        raise ParamError(
            f"The gradient of {hooked!r} has a hook, which {by} would lose, as it replaces the parameter. Remove the "
            f"hook, and give one to the new parameter after {by}, by register_post_accumulate_grad_hook()."
        )
    # Weakly, as the memory of a replaced parameter has to be free as soon as its part is made. Not those of other
    # wrappers, such as quantized weights: FSDP2 may swap them, and torch refuses that if there are weak references.
    before = [
        (name, WeakIdRef(parameter))
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor) or not is_traceable_wrapper_subclass(parameter)
    ]
    attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
    yield
    for name, values in attributes.items():
        parameter = module.get_parameter(name)
        vars(parameter).update({key: value for key, value in values.items() if key not in vars(parameter)})
    kept = {id(parameter) for parameter in module.parameters()}
    for name, reference in before:
        parameter = reference()
        if parameter is not None and id(parameter) not in kept:
            _replaced[parameter] = name, by
            _num_checked.clear()
            _check_first_steps()


@cache
def _check_first_steps() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse an optimizer of replaced parameters, in its first step and after it has got others.

    Raises:
        ParamError: if it has one.
    """
    num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    if _num_checked.get(optimizer) == num_parameters:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _replaced:
                name, by = _replaced[parameter]
                raise ParamError(
                    f"{type(optimizer).__name__} holds the old parameter {name!r}, which {by} has replaced, and would "
                    f"not change the model. Create the optimizer after {by}, from model.parameters(). If another "
                    f"module shares the parameter, call {by} with a module that contains both."
                )
    _num_checked[optimizer] = num_parameters
