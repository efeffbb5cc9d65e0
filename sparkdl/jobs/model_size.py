"""How much memory a model and its optimizer take on a rank. Runs on the *driver*, and allocates none of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparkdl.training.update import make_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from sparkdl.training.spec import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What a rank holds of a model, in bytes, beside what its layers compute.

    Attributes:
        num_parameters: how many numbers are trained or frozen.
        weights: parameters and buffers.
        gradients: of the parameters that are trained.
        optimizer: state of the optimizer after a step; None where that cannot be told without memory.
    """

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int | None

    @property
    def total(self) -> int:
        """All of it that is known."""
        return self.weights + self.gradients + (self.optimizer or 0)


def model_size(module: nn.Module, optimizer: OptimizerFactory) -> ModelSize:
    """Return how large a model is."""
    parameters = list(module.parameters())
    return ModelSize(
        num_parameters=sum(each.numel() for each in parameters),
        weights=_num_bytes((*parameters, *module.buffers())),
        gradients=_num_bytes(each for each in parameters if each.requires_grad),
        optimizer=_optimizer_bytes(module, optimizer),
    )


def _optimizer_bytes(module: nn.Module, factory: OptimizerFactory) -> int | None:
    """Have the optimizer take a step on tensors without memory, and add up what it keeps."""
    try:
        with torch.device("meta"):
            light = copy.deepcopy(module, _without_memory(module)).to("meta")
        made = make_optimizer(factory, light)
        for parameter in light.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        made.step()
    except Exception:  # an optimizer that looks at numbers, or a module that cannot be copied
        return None
    return _num_bytes(
        value for state in made.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )


def _without_memory(module: nn.Module) -> dict[int, object]:
    """What ``deepcopy`` takes for the tensors of a module: tensors like them, of which only the form is there."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = torch.nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return memo


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors if not each.is_sparse)
