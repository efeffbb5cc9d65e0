"""The allreduces of one step's gradients: started while the backward pass runs, finished before the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparkdl.horovod.torch.compression import Compressor
from sparkdl.horovod.torch.handles import synchronize
from sparkdl.horovod.torch.names import Average, Sum
from sparkdl.horovod.torch.operations.allgather import sparse_allreduce_async
from sparkdl.horovod.torch.operations.allreduce import (
    allreduce,
    allreduce_async_,
    grouped_allreduce_async_,
)
from sparkdl.horovod.torch.process_sets import ProcessSet

Finish = Callable[[], None]
"""Waits for a reduction and stores its result as the gradient."""


class GradientReduction:
    """Reduces the gradients of parameters over a process set; ranks match them by the parameters' names.

    The backward passes of ranks may reach the parameters in different orders, and may leave some out.
    """

    def __init__(
        self,
        names: Mapping[torch.nn.Parameter, str],
        groups: Sequence[Sequence[torch.nn.Parameter]],
        *,
        compression: type[Compressor],
        op: int,
        predivide_factor: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """Describe the reduction.

        Args:
            names: name of every parameter.
            groups: groups of parameters whose gradients are reduced as one operation, the same on all ranks.
            compression: compressor for the gradients that are sent.
            op: number of the reduction.
            predivide_factor: divisor of gradients before the sum, if ``op`` is ``Average``; after it
                they are divided by the number of ranks over this factor.
            sparse_as_dense: whether to convert sparse gradients to dense ones before they are reduced.
            process_set: ranks that take part.
        """
        self._names = names
        self._groups = [tuple(group) for group in groups]
        self._group_of = {parameter: group for group in self._groups for parameter in group}
        self._compression = compression
        self._op = op
        self._scales = {}
        if op == Average:
            self._scales = {"prescale_factor": 1.0 / predivide_factor, "postscale_factor": predivide_factor}
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._ready: set[torch.nn.Parameter] = set()
        self._finishes: dict[tuple[torch.nn.Parameter, ...], Finish] = {}
        self._sparse: dict[torch.nn.Parameter, int] = {}
        """Number of sparse dimensions of the gradient, for parameters that have had sparse gradients."""

    def add(self, parameter: torch.nn.Parameter) -> None:
        """Reduce the gradient of one more parameter, which has a name, as an operation of its own."""
        group = (parameter,)
        self._groups.append(group)
        self._group_of[parameter] = group

    def reduce_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Reduce a loss like the gradients, so that all ranks decide by the same number."""
        op = self._op if self._op in (Average, Sum) else Average
        return allreduce(loss, name="allreduce.loss", op=op, process_set=self._process_set)

    def mark_ready(self, parameter: torch.nn.Parameter) -> None:
        """Record that a gradient is complete, and start the reduction of its group once that is complete."""
        self._ready.add(parameter)
        group = self._group_of[parameter]
        if self._ready.issuperset(group):
            self._finishes[group] = self._start(group)

    def finish(self) -> None:
        """Start the remaining reductions, with zeros for parameters without a gradient, and wait for all of them.

        Parameters that were frozen keep no gradient, so that the optimizer skips them as it does on one rank.
        """
        idle = [parameter for parameter in self._group_of if is_idle(parameter)]
        for group in self._groups:
            if group not in self._finishes and not all(map(is_idle, group)):
                self._finishes[group] = self._start(group)
        for finish in self._finishes.values():
            finish()
        for parameter in idle:
            parameter.grad = None
        self.forget()

    def forget(self) -> None:
        """Drop all reductions, to begin the next step."""
        self._finishes.clear()
        self._ready.clear()

    def _start(self, group: Sequence[torch.nn.Parameter]) -> Finish:
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = self._make_zeros(parameter)
        if self._sparse_as_dense:
            return self._start_dense(group)
        sparse = [parameter for parameter in group if _gradient(parameter).is_sparse]
        # Not by `parameter in sparse`, which would compare the values of tensors.
        dense = [parameter for parameter in group if not _gradient(parameter).is_sparse]
        finishes = [self._start_sparse(parameter) for parameter in sparse]
        if dense:
            finishes.append(self._start_dense(dense))

        def finish_all() -> None:
            for finish in finishes:
                finish()

        return finish_all

    def _make_zeros(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter not in self._sparse:
            return torch.zeros_like(parameter)
        num_sparse = self._sparse[parameter]
        return torch.sparse_coo_tensor(
            torch.zeros((num_sparse, 0), dtype=torch.int64),
            parameter.new_zeros((0, *parameter.shape[num_sparse:])),
            parameter.shape,
            device=parameter.device,
        )

    def _start_sparse(self, parameter: torch.nn.Parameter) -> Finish:
        assert parameter.grad is not None
        self._sparse[parameter] = parameter.grad.sparse_dim()
        wait = sparse_allreduce_async(parameter.grad, self._names[parameter], self._op, self._process_set)

        def finish() -> None:
            parameter.grad = wait()

        return finish

    def _start_dense(self, group: Sequence[torch.nn.Parameter]) -> Finish:
        gradients = [_gradient(parameter) for parameter in group]
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        compressed = [self._compression.compress(gradient) for gradient in dense]
        tensors = [tensor for tensor, _ in compressed]
        options: dict[str, Any] = {"op": self._op, "process_set": self._process_set, **self._scales}
        name = self._names[group[0]]
        if len(group) == 1:
            handle = allreduce_async_(tensors[0], name=name, **options)
        else:
            handle = grouped_allreduce_async_(tensors, name=name, **options)

        def finish() -> None:
            reduced = synchronize(handle)
            for parameter, gradient, output, (_, ctx) in zip(
                group, gradients, [reduced] if len(group) == 1 else reduced, compressed, strict=True
            ):
                parameter.grad = _like(gradient, self._compression.decompress(output, ctx))

        return finish


def is_idle(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is frozen and has no gradient."""
    return not parameter.requires_grad and parameter.grad is None


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _like(gradient: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
    """The reduced gradient in the layout that the optimizer expects; in the memory of ``gradient`` if that is dense."""
    if gradient.is_sparse:
        return reduced.to_sparse(gradient.sparse_dim())
    return gradient if reduced is gradient else gradient.copy_(reduced)
