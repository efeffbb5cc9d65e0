"""Comparison of tensors between ranks: rows that they share, and values that may differ by rounding.

Ranks exchange a sketch of a tensor, 64 numbers in place of all elements. The distance between two sketches estimates
the distance between the tensors, also if the same rows come in another order. Replicas, which must be equal to the bit,
have :func:`sparkdl.torch.replicas.digest`, which cannot tell rounding from other values. Source: M. Charikar, K. Chen
and M. Farach-Colton, "Finding Frequent Items in Data Streams" (2002).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.torch.averaging import device_of_counts
from sparkdl.torch.buffers import local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

_BUCKETS = 64
_ELEMENTS_AT_ONCE = 1 << 22
"""Elements that are hashed together, a multiple of the numbers of a sketch: whole tensors would need several copies."""

_INPUTS = 1e-3
GRADIENTS = 10.0
"""Factors of the rounding that is allowed: more for gradients, which ranks sum up, than for inputs, which they read."""

MOST_ROUNDING = 0.01
MOST_ROUNDING_OF_16_BITS = 0.1
"""Largest difference between two computations of the same outputs, as a share of the largest output; bfloat16 has 8
bits of mantissa."""


def sketch(tensor: Tensor, slack: float = 1.0) -> Tensor:
    """Return the sketch of a tensor and the distance that rounding may cause, as 65 numbers of float64.

    Different kinds of processors may round differently; integers have to be equal. Sketches can be added up.

    Args:
        tensor: this rank's values.
        slack: factor of the distance that rounding may cause, which is 1 percent of the tensor's 2-norm, or 5 percent
            for dtypes of 16 bits and less.
    """
    tensor = local_part(tensor.detach())
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    is_wide = tensor.dtype in (torch.float32, torch.float64)
    sums, squares = torch.zeros((2, _BUCKETS), dtype=torch.float64, device=tensor.device)
    flat = tensor.flatten()
    for first in range(0, len(flat), _ELEMENTS_AT_ONCE):
        piece = flat[first : first + _ELEMENTS_AT_ONCE]
        values = piece if is_wide else piece.double()
        values = values.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)  # masks hold infinities
        signed = values * _signs(values, first)
        rows = nn.functional.pad(signed, (0, -len(signed) % _BUCKETS)).view(-1, _BUCKETS)
        sums += rows.sum(0, dtype=torch.float64)
        squares += torch.linalg.vector_norm(rows, dim=0, dtype=torch.float64) ** 2
    rounding = slack * (0.01 if is_wide else 0.05) if tensor.is_floating_point() else 0.0
    return torch.cat([sums, rounding * squares.sum().sqrt().view(1)])


def _signs(values: Tensor, first: int) -> Tensor:
    """1 or -1 for each element, as a hash of its number says; ``first`` is the number of the first one."""
    numbers = torch.arange(first, first + len(values), device=values.device)
    for factor in (0x45D9F3B, 0x119DE1F3):
        numbers = (numbers ^ (numbers >> 16)) * factor & 0xFFFFFFFF
    return ((numbers >> 15 & 1) * 2 - 1).to(values.dtype)


def differing(sketches: Sequence[Tensor | None], group: dist.ProcessGroup) -> list[bool]:
    """Whether each of several tensors differs between ranks, by their sketches. Collective.

    Args:
        sketches: results of :func:`sketch`; None for a tensor that this rank does not have.
        group: process group of the ranks.
    """
    if not sketches:
        return []
    absent = torch.full((_BUCKETS + 1,), -torch.inf, dtype=torch.float64)
    device = device_of_counts(next((row.device for row in sketches if row is not None), None), group)
    rows = torch.stack([(absent if row is None else row).to(device) for row in sketches])
    sums, allowed = rows[:, :-1], rows[:, -1:]
    extremes = torch.cat([sums, torch.where(sums == -torch.inf, sums, -sums), allowed], 1)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes[:, :_BUCKETS], extremes[:, _BUCKETS:-1]
    distance = torch.linalg.vector_norm((highest + lowest).clamp(min=0.0), dim=1)
    differs: list[bool] = (distance > extremes[:, -1].clamp(min=0.0)).tolist()
    return differs


def check_rows(dimension: str, lists: Sequence[Sequence[Any]], group: dist.ProcessGroup) -> None:
    """Check that the ranks of a group have the same rows. Collective.

    Args:
        dimension: kind of parallelism of the group.
        lists: lists of what a step takes, whose tensors are compared; a list without tensors counts as one that this
            rank was not given.
        group: process group of the ranks that work on the same rows.

    Raises:
        ParamError: on all ranks, if a list differs between two ranks that have it.
    """
    if dist.get_world_size(group) == 1:
        return
    sketches = []
    for values in lists:
        tensors = [value for value in values if isinstance(value, Tensor) and not value.is_meta]
        # The factors tell two tensors from the same two in another order.
        parts = [sketch(tensor, _INPUTS) * (number + 1) for number, tensor in enumerate(tensors)]
        sketches.append(torch.stack(parts).sum(0) if parts else None)
    if any(differing(sketches, group)):
        raise ParamError(
            f"The {dimension}-parallel ranks of a group gave different inputs to the model, so that gradients would be "
            "wrong. Ranks along tensor, context and pipeline need the same rows in the same order: have each of them "
            "read the share of layout.row_reader, (index, number of shares), shuffled with the same seed."
        )
