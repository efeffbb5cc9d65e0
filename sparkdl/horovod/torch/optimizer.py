"""``hvd.DistributedOptimizer``: an optimizer that steps with gradients reduced over the ranks.

Runs on the *rank*. Hooks start the allreduce of a gradient while the backward pass still runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.horovod.torch.adasum_optimizer import AdasumStep
from sparkdl.horovod.torch.basics import size
from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.gradient_reduction import GradientReduction
from sparkdl.horovod.torch.hooked_step import HookedStep
from sparkdl.horovod.torch.objects import broadcast_object
from sparkdl.horovod.torch.operations.target import refuse_subclasses
from sparkdl.horovod.torch.parameter_groups import Groups, check_groups, form_groups
from sparkdl.horovod.torch.parameter_names import name_parameters
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
from sparkdl.horovod.torch.reduce_ops import Adasum, Average, choose


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Wrap an optimizer so that ``step`` uses gradients reduced over the ranks.

    Args:
        optimizer: what to wrap; the result shares its parameter groups and state and is of a subclass of its class.
        named_parameters: ``model.named_parameters()``; the ranks match gradients by these names.
        compression: what travels instead of a gradient.
        backward_passes_per_step: how many backward passes add up to one step.
        op: ``Average`` or ``Sum``, or another operation of :func:`sparkdl.horovod.torch.allreduce`. With
            ``Adasum`` each rank steps by itself and the changes are combined.
        gradient_predivide_factor: with ``Average``, divide by this before and by the rest after the sum.
        num_groups: deprecated by Horovod; use ``groups``.
        groups: which gradients are reduced as one operation: a number of groups, or lists of parameters.
        sparse_as_dense: make sparse gradients dense and reduce them so.
        process_set: the ranks that take part; on the others the optimizer steps with its own gradients.

    Raises:
        ValueError: if the names are not unique, or some parameter has none or is a DTensor, or options do not go
            together.
        NotImplementedError: if ``op`` is ``Adasum`` and not all ranks take part.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    check_groups(groups)
    op = choose(op, None)
    names = name_parameters(optimizer, named_parameters)
    refuse_subclasses(names)
    is_adasum = op == Adasum and size() > 1
    if is_adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    step: type = AdasumStep if is_adasum else _ReducedStep
    wrapped: Any = _wrap(optimizer, step)
    wrapped.op, wrapped.process_set = op, process_set
    wrapped.gradient_predivide_factor, wrapped.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    wrapped._parameter_names = names
    if is_adasum:
        wrapped._begin(names, compression, backward_passes_per_step)
    else:
        reduction = None
        if process_set.included() and size() > 1:
            reduction = GradientReduction(
                names,
                form_groups(_ordered_parameters(names, groups, process_set), groups),
                compression=compression,
                op=op,
                predivide_factor=gradient_predivide_factor,
                sparse_as_dense=sparse_as_dense,
                process_set=process_set,
            )
        wrapped._begin(reduction, [*names], backward_passes_per_step)
    return wrapped  # type: ignore[no-any-return]  # of a class made at run time


def _wrap(optimizer: torch.optim.Optimizer, step: type) -> Any:
    kind: Any = type(type(optimizer).__name__, (step, type(optimizer)), {})
    wrapped: Any = kind.__new__(kind)
    # A learning rate scheduler that was made first has put a `step` bound to the unwrapped optimizer there.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    return wrapped


def _ordered_parameters(
    names: dict[torch.nn.Parameter, str], groups: Groups, process_set: ProcessSet
) -> list[torch.nn.Parameter]:
    """The parameters that want gradients; where a number of groups is to be formed, in the first rank's order."""
    parameters = [parameter for parameter in names if parameter.requires_grad]
    if not isinstance(groups, int):
        return parameters
    assert process_set.ranks is not None
    first = process_set.ranks[0]
    order = broadcast_object([names[parameter] for parameter in parameters], first, None, process_set)
    return sorted(parameters, key=lambda parameter: order.index(names[parameter]))


class _ReducedStep(HookedStep):
    """Steps with reduced gradients."""

    _parameter_names: dict[torch.nn.Parameter, str]
    _reduction: GradientReduction | None

    def _begin(
        self,
        reduction: GradientReduction | None,
        parameters: Iterable[torch.nn.Parameter],
        backward_passes_per_step: int,
    ) -> None:
        self._reduction = reduction
        self._synchronized = False
        self._should_synchronize = True
        self._count_passes(parameters, backward_passes_per_step)
        if reduction is not None:
            self._hook_gradients()

    def _take(self, parameter: torch.nn.Parameter) -> None:
        assert self._reduction is not None
        self._reduction.mark_ready(parameter)

    def _forget(self) -> None:
        if self._reduction is not None:
            self._reduction.forget()
        self._synchronized = False

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, starting those that no backward pass has completed.

        Raises:
            ValueError: if the process set is of an earlier world, also on ranks that reduce nothing.
        """
        self.process_set._check_world("DistributedOptimizer")
        if self._reduction is not None:
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
