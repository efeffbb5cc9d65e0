"""In which precision a model computes; weights, gradients and losses stay as they are. Runs on a *rank*."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

PRECISIONS = ("float32", "bfloat16", "float16")


class Precision:
    """Autocast for the forward pass and, with float16, scaled losses, whose gradients would be rounded to 0 otherwise.

    Args:
        name: one of :data:`PRECISIONS`; ``"float32"`` leaves the model as it is.
        device: of the model.

    Attributes:
        scaler: scales losses and unscales gradients; does nothing unless the precision is float16.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype = (
            None if name == "float32" else {"bfloat16": torch.bfloat16, "float16": torch.float16}[name]
        )
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "float16")

    def computing(self) -> AbstractContextManager[Any]:
        """Within, operations that bear it compute in the lower precision."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def for_loss(self, outputs: Tensor) -> Tensor:
        """The outputs in float32 where they are in the lower precision: losses sum up many values."""
        return outputs.float() if outputs.dtype == self._dtype else outputs
