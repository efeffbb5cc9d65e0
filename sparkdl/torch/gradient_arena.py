"""Where the gradients of a module lie: in memory that collectives reduce without copies, divided into buckets.

Runs on the *rank*, for parameters on the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from sparkdl.collective import Communicator

_ALIGNMENT_BYTES = 64
"""Gradients begin at cache lines, so that no two ranks write the same one."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that are reduced as one.

    Attributes:
        elements: all of them, flat, and behind them ``presence``.
        gradients: a view of ``elements`` for each parameter, of its shape.
        presence: a view of ``elements`` with one for each parameter: what is averaged of ones for ranks that have the
            gradient, and zeros for ranks that have none, tells whether any has it, without a collective of its own.
    """

    elements: Tensor
    gradients: dict[nn.Parameter, Tensor]
    presence: Tensor


def make_buckets(
    parameters: Iterable[nn.Parameter], communicator: Communicator, *, bucket_bytes: int
) -> list[Bucket]:
    """Lay out a gradient for each parameter, in reverse order, which is about that of the backward pass.

    All ranks call this with parameters of the same shapes and dtypes.

    Raises:
        ParamError: if a parameter is not on the CPU.
        CommunicatorError: if the memory cannot be had.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in reversed(list(parameters)):
        if parameter.device.type != "cpu":
            raise ParamError(
                f"gradients on {parameter.device} cannot lie in shared memory; they must be on the CPU"
            )
        by_dtype[parameter.dtype].append(parameter)
    return [
        bucket
        for dtype, members in by_dtype.items()
        for bucket in _lay_out(members, dtype, communicator, bucket_bytes)
    ]


def _lay_out(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype, communicator: Communicator, bucket_bytes: int
) -> list[Bucket]:
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    groups: list[list[nn.Parameter]] = [[]]
    num_bytes = 0
    for parameter in parameters:
        if num_bytes >= bucket_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(parameter)
        num_bytes += _aligned(parameter.numel(), unit) * dtype.itemsize
    sizes = [
        sum(_aligned(parameter.numel(), unit) for parameter in group) + _aligned(len(group), unit)
        for group in groups
    ]
    memory = communicator.allocate(sum(sizes) * dtype.itemsize)
    elements = torch.from_numpy(memory).view(dtype)
    buckets: list[Bucket] = []
    for group, part in zip(groups, elements.split(sizes), strict=True):
        end = 0
        gradients: dict[nn.Parameter, Tensor] = {}
        for parameter in group:
            gradients[parameter] = part[end : end + parameter.numel()].view(parameter.shape)
            end += _aligned(parameter.numel(), unit)
        buckets.append(Bucket(part, gradients, part[end : end + len(group)]))
    return buckets


def _aligned(count: int, unit: int) -> int:
    return -(-count // unit) * unit
