"""Collectives with gradients: sums, splits and gathers along a dimension, over the ranks of a group.

Where there are two variants, the right one depends on the gradient that each rank has: the whole gradient, or a share
of it, where the gradient is the sum of the shares. Source: M. Shoeybi et al., "Megatron-LM" (2019), for these pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import plain_parts

if TYPE_CHECKING:
    from collections.abc import Callable

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch's functions under the names that they have from 2.13 on, where the earlier names warn."""


@torch.no_grad()
def begin_equal(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the parameters and buffers of its first rank, except those on the meta device.

    Collective.
    """
    for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
        for part in [] if tensor.is_meta else plain_parts(tensor):
            if not part.numel():
                continue
            values = part.to("cuda" if dist.get_backend(group) == "nccl" else part.device).contiguous()
            # As bytes, because transports do not know all dtypes.
            dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
            if values.data_ptr() != part.data_ptr():
                part.copy_(values)


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call ``function.apply``, which torch leaves untyped."""
    output: Tensor = cast("Any", function).apply(*args)
    return output


def sum_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor itself; its gradient is summed over the ranks."""
    return apply(Paired, tensor, _same, _sum_ranks, group)


def sum_of_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a tensor over the ranks, in place; each rank has the whole gradient."""
    return apply(_SumOfRanks, tensor, group)


def split(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's part of a tensor along a dimension; gradients are gathered."""
    return apply(Paired, tensor, _part, _gather_parts, group, dim)


def gather(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The parts of all ranks, joined along a dimension; each rank has the whole gradient and keeps its part of it."""
    return apply(Paired, tensor, _gather_parts, _part, group, dim)


def gather_and_reduce_gradient(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The parts of all ranks, joined along a dimension.

    Each rank has a share of the gradient: the shares are summed, and each rank gets its part of the sum.
    """
    return apply(Paired, tensor, _gather_parts, _scatter_sum, group, dim)


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's part, along a dimension, of the sum over the ranks; gradients are gathered."""
    return apply(Paired, tensor, _scatter_sum, _gather_parts, group, dim)


class Paired(torch.autograd.Function):
    """A function of a tensor, a group and further arguments, whose gradient another function computes from the same."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        function: Callable[..., Tensor],
        of_gradient: Callable[..., Tensor],
        *others: Any,
    ) -> Tensor:
        """Return ``function(tensor, *others)``."""
        ctx.of_gradient, ctx.others = of_gradient, others
        return function(tensor, *others)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return ``of_gradient(gradient, *others)``, and nothing for the other arguments."""
        return ctx.of_gradient(gradients[0], *ctx.others), *[None] * (2 + len(ctx.others))


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _same(tensor: Tensor, _: dist.ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def _sum_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    tensor = tensor.contiguous().clone()
    dist.all_reduce(tensor, group=group)
    return tensor


def _check_divides(tensor: Tensor, size: int, dim: int) -> None:
    if tensor.shape[dim] % size:
        raise ParamError(
            f"{size} tensor-parallel ranks cannot divide a tensor of shape {tuple(tensor.shape)} along dimension "
            f"{dim}. Use a length that is a multiple of {size}."
        )


def _part(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    size = dist.get_world_size(group)
    _check_divides(tensor, size, dim)
    return tensor.chunk(size, dim)[dist.get_rank(group)].contiguous()


def _gather_parts(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    size = dist.get_world_size(group)
    moved = tensor.movedim(dim, 0).contiguous()
    gathered = moved.new_empty((size * moved.shape[0], *moved.shape[1:]))
    all_gather_single(gathered, moved, group=group)
    return gathered.movedim(0, dim)


def _scatter_sum(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    size = dist.get_world_size(group)
    _check_divides(tensor, size, dim)
    moved = tensor.movedim(dim, 0).contiguous()
    part = moved.new_empty((moved.shape[0] // size, *moved.shape[1:]))
    reduce_scatter_single(part, moved, group=group)
    return part.movedim(0, dim)
