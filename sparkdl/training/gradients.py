"""What a backward pass left in a model, and whether an optimizer can step by it. Runs on the *driver*, in trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.optim import Optimizer

_SPARSE = ("_saved_sparse", "_saved_sparse_grad")
"""How nodes of a graph name the argument that makes a gradient sparse, which embeddings and gather have."""


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


class TrialGradients:
    """Goes backward through a trial, and tells what gradients the parameters have; large ones are not computed.

    Args:
        module: the trial, on the CPU.
        shared: its parameters that are not copies: for them it only looks at how they got into the loss.

    """

    def __init__(self, module: nn.Module, shared: Collection[nn.Parameter]) -> None:
        self._shared = {id(parameter): parameter for parameter in shared}
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._copied = [parameter for parameter in trained if id(parameter) not in self._shared]
        self._num_trained = len(trained)
        self._seen: set[int] = set()
        self._has_sparse = False

    @property
    def found(self) -> Gradients:
        """What the gradients are."""
        return Gradients(
            are_there=bool(self._seen),
            lack_some=len(self._seen) < self._num_trained,
            are_sparse=self._has_sparse,
        )

    def backward(self, loss: Tensor) -> None:
        """Go backward from a loss, a number; this can be done again."""
        if not self._shared or not self._leaves_out_shared(loss):
            loss.backward(retain_graph=True)
        for parameter in (*self._copied, *self._shared.values()):
            if parameter.grad is not None:
                self._note(parameter, is_sparse=parameter.grad.is_sparse)
                if id(parameter) in self._shared:
                    parameter.grad = None

    def _leaves_out_shared(self, loss: Tensor) -> bool:
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
        loss.backward(retain_graph=True, inputs=self._copied or [loss])
        for identity, is_sparse in used.items():
            self._note(self._shared[identity], is_sparse=is_sparse)
        return True

    def _note(self, parameter: nn.Parameter, *, is_sparse: bool) -> None:
        self._seen.add(id(parameter))
        self._has_sparse = self._has_sparse or is_sparse


def try_optimizer(optimizer: Optimizer, left_out: Collection[nn.Parameter] = ()) -> None:
    """Take a step as if the optimizer had been made without some parameters, which it then cannot change.

    Raises:
        ParamError: if the optimizer cannot.
    """
    try:
        step_without(optimizer, left_out)
    except Exception as error:
        raise ParamError(
            f"Param optimizer makes {type(optimizer).__name__}, which cannot step by gradients alone: "
            f"{type(error).__name__}: {error}. Choose one that can, such as SGD or Adam."
        ) from error


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
