"""All that the further course of a fit hangs on, gathered for a checkpoint and given back. Runs on a *rank*."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sparkdl.training.checkpoint import FIT, MODEL, OPTIMIZER
from sparkdl.training.host_copy import copy_to_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from sparkdl.training.learning_rate import LearningRate


class Part(Protocol):
    """Something with a state of numbers, strings, tensors, and dicts and lists of them; the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take a state that :meth:`state_dict` returned."""


class FitState:
    """The parts of a fit that all ranks have alike.

    Args:
        module: that is trained.
        optimizer: of its parameters.
        learning_rate: of the optimizer.
        parts: others by name. What a fit gets besides (early stopping, say) is one more :meth:`add`.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, learning_rate: LearningRate, **parts: Part
    ) -> None:
        self.module = module
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._parts: dict[str, Part] = dict(parts)

    def add(self, name: str, part: Part) -> None:
        """Have one more part in every checkpoint, and given back when a fit goes on."""
        assert name not in self._parts, f"there is a part {name} already"
        self._parts[name] = part

    def capture(self, **others: Any) -> dict[str, Any]:
        """Return copies in host memory by the names of files.

        Args:
            others: what else goes into the file of the fit.

        Raises:
            CheckpointError: if a part holds what no checkpoint can.
        """
        return {
            MODEL: copy_to_host(module_state(self.module), "the model's state"),
            OPTIMIZER: copy_to_host(self._optimizer.state_dict(), "the optimizer's state"),
            FIT: copy_to_host(
                {
                    "learning_rate": self._learning_rate.state_dict(),
                    "parts": {name: part.state_dict() for name, part in self._parts.items()},
                    **others,
                },
                "the state of the fit",
            ),
        }

    def restore_optimizer(self, state: Mapping[str, Any], fit: Mapping[str, Any]) -> None:
        """Give optimizer and schedule their states.

        Args:
            state: of the optimizer.
            fit: what the file of the fit holds.
        """
        self._optimizer.load_state_dict(dict(state))
        self._learning_rate.load_state_dict(fit["learning_rate"])

    def restore_parts(self, fit: Mapping[str, Any]) -> None:
        """Give all other parts their states; one that the checkpoint does not know begins anew."""
        for name, part in self._parts.items():
            if name in fit["parts"]:
                part.load_state_dict(fit["parts"][name])


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return what a module's state dict holds, and the buffers that it leaves out."""
    state = module.state_dict()
    return {"state": dict(state), "buffers": _other_buffers(module, state)}


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a module what :func:`module_state` returned, in place."""
    module.load_state_dict(state["state"])
    set_buffers(_other_buffers(module, state["state"]), state["buffers"])


def set_buffers(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrite those of the buffers that have values."""
    with torch.no_grad():
        for name, value in values.items():
            buffers[name].copy_(value)


@contextmanager
def buffers_kept(buffers: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Give buffers what they held, after this block, whatever was done to them in it."""
    kept = [(buffer, buffer.detach().clone()) for buffer in buffers]
    try:
        yield [buffer for buffer, _ in kept]
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _other_buffers(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if name not in state}
