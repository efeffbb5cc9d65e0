"""Broadcast and allgather of Python objects, and broadcast of parameters and optimizer states.

The module has Horovod's name. Its functions give all ranks the same state before training. Objects are sent pickled,
between ranks that have proved that they know the job's secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from sparkdl.horovod.torch.basics import rank
from sparkdl.horovod.torch.handles import synchronize
from sparkdl.horovod.torch.operations.allgather import allgather
from sparkdl.horovod.torch.operations.broadcast import broadcast_, broadcast_async_
from sparkdl.horovod.torch.operations.target import refuse_subclasses
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object, of any kind that cloudpickle can carry; on the root the very object.

    Args:
        obj: what the root gives; without meaning on the other ranks.
        root_rank: the rank that gives.
        name: by which the ranks match it.
        process_set: the ranks that take part.
    """
    pickled = _as_tensor(obj) if rank() == root_rank else torch.empty(0, dtype=torch.uint8)
    name = name or "broadcast_object"
    num_bytes = broadcast_(torch.tensor([pickled.numel()]), root_rank, f"{name}.sz", process_set)
    if rank() != root_rank:
        pickled = torch.empty(int(num_bytes), dtype=torch.uint8)
    broadcast_(pickled, root_rank, f"{name}.t", process_set)
    return obj if rank() == root_rank else cloudpickle.loads(pickled.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in order of ranks; they may differ in kind and size."""
    pickled = _as_tensor(obj)
    name = name or "allgather_object"
    sizes = allgather(torch.tensor([pickled.numel()]), f"{name}.sz", process_set).tolist()
    parts = allgather(pickled, f"{name}.t", process_set).split(sizes)
    return [cloudpickle.loads(part.numpy().tobytes()) for part in parts]


def _as_tensor(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors by the root's, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``, as a dict or iterable.
            Values that are no tensors are left alone.
        root_rank: the rank whose values all take.

    Raises:
        ValueError: if ``params`` is nothing of the kind, or has DTensors, sparse tensors or tensors without values.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    # Before any of them is on its way.
    refuse_subclasses(tensor for _, tensor in named if isinstance(tensor, torch.Tensor))
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or tensor.layout != torch.strided):
            found = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            raise ValueError(
                f"{name or 'A tensor'} is {found}, and only dense tensors with values can be broadcast."
            )
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name)
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


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


__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
