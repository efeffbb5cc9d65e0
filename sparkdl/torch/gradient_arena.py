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
        elements: all of them, flat.
        gradients: a view of ``elements`` for each parameter, of its shape.
    """

    elements: Tensor
    gradients: dict[nn.Parameter, Tensor]


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
    sizes = [-(-parameter.numel() // unit) * unit for parameter in parameters]
    memory = communicator.allocate(sum(sizes) * dtype.itemsize)
    elements = torch.from_numpy(memory).view(dtype) if memory.size else torch.empty(0, dtype=dtype)
    buckets: list[Bucket] = []
    begin = end = 0
    gradients: dict[nn.Parameter, Tensor] = {}
    for parameter, size in zip(parameters, sizes, strict=True):
        gradients[parameter] = elements[end : end + parameter.numel()].view(parameter.shape)
        end += size
        if (end - begin) * dtype.itemsize >= bucket_bytes:
            buckets.append(Bucket(elements[begin:end], gradients))
            begin, gradients = end, {}
    if gradients:
        buckets.append(Bucket(elements[begin:end], gradients))
    return buckets
