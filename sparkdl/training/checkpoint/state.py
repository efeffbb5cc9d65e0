"""The state from which a fit continues: collected for a checkpoint and restored from it.

The state is copied to host memory, where training no longer changes it. It consists of types that :func:`torch.load`
reads with ``weights_only=True``, so that no checkpoint needs a pickle that runs code. Other types are refused when the
checkpoint is written, not when it is read. Each rank sends its own state to rank 0 as bytes.
"""

from __future__ import annotations

import io
import json
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sparkdl.collective.byte_exchange import broadcast_bytes, gather_bytes
from sparkdl.errors import CheckpointError
from sparkdl.random_state import random_state
from sparkdl.training.checkpoint.files import FIT, MODEL, OPTIMIZER
from sparkdl.training.update import load_optimizer_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from sparkdl.collective import Communicator
    from sparkdl.training.learning_rate import LearningRate


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set)


def copy_to_host(value: Any, name: str) -> Any:
    """Return a copy on the CPU; references to the same tensor stay references to one copy.

    Args:
        value: numbers, strings, tensors, and dicts, lists, tuples and sets of them.
        name: name of the value, used in error messages.

    Raises:
        CheckpointError: if the value holds other types; the message says where.
    """
    return _Copier().copy(value, name)


class _Copier:
    """Copies values, and each tensor only once."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if kind in _MAPPINGS:
            return kind({key: self.copy(value[key], f"{name}[{key!r}]") for key in value})
        if kind in _SEQUENCES:
            return kind(self.copy(each, f"{name}[{index}]") for index, each in enumerate(value))
        if isinstance(value, np.generic):
            return value.item()
        raise CheckpointError(
            f"No checkpoint can be written: {name} is a {kind.__module__}.{kind.__qualname__}, and a state may hold "
            "numbers, strings, tensors, and dicts, lists, tuples and sets of them. Change what its state_dict() "
            "returns, or leave checkpointDir away."
        )

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        key = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if key not in self._copies or not tensor.numel():
            self._copies[key] = tensor.to("cpu", copy=True)
        return self._copies[key]


class StatePart(Protocol):
    """An object whose state consists of numbers, strings, tensors, and dicts and lists of them, equal on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state that :meth:`state_dict` returned."""


class FitState:
    """The parts of a fit whose state is the same on all ranks.

    Args:
        module: module that is trained.
        optimizer: optimizer of the module's parameters.
        learning_rate: learning rate of the optimizer.
        parts: further parts, by name.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, learning_rate: LearningRate, **parts: StatePart
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self._learning_rate = learning_rate
        self._parts: dict[str, StatePart] = dict(parts)

    def capture(self, *, whole: bool = True, **others: Any) -> dict[str, Any]:
        """Return copies of the states in host memory, by the names of their files.

        Args:
            whole: whether to include the states of module and optimizer.
            others: further values for the file of the fit.

        Raises:
            CheckpointError: if a state holds types that a checkpoint cannot hold.
        """
        fit = {
            "learning_rate": self._learning_rate.state_dict(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            **others,
        }
        if not whole:
            fit["buffers"] = module_state(self.module)["buffers"]
            return {FIT: copy_to_host(fit, "the state of the fit")}
        fit["optimizer_names"] = self._optimizer_names()
        return {
            MODEL: copy_to_host(module_state(self.module), "the model's state"),
            OPTIMIZER: copy_to_host(self.optimizer.state_dict(), "the optimizer's state"),
            FIT: copy_to_host(fit, "the state of the fit"),
        }

    def restore_optimizer(self, state: Mapping[str, Any], fit: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer state that :meth:`capture` returned.

        Args:
            state: state of the optimizer for all parameters.
            fit: content of the file of the fit.

        Raises:
            CheckpointError: if the checkpoint lacks parameters of this rank, or if this rank has some layers only and
                the checkpoint does not name its parameters.
        """
        names = self._optimizer_names()
        if "optimizer_names" not in fit and getattr(self.module, "has_some_layers", False):
            raise CheckpointError(
                "The checkpoint was written by an earlier sparkdl and does not say which parameters the optimizer's "
                "state is of, which pipeline stages need. Resume without them, or choose another checkpointDir."
            )
        there: list[list[str]] = fit.get("optimizer_names", names)
        if there != names:  # this rank has only some of the layers
            state = _chosen(state, there, names)
        load_optimizer_state(self.optimizer, _with_parts(self.optimizer, state))

    def restore_parts(self, fit: Mapping[str, Any]) -> None:
        """Restore all parts except optimizer and schedule; a part that is not in the checkpoint starts fresh."""
        for name, part in self._parts.items():
            if name in fit["parts"]:
                part.load_state_dict(fit["parts"][name])

    def restore_learning_rate(self, fit: Mapping[str, Any]) -> None:
        """Restore the schedule, which sets the learning rate of the optimizer."""
        self._learning_rate.load_state_dict(fit["learning_rate"])

    def _optimizer_names(self) -> list[list[str]]:
        """The names of the parameters in each group of the optimizer."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [[names[id(each)] for each in group["params"]] for group in self.optimizer.param_groups]


def _chosen(
    state: Mapping[str, Any], there: Sequence[Sequence[str]], here: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Reduce the state of an optimizer to some of its parameters.

    Args:
        state: the state for all parameters.
        there: the names of its parameters in each group.
        here: the names of the remaining parameters in each group.
    """
    groups = state["param_groups"]
    number_of = {
        name: number
        for names, group in zip(there, groups, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    if len(here) != len(groups) or any(name not in number_of for names in here for name in names):
        raise CheckpointError(
            f"The optimizer in the checkpoint has {len(groups)} groups of {len(number_of)} parameters, among which "
            "those of this rank are not to be found. Make the optimizer as it was."
        )
    new_number = {name: number for number, name in enumerate(name for names in here for name in names)}
    return {
        "state": {
            number: state["state"][number_of[name]]
            for name, number in new_number.items()
            if number_of[name] in state["state"]
        },
        "param_groups": [
            {**group, "params": [new_number[name] for name in names]}
            for names, group in zip(here, groups, strict=True)
        ],
    }


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict, and the buffers that are not in it."""
    state = module.state_dict()
    return {"state": dict(state), "buffers": _other_buffers(module, state)}


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what :func:`module_state` returned into a module, in place; if it has some layers only, load their part."""
    own = module.state_dict()
    given = state["state"]
    if getattr(module, "has_some_layers", False):
        given = {name: value for name, value in given.items() if name in own}
    module.load_state_dict({name: part_of(value, own.get(name)) for name, value in given.items()})
    set_buffers(_other_buffers(module, own), state["buffers"])


def is_part(value: object) -> bool:
    """Whether a value is a DTensor, of which each rank has a part."""
    return hasattr(value, "full_tensor")


def part_of(value: Any, like: Any) -> Any:
    """Return this rank's part of a whole tensor if ``like`` is a DTensor; otherwise return the value unchanged."""
    if not is_part(like) or is_part(value):
        return value
    from sparkdl.parallel.sharding import part_like  # on ranks only: the driver does without parallelism

    return part_like(value, like)


def _with_parts(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in which whole tensors of the shape of a DTensor parameter are divided like it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    placed = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in placed and is_part(parameter):
            placed[number] = {
                name: part_of(value, parameter)
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else value
                for name, value in placed[number].items()
            }
    return {**state, "state": placed}


def set_buffers(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrite buffers with values of the same names; values without a buffer are ignored."""
    with torch.no_grad():
        for name, value in values.items():
            if name in buffers:
                buffers[name].copy_(value)


@contextmanager
def buffers_kept(buffers: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Restore the values of buffers after this block."""
    kept = [(buffer, buffer.detach().clone()) for buffer in buffers]
    try:
        yield [buffer for buffer, _ in kept]
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _other_buffers(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if name not in state}


def gather_rank_states(
    module: nn.Module,
    loss: object,
    device: torch.device,
    own: Mapping[str, Any],
    communicator: Communicator,
) -> list[bytes]:
    """Return the serialized states of all ranks on rank 0, and an empty list elsewhere. Collective.

    Args:
        module: module that is trained.
        loss: loss of the fit; its buffers, if any, are part of each rank's own state.
        device: device of the module.
        own: further values of this rank's own state.
        communicator: communicator of all ranks.
    """
    state = {
        "random": random_state(device),
        "buffers": _buffers_unlike_rank_0(module, communicator),
        "loss_buffers": loss_buffers(loss, module),
        **own,
    }
    file = io.BytesIO()
    torch.save(copy_to_host(state, "the state of a rank"), file)
    if communicator.world_size == 1:
        return [file.getvalue()]
    return gather_bytes(communicator, file.getvalue(), root=0, name="states of ranks")


def read_rank_state(state: bytes) -> dict[str, Any]:
    """Return a rank's own state from its bytes."""
    content: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return content


def loss_buffers(loss: object, module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a loss that are not the module's."""
    if not isinstance(loss, torch.nn.Module):
        return {}
    others = {id(buffer) for buffer in module.buffers()}
    return {name: buffer for name, buffer in loss.named_buffers() if id(buffer) not in others}


def _buffers_unlike_rank_0(module: nn.Module, communicator: Communicator) -> dict[str, Tensor]:
    """Return the buffers that rank 0 does not have, or has with other values. Collective."""
    buffers = dict(module.named_buffers())
    if communicator.world_size == 1:
        return {}
    from sparkdl.torch.replicas import digests_of  # on ranks only: the driver does without the c10d backend

    digests = json.dumps(digests_of(buffers)).encode()
    of_rank_0 = json.loads(broadcast_bytes(communicator, digests, root=0, name="digests of the buffers"))
    return {
        name: buffers[name] for name, digest in json.loads(digests).items() if digest != of_rank_0.get(name)
    }
