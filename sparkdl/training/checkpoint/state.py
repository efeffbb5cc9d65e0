"""The state from which a fit continues: collected for a checkpoint and restored from it.

The tensors of module and optimizer are those of :mod:`sparkdl.checkpoint.tensors`. All other state is copied to host
memory, where training no longer changes it. Each rank sends its own state to rank 0 as bytes.
"""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparkdl.checkpoint.values import copy_to_host
from sparkdl.collective.byte_exchange import broadcast_bytes, gather_bytes
from sparkdl.random_state import random_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn
    from torch.optim import Optimizer

    from sparkdl.collective import Communicator
    from sparkdl.training.learning_rate import LearningRate


class FitState:
    """The parts of a fit whose state is the same on all ranks.

    Args:
        module: module that is trained.
        optimizer: optimizer of the module's parameters.
        learning_rate: learning rate of the optimizer.
        parts: further parts, by name: objects with ``state_dict()`` and ``load_state_dict()``, whose states consist of
            numbers, strings, tensors, and dicts and lists of them.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, learning_rate: LearningRate, **parts: Any
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self._parts = parts

    def capture(self, **others: Any) -> dict[str, Any]:
        """Return a copy in host memory of all state but the tensors of module and optimizer.

        Args:
            others: further values.

        Raises:
            CheckpointError: if a state holds types that a checkpoint cannot hold.
        """
        state = {
            "learning_rate": self.learning_rate.state_dict(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "buffers": module_state(self.module)["buffers"],
            **others,
        }
        copied: dict[str, Any] = copy_to_host(state, "the state of the fit")
        return copied

    def restore_parts(self, fit: Mapping[str, Any]) -> None:
        """Restore all parts except optimizer and schedule; a part that is not in the checkpoint starts fresh."""
        for name, part in self._parts.items():
            if name in fit["parts"]:
                part.load_state_dict(fit["parts"][name])


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict, and the buffers that are not in it."""
    state = module.state_dict()
    return {"state": dict(state), "buffers": _other_buffers(module, state)}


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what :func:`module_state` returned into a module, in place."""
    module.load_state_dict(state["state"])
    set_buffers(_other_buffers(module, module.state_dict()), state["buffers"])


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
