"""Horovod's collectives that wait: in place, or giving a new tensor through which gradients flow.

Runs on the *rank*, on CPU tensors. The asynchronous forms are in :mod:`sparkdl.horovod.torch.submission`.
"""

from __future__ import annotations

from typing import Any

import torch

from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.pending import poll, synchronize
from sparkdl.horovod.torch.process import communicator
from sparkdl.horovod.torch.reduce_ops import Sum, choose
from sparkdl.horovod.torch.submission import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast_async,
    broadcast_async_,
)

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "poll",
    "synchronize",
]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over the ranks; the argument keeps its values. The gradient is reduced in the same way.

    Args:
        tensor: of the same shape and dtype on every rank.
        average: deprecated by Horovod; use ``op``.
        name: without effect.
        compression: what travels instead of the tensor.
        op: ``Average``, the default, ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        A new tensor of the same shape and dtype.
    """
    compressed, ctx = compression.compress(tensor)
    reduced = _Allreduce.apply(compressed, name, choose(op, average), prescale_factor, postscale_factor)
    return compression.decompress(reduced, ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over the ranks in place and return it; see :func:`allreduce`."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Join the ranks' tensors along the first dimension, in which alone they may differ. Gradients flow.

    Returns:
        A new tensor of shape ``(sum of first dimensions, *rest)``.

    Raises:
        ParamError: on every rank, if the tensors do not fit together; it says what each rank has.
    """
    return _Allgather.apply(tensor, name)  # type: ignore[no-any-return]


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The root's tensor, as a new tensor; the argument keeps its values. Gradients flow to the root."""
    return _Broadcast.apply(tensor, root_rank, name)  # type: ignore[no-any-return]


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite a tensor by the root's and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, prescale: float, postscale: float
    ) -> torch.Tensor:
        ctx.op, ctx.prescale, ctx.postscale = op, prescale, postscale
        return synchronize(allreduce_async(tensor, None, name, op, prescale, postscale))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        handle = allreduce_async(grads[0], None, None, ctx.op, ctx.prescale, ctx.postscale)
        return synchronize(handle), None, None, None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        num_rows = synchronize(allgather_async(torch.tensor([tensor.shape[0]] if tensor.dim() else [0])))
        ctx.start = int(num_rows[: communicator().rank].sum())
        ctx.num_rows = tensor.shape[0] if tensor.dim() else 0
        return synchronize(allgather_async(tensor, name))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = synchronize(allreduce_async(grads[0], op=Sum))
        return grad.narrow(0, ctx.start, ctx.num_rows), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        return synchronize(broadcast_async(tensor, root_rank, name))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = synchronize(allreduce_async(grads[0], op=Sum))
        return (grad if communicator().rank == ctx.root_rank else torch.zeros_like(grad)), None, None
