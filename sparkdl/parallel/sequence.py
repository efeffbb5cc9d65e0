"""Division of a sequence's positions among the ranks of a context-parallel group; tensors are cut and joined by it.

A sequence is cut into ``2 N`` chunks for N ranks. Each rank has an early and a late one (:func:`chunks_of`), so that
causal attention is the same work for all ranks. Layers that work position by position (linear layers, norms, the loss)
need no change; position embeddings take :func:`positions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sparkdl.errors import ParamError
from sparkdl.parallel.verify.sequences import check_shared_rows

if TYPE_CHECKING:
    from collections.abc import Sequence


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The numbers of a rank's chunks, if ``size`` ranks share a sequence."""
    return rank, 2 * size - 1 - rank


def positions(length: int, group: dist.ProcessGroup, device: torch.device | None = None) -> Tensor:
    """The positions that this rank holds, in their order on the rank: ``int64``, ``(length / ranks,)``.

    Args:
        length: number of positions of the whole sequence.
        group: process group of the ranks that share the sequence.
        device: device of the result; torch's default device if None.

    Raises:
        ParamError: if the ranks cannot share a sequence of that length.
    """
    return part_of(torch.arange(length, device=device), 0, group)


def shard(tensor: Tensor, dim: int, group: dist.ProcessGroup, *, verify: bool | None = None) -> Tensor:
    """This rank's part of a tensor with whole sequences. Collective while the ranks compare their tensors.

    Args:
        tensor: tensor with whole sequences, the same on all ranks of the group.
        dim: dimension of positions.
        group: process group of the ranks that share the sequence.
        verify: whether the ranks compare their tensors in every call; False for never, None for the steps in which the
            model of :func:`~sparkdl.parallel.share_sequences` is verified, or for the first call without such a model.

    Raises:
        ParamError: if the ranks cannot share a sequence of that length, or on all ranks, if they have different
            tensors.
    """
    check_shared_rows(tensor, group, verify)
    return part_of(tensor, dim, group)


def part_of(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a tensor with whole sequences, without a comparison with other ranks.

    Raises:
        ParamError: if the length of sequences is not a multiple of twice the number of ranks.
    """
    size, length = dist.get_world_size(group), tensor.shape[dim]
    if length % (2 * size):
        lower = length - length % (2 * size)
        raise ParamError(
            f"A sequence of {length} positions cannot be shared by {size} context-parallel ranks: its length must be "
            f"a multiple of {2 * size}, for example {lower or 2 * size} or {lower + 2 * size}."
        )
    return _part(tensor.chunk(2 * size, dim), dist.get_rank(group), dim)


def unshard(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Join the parts of all ranks to whole sequences, without gradients; the inverse of :func:`shard`. Collective."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return from_chunks(torch.stack(parts), dim)


def from_chunks(parts: Tensor, dim: int) -> Tensor:
    """Join the parts of all ranks, ``(ranks, ...)``, to whole sequences along ``dim`` of a part."""
    size = parts.shape[0]
    if size == 1:
        return parts[0]
    early, late = parts.chunk(2, dim + 1)
    return torch.cat([*early.unbind(0), *late.flip(0).unbind(0)], dim)


def to_chunks(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Cut whole sequences into the parts of ``size`` ranks, ``(ranks, ...)``; the inverse of :func:`from_chunks`."""
    if size == 1:
        return tensor[None]
    chunks = tensor.chunk(2 * size, dim)
    return torch.stack([_part(chunks, rank, dim) for rank in range(size)])


def _part(chunks: Sequence[Tensor], rank: int, dim: int) -> Tensor:
    return torch.cat([chunks[number] for number in chunks_of(rank, len(chunks) // 2)], dim)
