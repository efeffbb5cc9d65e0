"""Making the parameters of a model alike on all ranks. Runs on the *rank*."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sparkdl.horovod.torch.handles import synchronize
from sparkdl.horovod.torch.operations.broadcast import broadcast_async_
from sparkdl.horovod.torch.operations.target import refuse_subclasses


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors by the root's, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``, as a dict or iterable.
            Values that are no tensors are left alone.
        root_rank: the rank whose values all take.

    Raises:
        ValueError: if ``params`` is nothing of the kind, or has DTensors.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    # Before any of them is on its way.
    refuse_subclasses(tensor for _, tensor in named if isinstance(tensor, torch.Tensor))
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name)
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)
