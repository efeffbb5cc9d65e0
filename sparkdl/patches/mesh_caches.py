"""Removal of the device meshes that torch keeps in DTensor's caches beyond the end of their process groups.

DTensor caches the sharding of the result of each operation, including the mesh of the result. It treats two meshes as
equal if they have the same ranks and dimension names. A mesh finds its process groups by names that torch numbers from
zero again in each default group. After ``destroy_process_group``, the result of an operation on a new mesh would
therefore be on an equal, cached mesh, whose group names are unknown or belong to other groups.

Upstream: none at torch; others clear the same caches, as in https://github.com/NVIDIA/Megatron-LM/pull/7029. Versions:
all up to torch 2.13, which have different caches. It can go when torch forgets meshes with their process groups, or
tells meshes of different groups apart.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)


def forget_meshes(device_type: str = "cpu") -> None:
    """Remove all meshes from DTensor's caches, so that later operations keep the mesh of their arguments.

    Each thread has caches of its own. Those of this thread are cleared and, for ``"cuda"``, also those of the thread of
    the backward pass on the current GPU. torch offers no public function for this. Afterwards, DTensor decides again
    how to divide each operation.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return  # no operation on a DTensor has filled the caches
    _clear()
    if device_type == "cuda":
        forget_in_backward(device_type)


def forget_in_backward(device_type: str) -> None:
    """Clear DTensor's caches in the thread that computes backward passes on the current device of this type."""
    _ClearInBackward.apply(torch.zeros((), device=device_type, requires_grad=True)).backward()


def _clear() -> None:
    from torch.distributed.tensor import _redistribute, debug

    functions = [
        getattr(place, name)
        for place, name in (
            (debug, "_clear_sharding_prop_cache"),
            (debug, "_clear_python_sharding_prop_cache"),
            (_redistribute, "clear_redistribute_planner_cache"),
        )
        if hasattr(place, name)  # releases of torch have some of these
    ]
    if not functions:
        logger.warning(
            "torch %s offers no function that clears DTensor's caches. If this process lays out its ranks again after "
            "destroy_process_group(), operations may fail with a process group that does not exist.",
            torch.__version__,
        )
    for function in functions:
        function()


class _ClearInBackward(torch.autograd.Function):
    """The identity; its backward pass clears the caches of the thread that computes it."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    @once_differentiable
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        _clear()
        return gradient
