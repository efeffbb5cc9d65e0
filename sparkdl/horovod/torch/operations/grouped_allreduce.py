"""``hvd.grouped_allreduce`` in its four forms: several tensors as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Request
from sparkdl.horovod.torch.handles import run_later, run_now
from sparkdl.horovod.torch.operations.adasum import check_adasum
from sparkdl.horovod.torch.operations.target import check_outputs, check_reducible, find_target, new_output
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
from sparkdl.horovod.torch.reduce_ops import Adasum, choose
from sparkdl.horovod.torch.requests.adasum import GroupedAdasumRequest
from sparkdl.horovod.torch.requests.allreduce import GroupedAllreduceRequest


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce tensors over the ranks; see :func:`~sparkdl.horovod.torch.allreduce`. Gradients are reduced so too.

    Args:
        tensors: of the same shapes and dtypes on every rank.
        average: deprecated by Horovod; use ``op``.
        name: by which the ranks match the group.
        compression: what travels instead of a tensor.
        op: as for one tensor.
        prescale_factor: multiplies the tensors before the reduction.
        postscale_factor: multiplies the results.
        process_set: the ranks that take part.

    Returns:
        New tensors of the same shapes and dtypes.
    """
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sent):
        reduced = _GroupedAllreduce.apply(name, options, *sent)
    else:
        reduced = run_now(*_request(sent, [new_output(tensor) for tensor in sent], name, *options))
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce tensors over the ranks in place and return them; see :func:`grouped_allreduce`."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    return run_now(*_request(tensors, tensors, name, *options))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce`, without gradients; ``synchronize`` gives a tuple of new tensors."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    return run_later(*_request(tensors, [new_output(tensor) for tensor in tensors], name, *options))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce_`; ``synchronize`` gives a tuple of the same tensors, reduced."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    return run_later(*_request(tensors, tensors, name, *options))


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.options = options
        return run_now(*_request(tensors, [new_output(tensor) for tensor in tensors], name, *options))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.options
        reduced = grouped_allreduce(
            grads,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return None, None, *reduced


def _request(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> tuple[Engine, Request[tuple[torch.Tensor, ...]]]:
    tensors, outputs = list(tensors), list(outputs)
    if op == Adasum:
        check_adasum(tensors, process_set)
        check_outputs(outputs)
        engine, full_name = find_target(process_set, "Grouped_allreduce", name)
        return engine, GroupedAdasumRequest(
            full_name, tensors, outputs, prescale=prescale, postscale=postscale
        )
    check_reducible(tensors, op)
    check_outputs(outputs)
    engine, full_name = find_target(process_set, "Grouped_allreduce", name)
    return engine, GroupedAllreduceRequest(
        full_name, tensors, outputs, op=op, prescale=prescale, postscale=postscale
    )
