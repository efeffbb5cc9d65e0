"""Copies of a model to try things on before a fit starts, which cost no second model. Runs on the *driver*.

Parameters are copied, the small ones first, as long as all of them together take little. Those beyond are the model's
own, under other names: whoever gets the copy may compute with them, but not change them.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")

COPIED_BYTES = 64 << 20
"""What the copied parameters take at most."""


def trial_copy(value: T, module: nn.Module, copied_bytes: int = COPIED_BYTES) -> tuple[T, list[nn.Parameter]]:
    """Return a deep copy of something that holds a module, and those of its parameters that lie where the module's do.

    Args:
        value: the module, or what refers to it; what is shared inside stays shared.
        module: whose parameters are shared with the copy where they are many.
        copied_bytes: what the parameters that are copied take at most.
    """
    memo: dict[int, Any] = {}
    shared = []
    for parameter in sorted(module.parameters(), key=_num_bytes):
        copied_bytes -= _num_bytes(parameter)
        if copied_bytes < 0 and type(parameter) is nn.Parameter and parameter.layout == torch.strided:
            there = parameter.detach().to("cpu")
            shared.append(nn.Parameter(there, requires_grad=parameter.requires_grad))
            memo[id(parameter)] = shared[-1]
    return copy.deepcopy(value, memo), shared


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
