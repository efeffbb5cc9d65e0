"""Averages of gradients that no wrapper of a module averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sparkdl.torch.buffers import local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def device_of_counts(device: torch.device | None, group: dist.ProcessGroup) -> torch.device:
    """The CPU if the group takes its tensors: reading counts from a GPU would wait for all that it has to do."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    return device if device is not None and device.type == "cuda" else torch.device("cuda")


def average_gradients_of(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients over the ranks of a group, in place. Collective.

    Args:
        parameters: at least one parameter, in the same order on all ranks of the group; those without a gradient on any
            of them are skipped, and a missing gradient counts as zero.
        group: process group of the ranks that train on different rows.
    """
    has_gradient = torch.tensor(
        [parameter.grad is not None for parameter in parameters],
        dtype=torch.uint8,
        device=device_of_counts(parameters[0].device, group),
    )
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    for parameter, is_there in zip(parameters, has_gradient.tolist(), strict=True):
        if is_there and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):  # the same order on all ranks
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)
        parts = torch.split(flat, [gradient.numel() for gradient in alike])
        for gradient, part in zip(alike, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
