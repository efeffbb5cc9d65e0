"""Copies of a model to try things on before a fit starts, which cost no second model. Runs on the *driver*.

Parameters are copied, the small ones first, as long as all of them together take little. Those beyond are the model's
own, under other names: whoever gets the copy may compute with them, but not change them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.optim import Optimizer

T = TypeVar("T")

_SPARSE = ("_saved_sparse", "_saved_sparse_grad")
"""How nodes of a graph name the argument that makes a gradient sparse, which embeddings and gather have."""

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


class TrialGradients:
    """Goes backward through a trial, and tells what gradients the parameters have; large ones are not computed.

    Args:
        module: the trial, on the CPU.
        shared: its parameters that are not copies: for them it only looks at how they got into the loss.

    Attributes:
        has_sparse: whether a gradient is a sparse tensor.
    """

    def __init__(self, module: nn.Module, shared: Collection[nn.Parameter]) -> None:
        self._shared = {id(parameter): parameter for parameter in shared}
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._copied = [parameter for parameter in trained if id(parameter) not in self._shared]
        self._num_trained = len(trained)
        self._seen: set[int] = set()
        self.has_sparse = False

    @property
    def any_seen(self) -> bool:
        """Whether a parameter has a gradient."""
        return bool(self._seen)

    @property
    def all_seen(self) -> bool:
        """Whether all parameters that are trained have one."""
        return len(self._seen) == self._num_trained

    def backward(self, loss: Tensor, outputs: Tensor) -> None:
        """Go backward from a loss, which can be done again.

        Args:
            loss: a number.
            outputs: of the module, that the loss was computed of.
        """
        if not self._shared or not self._leaves_out_shared(loss, outputs):
            loss.backward(retain_graph=True)
        for parameter in (*self._copied, *self._shared.values()):
            if parameter.grad is not None:
                self._note(parameter, is_sparse=parameter.grad.is_sparse)
                if id(parameter) in self._shared:
                    parameter.grad = None

    def _leaves_out_shared(self, loss: Tensor, outputs: Tensor) -> bool:
        """Go backward for the others alone, and look up how shared ones got into the loss; False where that fails."""
        used: dict[int, bool] = {}
        nodes = [loss.grad_fn] if loss.grad_fn is not None else []
        found = set(nodes)
        while nodes:
            node = nodes.pop()
            if isinstance(node, BackwardCFunction):  # checkpointed layers, or others that hide what is inside
                return False
            for following, _ in node.next_functions:
                parameter = self._shared.get(id(getattr(following, "variable", None)))
                if parameter is not None:
                    is_sparse = any(getattr(node, name, False) for name in _SPARSE)
                    used[id(parameter)] = used.get(id(parameter), False) or is_sparse
                elif following is not None and following not in found:
                    found.add(following)
                    nodes.append(following)
        loss.backward(retain_graph=True, inputs=[*self._copied, outputs])
        for identity, is_sparse in used.items():
            self._note(self._shared[identity], is_sparse=is_sparse)
        return True

    def _note(self, parameter: nn.Parameter, *, is_sparse: bool) -> None:
        self._seen.add(id(parameter))
        self.has_sparse = self.has_sparse or is_sparse


def step_without(optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> None:
    """Have an optimizer step as if it had been made without some parameters, which it then cannot change."""
    left_out = {id(parameter) for parameter in parameters}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [parameter for parameter in params if id(parameter) not in left_out]
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
