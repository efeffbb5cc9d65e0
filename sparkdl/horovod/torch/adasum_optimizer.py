"""``hvd.DistributedOptimizer`` with ``op=Adasum``: each rank steps by itself, and the changes are combined.

Runs on the *rank*. As soon as a gradient is complete, the wrapped optimizer steps with this one parameter, and the
Adasum of the change is started while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.horovod.torch.compression import Compressor
from sparkdl.horovod.torch.handles import synchronize
from sparkdl.horovod.torch.hooked_step import HookedStep
from sparkdl.horovod.torch.operations.allreduce import allreduce_async_
from sparkdl.horovod.torch.reduce_ops import Adasum


class AdasumStep(HookedStep):
    """Steps with each parameter as soon as its gradient is complete, and combines the changes."""

    _parameter_names: Mapping[torch.nn.Parameter, str]
    _compression: type[Compressor]

    def _begin(
        self,
        names: Mapping[torch.nn.Parameter, str],
        compression: type[Compressor],
        backward_passes_per_step: int,
    ) -> None:
        self._compression = compression
        self._under_way: dict[torch.nn.Parameter, tuple[int, torch.Tensor, Any]] = {}
        """Handle, value before the step, and the compressor's context, by parameter."""
        self._count_passes(names, backward_passes_per_step)
        self._hook_gradients()

    def _take(self, parameter: torch.nn.Parameter) -> None:
        self._start(parameter)

    def _forget(self) -> None:
        self._under_way.clear()

    @torch.no_grad()
    def _start(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        before = parameter.detach().clone()
        with self._only(parameter):
            super().step()
        change, context = self._compression.compress(parameter.detach() - before)
        parameter.copy_(before)
        handle = allreduce_async_(change, name=self._parameter_names[parameter], op=Adasum)
        self._under_way[parameter] = (handle, before, context)

    @contextmanager
    def _only(self, parameter: torch.nn.Parameter) -> Iterator[None]:
        """Have the wrapped optimizer see one parameter alone."""
        stashed = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [entry for entry in group["params"] if entry is parameter]
        try:
            yield
        finally:
            for group, parameters in zip(self.param_groups, stashed, strict=True):
                group["params"] = parameters

    def synchronize(self) -> None:
        """Nothing; ``step`` waits."""

    def skip_synchronize(self) -> None:
        """Not to be had: the changes are combined, not the gradients.

        Raises:
            AssertionError: in any case.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Combine the changes of all parameters and apply them; a ``closure`` is called before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._passes_left:
            if parameter not in self._under_way:
                self._start(parameter)
        for parameter, (handle, before, context) in self._under_way.items():
            change = self._compression.decompress(synchronize(handle), context)
            parameter.copy_(before + change)
        self._under_way.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        return loss
