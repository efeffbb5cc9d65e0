"""The buffers of modules and losses in a checkpoint, and the state of each rank alone, sent to rank 0 as bytes.

The tensors of module and optimizer are those of :mod:`sparkdl.checkpoint.tensors`. All other state is copied to host
memory, where training no longer changes it.
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

    from sparkdl.collective import Communicator


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
    if communicator.world_size == 1:
        return [write_rank_state(state)]
    return gather_bytes(communicator, write_rank_state(state), root=0, name="states of ranks")


def write_rank_state(state: Mapping[str, Any]) -> bytes:
    """Return a rank's own state as bytes."""
    file = io.BytesIO()
    torch.save(copy_to_host(state, "the state of a rank"), file)
    return file.getvalue()


def read_rank_state(state: bytes) -> dict[str, Any]:
    """Return the state from what :func:`write_rank_state` returned."""
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
