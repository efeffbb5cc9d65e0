"""How Horovod's asynchronous collectives are handed to the communicator.

Runs on the *rank*, on CPU tensors. Every function returns at once, except that an allgather first tells the ranks
each other's shapes. ``name`` is taken for the sake of programs that give one; ranks are matched by the order of
submission.
"""

from __future__ import annotations

import torch

from sparkdl.errors import ParamError
from sparkdl.horovod.torch.pending import Pending
from sparkdl.horovod.torch.process import communicator
from sparkdl.horovod.torch.reduce_ops import choose, name_of
from sparkdl.torch.buffers import as_bytes, is_flat, restore, widen

_MAX_DIMENSIONS = 8


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Start :func:`sparkdl.horovod.torch.allreduce`; the handle gives a new tensor."""
    output = tensor.detach().clone(memory_format=torch.contiguous_format)
    return allreduce_async_(output, average, name, op, prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,  # noqa: ARG001
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Start :func:`sparkdl.horovod.torch.allreduce_`; the handle gives the same tensor, reduced."""
    op_name = name_of(choose(op, average))
    _check_device(tensor)
    if tensor.numel() == 0:
        return Pending(tensor, [])
    buffer = widen(tensor, op_name)
    _scale(buffer, prescale_factor)
    handle = communicator().allreduce_async(buffer, op=op_name)

    def finish() -> torch.Tensor:
        _scale(buffer, postscale_factor)
        restore(buffer, tensor)
        return tensor

    return Pending(tensor, [handle], finish)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Pending:
    """Start :func:`sparkdl.horovod.torch.broadcast`; the handle gives a new tensor."""
    return broadcast_async_(tensor.detach().clone(memory_format=torch.contiguous_format), root_rank, name)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,  # noqa: ARG001
) -> Pending:
    """Start :func:`sparkdl.horovod.torch.broadcast_`; the handle gives the same tensor, overwritten."""
    world = communicator()
    if not 0 <= root_rank < world.world_size:
        raise ParamError(f"root_rank={root_rank} is outside a world of {world.world_size} ranks.")
    _check_device(tensor)
    if tensor.numel() == 0:
        return Pending(tensor, [])
    buffer = tensor if is_flat(tensor) else tensor.detach().clone(memory_format=torch.contiguous_format)
    handle = world.broadcast_async(as_bytes(buffer), root=root_rank)

    def finish() -> torch.Tensor:
        if buffer is not tensor:
            tensor.detach().copy_(buffer)
        return tensor

    return Pending(tensor, [handle], finish)


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Pending:  # noqa: ARG001
    """Start :func:`sparkdl.horovod.torch.allgather`; the handle gives a new tensor."""
    world = communicator()
    _check_device(tensor)
    shapes = _exchange_shapes(tensor)
    num_rows = [shape[0] for shape in shapes]
    output = tensor.new_empty((sum(num_rows), *tensor.shape[1:]), requires_grad=False)
    if output.numel() == 0:
        return Pending(output, [])
    padded = tensor.new_empty((max(num_rows), *tensor.shape[1:]), requires_grad=False)
    padded[: tensor.shape[0]].copy_(tensor.detach())
    rows = tensor.new_empty((world.world_size, *padded.shape), requires_grad=False)
    handle = world.allgather_async(as_bytes(padded), as_bytes(rows))

    def finish() -> torch.Tensor:
        parts = [part[:count] for part, count in zip(rows, num_rows, strict=True)]
        return torch.cat(parts, out=output)

    return Pending(output, [handle], finish)


def barrier() -> None:
    """Return once every rank has arrived."""
    communicator().barrier()


def _exchange_shapes(tensor: torch.Tensor) -> list[list[int]]:
    """The shape of every rank's tensor; raises the same error on all ranks if they cannot be joined along rows."""
    world = communicator()
    if not 1 <= tensor.dim() <= _MAX_DIMENSIONS:
        raise ParamError(f"allgather takes tensors of 1 to {_MAX_DIMENSIONS} dimensions, got {tensor.dim()}.")
    own = torch.zeros(2 + _MAX_DIMENSIONS, dtype=torch.int64)
    own[0], own[1] = tensor.element_size(), tensor.dim()
    own[2 : 2 + tensor.dim()] = torch.tensor(tensor.shape)
    everyone = torch.empty((world.world_size, own.numel()), dtype=torch.int64)
    world.allgather(own, everyone)
    shapes = [row[2 : 2 + int(row[1])].tolist() for row in everyone]
    if len({(int(row[0]), *shape[1:]) for row, shape in zip(everyone, shapes, strict=True)}) > 1:
        said = ", ".join(
            f"rank {rank}: {tuple(shape)} of {int(row[0])}-byte elements"
            for rank, (row, shape) in enumerate(zip(everyone, shapes, strict=True))
        )
        raise ParamError(
            f"allgather needs tensors of one dtype that differ in the first dimension alone ({said})."
        )
    return shapes


def _scale(buffer: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if buffer.dtype.is_floating_point:
        buffer.mul_(factor)
    else:
        buffer.copy_(buffer.double().mul_(factor))


def _check_device(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ParamError(
            f"hvd takes CPU tensors, got one on {tensor.device}. Move it to the CPU, or train with "
            "DistributedDataParallel over sparkdl.torch, which uses NCCL."
        )
