"""``hvd.allgather`` and ``hvd.grouped_allgather``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Request
from sparkdl.horovod.torch.handles import run_later, run_now
from sparkdl.horovod.torch.operations.grouped_allreduce import grouped_allreduce
from sparkdl.horovod.torch.operations.target import check_tensors, find_target
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
from sparkdl.horovod.torch.reduce_ops import Average
from sparkdl.horovod.torch.requests.allgather import GroupedAllgatherRequest, SingleAllgatherRequest


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Join the ranks' tensors along the first dimension, in which alone they may differ.

    The gradient is the average, over the ranks, of what they have for this rank's rows, as in Horovod.

    Args:
        tensor: of at least one dimension.
        name: by which the ranks match it; numbered in the order of submission if None.
        process_set: the ranks that take part.

    Returns:
        A new tensor of shape ``(sum of first dimensions, *rest)``.

    Raises:
        HorovodInternalError: on all ranks, if the tensors do not fit together, or a rank has joined.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        gathered: torch.Tensor = _Allgather.apply(name, process_set, tensor)[0]
        return gathered
    return run_now(*_request(tensor, name, process_set))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`allgather`, without gradients; ``synchronize`` gives the new tensor."""
    return run_later(*_request(tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """:func:`allgather` of several tensors as one operation."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        gathered: tuple[torch.Tensor, ...] = _Allgather.apply(name, process_set, *tensors)
        return gathered
    return run_now(*_grouped_request(tensors, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather`, without gradients; ``synchronize`` gives a tuple of new tensors."""
    return run_later(*_grouped_request(tensors, name, process_set))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.num_rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        ctx.process_set = process_set
        if len(tensors) == 1:
            return (run_now(*_request(tensors[0], name, process_set)),)
        return run_now(*_grouped_request(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        averages = grouped_allreduce(grads, op=Average, process_set=ctx.process_set)
        rows_of_ranks = allgather(torch.tensor([ctx.num_rows]), process_set=ctx.process_set)
        starts = rows_of_ranks[: ctx.process_set.rank()].sum(0).tolist()
        own = [
            average.narrow(0, start, num_rows)
            for average, start, num_rows in zip(averages, starts, ctx.num_rows, strict=True)
        ]
        return None, None, *own


def _request(
    tensor: torch.Tensor, name: str | None, process_set: ProcessSet
) -> tuple[Engine, Request[torch.Tensor]]:
    check_tensors([tensor])
    engine, full_name = find_target(process_set, "Allgather", name)
    return engine, SingleAllgatherRequest(full_name, [tensor])


def _grouped_request(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet
) -> tuple[Engine, Request[tuple[torch.Tensor, ...]]]:
    check_tensors(tensors)
    engine, full_name = find_target(process_set, "Grouped_allgather", name)
    return engine, GroupedAllgatherRequest(full_name, list(tensors))
