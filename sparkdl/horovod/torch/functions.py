"""Broadcast and allgather of Python objects, and broadcast of parameters and optimizer states.

The module has Horovod's name. Its functions give all ranks the same state before training. Objects are pickled and sent
only between ranks that have proved that they know the job's secret.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from sparkdl.horovod.torch.basics import rank
from sparkdl.horovod.torch.handles import synchronize
from sparkdl.horovod.torch.operations.allgather import allgather
from sparkdl.horovod.torch.operations.broadcast import broadcast_, broadcast_async_
from sparkdl.horovod.torch.operations.preparation import refuse_subclasses
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
from sparkdl.torch.objects import pickle_for_others, put_in_tensors, take_out_tensors


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object, of any type that cloudpickle can pickle; the root gets its own object back.

    Args:
        obj: object to send on the root; ignored on the other ranks.
        root_rank: rank that sends, by its number among all ranks.
        name: name under which the ranks match the operation.
        process_set: ranks that take part.

    Raises:
        ParamError: on the root, if the object holds sharded DTensors.
        pickle.PicklingError: on the other ranks, if the root cannot pickle the object; on the root its own error.
    """
    pickled, failure = (
        _pickle(obj) if rank() == root_rank else (torch.empty(0, dtype=torch.uint8, device="cpu"), None)
    )
    name = name or "broadcast_object"
    size = torch.tensor([pickled.numel() if failure is None else -pickled.numel()], device="cpu")
    size = broadcast_(size, root_rank, f"{name}.sz", process_set)
    if rank() != root_rank:
        pickled = torch.empty(abs(int(size)), dtype=torch.uint8, device="cpu")
    broadcast_(pickled, root_rank, f"{name}.t", process_set)
    if failure is not None:
        raise failure
    if size < 0:
        raise _failure_of(root_rank, pickled)
    return obj if rank() == root_rank else cloudpickle.loads(pickled.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order; they may differ in type and size.

    Raises:
        ParamError: on a rank whose object holds sharded DTensors.
        pickle.PicklingError: on the other ranks, if some rank cannot pickle its object; on that rank its own error.
    """
    pickled, failure = _pickle(obj)
    name = name or "allgather_object"
    size = pickled.numel() if failure is None else -pickled.numel()
    sizes = allgather(torch.tensor([size], device="cpu"), f"{name}.sz", process_set).tolist()
    parts = allgather(pickled, f"{name}.t", process_set).split([abs(size) for size in sizes])
    if failure is not None:
        raise failure
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        if size < 0:
            raise _failure_of(number, part)
    return [cloudpickle.loads(part.numpy().tobytes()) for part in parts]


def _pickle(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    """The pickle of an object as a tensor; if it cannot be pickled, the text of the error, and the error."""
    failure = None
    try:
        content = pickle_for_others(obj)
    except Exception as error:
        content, failure = f"{type(error).__name__}: {error}".encode(), error
    return torch.frombuffer(bytearray(content), dtype=torch.uint8), failure


def _failure_of(number: int, text: torch.Tensor) -> pickle.PicklingError:
    said = text.numpy().tobytes().decode()
    return pickle.PicklingError(f"Rank {number} could not pickle its object: {said}")


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors in place with the root's values.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``, as a dict or iterable.
            Values that are not tensors are left as they are.
        root_rank: rank whose values all ranks take.

    Raises:
        ValueError: if ``params`` is of another type, or has DTensors, sparse tensors or tensors without values.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    # Checked before any of them is sent.
    refuse_subclasses(tensor for _, tensor in named if isinstance(tensor, torch.Tensor))
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or tensor.layout != torch.strided):
            problem = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            raise ValueError(
                f"{name or 'A tensor'} is {problem}, and only dense tensors with values can be broadcast."
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

    The optimizer of other ranks may have no state yet, as when only the root has read a checkpoint. On a rank without
    state, parameters without a gradient get a gradient of zeros, as in Horovod. If the root has no state, the other
    ranks have none afterwards either; Horovod would create it.

    Args:
        optimizer: optimizer, the same on all ranks except for its values.
        root_rank: rank whose state all ranks take.
        model: ignored; Horovod needs it for sparse gradients.

    Raises:
        ValueError: if the optimizer is ``torch.optim.LBFGS``, as in Horovod, or its parameters are DTensors.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    refuse_subclasses(parameter for group in optimizer.param_groups for parameter in group["params"])
    state = optimizer.state_dict()
    if not state["state"]:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    tensors: list[torch.Tensor] = []
    outline = broadcast_object(take_out_tensors(state, tensors) if rank() == root_rank else None, root_rank)
    if rank() != root_rank:
        tensors = []
        state = put_in_tensors(outline, tensors)
    broadcast_parameters(tensors, root_rank)
    if rank() != root_rank:
        with kept_containers(optimizer):
            optimizer.load_state_dict(state)


@contextmanager
def kept_containers(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within this context, have ``load_state_dict`` load into the ``param_groups`` and ``state`` that an optimizer has.

    Otherwise it replaces them. ``DistributedOptimizer`` shares them with the optimizer that it wraps: a scheduler of
    one of the two would then change options that the other does not see.
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


__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
