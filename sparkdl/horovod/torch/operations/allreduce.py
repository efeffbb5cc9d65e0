"""``hvd.allreduce`` in its four forms."""

from __future__ import annotations

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
from sparkdl.horovod.torch.requests.adasum import SingleAdasumRequest
from sparkdl.horovod.torch.requests.allreduce import SingleAllreduceRequest


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks; the argument keeps its values. The gradient is reduced in the same way.

    Args:
        tensor: of the same shape and dtype on every rank.
        average: deprecated by Horovod; use ``op``.
        name: by which the ranks match it; numbered in the order of submission if None.
        compression: what travels instead of the tensor.
        op: ``Average``, the default, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        HorovodInternalError: on all ranks, if they disagree about the tensor, the operation or the factors.
        ValueError: if the tensor cannot be taken, or this rank is not in the process set.
    """
    compressed, ctx = compression.compress(tensor)
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    if compressed.requires_grad and torch.is_grad_enabled():
        reduced = _Allreduce.apply(compressed, name, *options)
    else:
        reduced = run_now(*_request(compressed, new_output(compressed), name, *options))
    return compression.decompress(reduced, ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks in place and return it; see :func:`allreduce`."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    return run_now(*_request(tensor, tensor, name, *options))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce`, without gradients; ``synchronize`` gives a new tensor."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    return run_later(*_request(tensor, new_output(tensor), name, *options))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce_`; ``synchronize`` gives the same tensor, reduced."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    return run_later(*_request(tensor, tensor, name, *options))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *options: Any) -> torch.Tensor:
        ctx.options = options
        reduced: torch.Tensor = run_now(*_request(tensor, new_output(tensor), name, *options))
        return reduced

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.options
        grad = allreduce(
            grads[0],
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return grad, None, None, None, None, None


def _request(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> tuple[Engine, Request[torch.Tensor]]:
    if op == Adasum:
        check_adasum([tensor], process_set)
        check_outputs([output])
        engine, full_name = find_target(process_set, "Allreduce", name)
        return engine, SingleAdasumRequest(
            full_name, [tensor], [output], prescale=prescale, postscale=postscale
        )
    check_reducible([tensor], op)
    check_outputs([output])
    engine, full_name = find_target(process_set, "Allreduce", name)
    return engine, SingleAllreduceRequest(
        full_name, [tensor], [output], op=op, prescale=prescale, postscale=postscale
    )
