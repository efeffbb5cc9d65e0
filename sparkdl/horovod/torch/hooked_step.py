"""What every optimizer of ``hvd.DistributedOptimizer`` does: it counts backward passes and is told of each gradient.

Runs on the *rank*. How gradients are reduced is the affair of the subclasses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from sparkdl.horovod.torch.optimizer_state import kept_containers
from sparkdl.horovod.torch.process_sets import ProcessSet


class HookedStep(torch.optim.Optimizer):
    """Stands before the wrapped optimizer's own class.

    Attributes:
        backward_passes_per_step: how many backward passes add up to one step.
        op: number of the reduction.
        gradient_predivide_factor: what averages are divided by before the sum.
        sparse_as_dense: whether sparse gradients are reduced as dense ones.
        process_set: the ranks that take part.
    """

    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _passes_left: dict[torch.nn.Parameter, int]

    def _count_passes(self, parameters: Iterable[torch.nn.Parameter], backward_passes_per_step: int) -> None:
        self._passes_left = {parameter: 0 for parameter in parameters if parameter.requires_grad}
        self.set_backward_passes_per_step(backward_passes_per_step)

    def _hook_gradients(self) -> None:
        """Have autograd tell of every gradient, as long as there is this optimizer."""
        # Autograd keeps hooks where the garbage collector does not look: one that held this object would keep it, and
        # with it the parameters, for good.
        on_gradient = partial(_call, weakref.WeakMethod(self._on_gradient))
        hooks = [parameter.register_post_accumulate_grad_hook(on_gradient) for parameter in self._passes_left]
        weakref.finalize(self, _remove, hooks).atexit = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes add up to one step; between steps."""
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._passes_left, passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: if a backward pass has begun a step, and nothing has ended it.
        """
        if any(left < self.backward_passes_per_step for left in self._passes_left.values()):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state as the wrapped optimizer does, and begin a new step."""
        self._forget()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        with kept_containers(self):
            super().load_state_dict(state_dict)

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            self._take(parameter)

    def _take(self, parameter: torch.nn.Parameter) -> None:
        """All backward passes of a step have given their gradients of a parameter."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop what the step has begun."""
        raise NotImplementedError


def _call(method: weakref.WeakMethod[Any], parameter: torch.nn.Parameter) -> None:
    on_gradient = method()
    if on_gradient is not None:
        on_gradient(parameter)


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
