"""``hvd.DistributedOptimizer``: an optimizer that steps with gradients reduced over the ranks.

Runs on the *rank*. Hooks start the allreduce of a gradient while the backward pass still runs. They are submitted in
one order on all ranks, that of the parameters from last to first, whatever order a rank's backward pass has: a
gradient that comes early waits for those before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.errors import ParamError
from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.parameter_names import check_names
from sparkdl.horovod.torch.pending import Pending
from sparkdl.horovod.torch.process import size
from sparkdl.horovod.torch.reduce_ops import Average, name_of
from sparkdl.horovod.torch.submission import allreduce_async_


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
) -> torch.optim.Optimizer:
    """Wrap an optimizer so that ``step`` uses gradients reduced over the ranks.

    Args:
        optimizer: what to wrap; the result shares its parameter groups and state and is of a subclass of its class.
        named_parameters: ``model.named_parameters()``; serves error messages.
        compression: what travels instead of a gradient.
        backward_passes_per_step: how many backward passes add up to one step.
        op: ``Average`` or ``Sum``, or another operation of :func:`sparkdl.horovod.torch.allreduce`.
        gradient_predivide_factor: with ``Average``, divide by this before and by the rest after the sum.
        sparse_as_dense: make sparse gradients dense and reduce them so.

    Raises:
        ValueError: if the names are not unique, or some parameter has none.
    """
    name_of(op)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    check_names(parameters, named_parameters)
    kind: Any = type(type(optimizer).__name__, (_DistributedStep, type(optimizer)), {})
    wrapped: Any = kind.__new__(kind)
    # A learning rate scheduler that was made first has put a `step` bound to the unwrapped optimizer there.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._begin(
        GradientReduction(
            parameters,
            compression=compression,
            op=op,
            predivide_factor=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
        ),
        backward_passes_per_step,
    )
    return wrapped  # type: ignore[no-any-return]


class GradientReduction:
    """The allreduces of one step's gradients, started in one order on all ranks.

    Attributes:
        order: the parameters in the order in which their gradients are submitted.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        compression: type[Compressor],
        op: int,
        predivide_factor: float,
        sparse_as_dense: bool,
    ) -> None:
        self.order = [parameter for parameter in parameters if parameter.requires_grad][::-1]
        self._compression = compression
        self._op = op
        self._predivide_factor = predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self._ready: set[torch.nn.Parameter] = set()
        self._pending: list[tuple[torch.nn.Parameter, Pending, Any]] = []

    @property
    def has_begun(self) -> bool:
        """Some gradient of the step is ready or under way."""
        return bool(self._pending or self._ready)

    def mark_ready(self, parameter: torch.nn.Parameter) -> None:
        """Take note of a complete gradient, and start every allreduce that is next in order and ready."""
        self._ready.add(parameter)
        while len(self._pending) < len(self.order) and self.order[len(self._pending)] in self._ready:
            self._start(self.order[len(self._pending)])

    def finish(self) -> None:
        """Start what was not ready, with zeros where a parameter has no gradient, and wait for all."""
        for parameter in self.order[len(self._pending) :]:
            self._start(parameter)
        for parameter, pending, context in self._pending:
            reduced = self._compression.decompress(pending.wait(), context)
            if reduced is not parameter.grad:
                parameter.grad = reduced
        self.forget()

    def forget(self) -> None:
        """Begin anew, as for the next step."""
        self._pending.clear()
        self._ready.clear()

    def _start(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            if not self._sparse_as_dense:
                raise ParamError(
                    "hvd.DistributedOptimizer cannot reduce sparse gradients; give sparse_as_dense=True."
                )
            parameter.grad = parameter.grad.to_dense()
        compressed, context = self._compression.compress(parameter.grad)
        pending = allreduce_async_(
            compressed,
            op=self._op,
            prescale_factor=1.0 / self._predivide_factor,
            postscale_factor=self._predivide_factor,
        )
        self._pending.append((parameter, pending, context))


class _DistributedStep(torch.optim.Optimizer):
    """What a wrapped optimizer does besides; stands before the optimizer's own class."""

    _reduction: GradientReduction
    _passes_left: dict[torch.nn.Parameter, int]
    backward_passes_per_step: int

    def _begin(self, reduction: GradientReduction, backward_passes_per_step: int) -> None:
        self._reduction = reduction
        self._synchronized = False
        self._should_synchronize = True
        self.set_backward_passes_per_step(backward_passes_per_step)
        if size() > 1:
            for parameter in reduction.order:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes add up to one step; between steps."""
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._reduction.order, passes)

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            self._reduction.mark_ready(parameter)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, starting those that no backward pass has completed."""
        if size() > 1:
            self._reduction.finish()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` use the gradients as they are, after a call to ``synchronize``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Reduce the gradients, unless ``skip_synchronize``, and step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: if they are being reduced.
        """
        if self._reduction.has_begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state as the wrapped optimizer does, and begin a new step."""
        self._reduction.forget()
        self._synchronized = False
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        super().load_state_dict(state_dict)
