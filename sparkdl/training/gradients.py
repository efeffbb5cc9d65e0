"""What a backward pass left in a model, and whether an optimizer can step by it. Runs on the *driver*, in trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Gradients:
    """What parameters that are trained got.

    Attributes:
        are_there: whether any got a gradient.
        lack_some: whether any got none.
        are_sparse: whether any is a sparse tensor.
    """

    are_there: bool
    lack_some: bool
    are_sparse: bool


def gradients_of(module: nn.Module) -> Gradients:
    """Return what the gradients are that lie in a module."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = [parameter.grad for parameter in trained if parameter.grad is not None]
    return Gradients(
        are_there=bool(found),
        lack_some=len(found) < len(trained),
        are_sparse=any(gradient.is_sparse for gradient in found),
    )


def try_optimizer(optimizer: Optimizer) -> None:
    """Take a step.

    Raises:
        ParamError: if the optimizer cannot.
    """
    try:
        optimizer.step()
    except Exception as error:
        raise ParamError(
            f"Param optimizer makes {type(optimizer).__name__}, which cannot step by gradients alone: "
            f"{type(error).__name__}: {error}. Choose one that can, such as SGD or Adam."
        ) from error
