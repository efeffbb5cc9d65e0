"""Copies of a model to try things on before a fit starts, which cost no second model. Runs on the *driver*.

Parameters are copied, the small ones first, as long as all of them together take little. Those beyond are the model's
own, under other names: whoever gets the copy may compute with them, but not change them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

COPIED_BYTES = 64 << 20
"""What the copied parameters take at most."""


def trial_copy(value: T, module: nn.Module, copied_bytes: int = COPIED_BYTES) -> tuple[T, list[nn.Parameter]]:
    """Return a deep copy of something that holds a module, and those of its parameters that lie where the module's do.

    Args:
        value: the module, or what refers to it; what is shared inside stays shared.
        module: whose parameters are shared with the copy where they are many.
        copied_bytes: what the parameters that are copied take at most, with what was computed from them.
    """
    memo: dict[int, Any] = {}
    shared = []
    seen: set[int] = set()
    computed = (tensor for part in module.modules() for tensor in _computed(vars(part), seen))
    for tensor in sorted((*module.parameters(), *computed), key=_num_bytes):
        copied_bytes -= _num_bytes(tensor)
        if not tensor.is_leaf:
            there = tensor.detach()
            memo[id(tensor)] = there if copied_bytes < 0 else there.clone()
        elif copied_bytes < 0 and type(tensor) is nn.Parameter and tensor.layout == torch.strided:
            there = tensor.detach().to("cpu")
            shared.append(nn.Parameter(there, requires_grad=tensor.requires_grad))
            memo[id(tensor)] = shared[-1]
    return copy.deepcopy(value, memo), shared


def _computed(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """What a module has computed from parameters and keeps, as hooks of weight_norm and of pruning do, each once.

    A forward pass computes it anew. ``deepcopy`` refuses it for the graph that it has.

    Args:
        value: the module's attributes, or one of them: LSTMs keep their weights in a list.
        seen: the identities of what was looked at, to which this one's are added.
    """
    if not isinstance(value, Tensor | dict | list | tuple) or id(value) in seen:
        return
    seen.add(id(value))
    if not isinstance(value, Tensor):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _computed(each, seen)
    elif not value.is_leaf:
        yield value


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
