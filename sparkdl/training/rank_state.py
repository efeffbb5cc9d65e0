"""What each rank has of its own when a checkpoint is taken, as bytes that travel to rank 0. Runs on a *rank*."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.collective.byte_exchange import broadcast_bytes, gather_bytes
from sparkdl.torch.buffers import as_bytes
from sparkdl.training.host_copy import copy_to_host
from sparkdl.training.random_state import random_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from sparkdl.collective import Communicator


def gather_rank_states(
    module: nn.Module,
    loss: object,
    device: torch.device,
    own: Mapping[str, Any],
    communicator: Communicator,
) -> list[bytes]:
    """Return on rank 0 the states of all ranks, nothing elsewhere; collective.

    Args:
        module: that is trained.
        loss: its buffers are a rank's own, where it has some.
        device: of the module.
        own: what else this rank has of its own.
        communicator: of all ranks.
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
    """Return what a rank had of its own."""
    content: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return content


def loss_buffers(loss: object, module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a loss that are not the module's."""
    if not isinstance(loss, torch.nn.Module):
        return {}
    others = {id(buffer) for buffer in module.buffers()}
    return {name: buffer for name, buffer in loss.named_buffers() if id(buffer) not in others}


def _buffers_unlike_rank_0(module: nn.Module, communicator: Communicator) -> dict[str, Tensor]:
    buffers = dict(module.named_buffers())
    if communicator.world_size == 1 or not buffers:
        return {}
    digests = {name: _digest(buffer) for name, buffer in buffers.items()}
    of_rank_0 = broadcast_bytes(
        communicator, b"".join(digests.values()), root=0, name="digests of the buffers"
    )
    size = len(of_rank_0) // len(digests)
    return {
        name: buffers[name]
        for index, (name, digest) in enumerate(digests.items())
        if digest != of_rank_0[index * size : (index + 1) * size]
    }


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(as_bytes(tensor.cpu()).numpy().tobytes(), digest_size=16).digest()
