"""Making the state of optimizers alike on all ranks. Runs on the *rank*."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.horovod.torch.basics import rank
from sparkdl.horovod.torch.objects import broadcast_object
from sparkdl.horovod.torch.operations.target import refuse_subclasses
from sparkdl.horovod.torch.parameter_values import broadcast_parameters


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the root's optimizer state: options of the parameter groups, and state per parameter.

    Also ranks whose optimizer has no state yet, such as when the root alone read a checkpoint. There, parameters
    without a gradient get one of zeros, as in Horovod. Where the root has no state, the others have none either
    afterwards; Horovod would make it.

    Args:
        optimizer: alike on all ranks but for its values.
        root_rank: the rank whose state all take.
        model: without effect; Horovod needs it where gradients are sparse.

    Raises:
        ValueError: if the optimizer is ``torch.optim.LBFGS``, as in Horovod, or its parameters are DTensors.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    refuse_subclasses(parameter for group in optimizer.param_groups for parameter in group["params"])
    own = optimizer.state_dict()
    if not own["state"]:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    tensors: list[torch.Tensor] = []
    outline = broadcast_object(_take_out_tensors(own, tensors) if rank() == root_rank else None, root_rank)
    if rank() != root_rank:
        tensors = []
        own = _put_in_tensors(outline, tensors)
    broadcast_parameters(tensors, root_rank)
    if rank() != root_rank:
        with kept_containers(optimizer):
            optimizer.load_state_dict(own)


@contextmanager
def kept_containers(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer load state into the containers that it has.

    ``load_state_dict`` puts new ones in their place. A scheduler that acts on the optimizer which
    ``DistributedOptimizer`` wrapped, or on the wrapped one, would then change options that the other does not have.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    optimizer.param_groups = groups
    if optimizer.state is not state:
        state.clear()
        state.update(optimizer.state)
        optimizer.state = state


class _TensorOutline:
    """Stands for a tensor whose values travel by themselves."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _take_out_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Copy nested dicts, lists and tuples with outlines in place of tensors; the tensors go to the list, in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TensorOutline(value)
    return _map_nested(value, lambda entry: _take_out_tensors(entry, tensors))


def _put_in_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Undo :func:`_take_out_tensors` with new tensors, whose values are still to come."""
    if isinstance(value, _TensorOutline):
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]
    return _map_nested(value, lambda entry: _put_in_tensors(entry, tensors))


def _map_nested(value: Any, function: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(function(entry) for entry in value)
    return value
