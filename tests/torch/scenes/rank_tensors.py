"""Tensors whose values on every rank are known to all ranks. Used on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.int16,
)


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def tensor_of(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    """Small whole numbers that are exact in every dtype, also when summed over four ranks."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def everyones(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    return torch.stack([tensor_of(rank, dtype, shape) for rank in range(dist.get_world_size())])
