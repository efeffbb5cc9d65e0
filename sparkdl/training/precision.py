"""Mixed precision: autocast, loss scaling for float16, and float8 by torchao.

The precision concerns only the model's computations; weights, gradients and losses keep their dtypes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import needing

PRECISIONS = ("float32", "bfloat16", "float16", "float8")
_FLOAT8_CAPABILITY = (8, 9)
"""Minimum compute capability of a GPU that multiplies float8 matrices."""


def use_float8(module: nn.Module, device: torch.device) -> None:
    """Convert the linear layers of a module in place to compute in float8, by torchao; other layers use bfloat16.

    Linear layers whose sizes are not multiples of 16 stay as they are, because the GPU does not support them.

    Raises:
        ParamError: if the device has no float8, or torchao is not installed.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < _FLOAT8_CAPABILITY:
        what = (
            "a CPU" if capability is None else f"a GPU of compute capability {capability[0]}.{capability[1]}"
        )
        raise ParamError(
            f"Param precision is 'float8', which {what} does not support: it takes a GPU of compute capability 8.9, "
            "such as an H100, or a newer one. Use 'bfloat16'."
        )
    with needing("Param precision 'float8', on the executors,", "float8", "torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    # The gradient of a weight is a sum over the rows of a batch, whose number need not be a multiple of 16 either.
    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(
        module,
        module_filter_fn=lambda layer, _: (
            isinstance(layer, nn.Linear) and layer.in_features % 16 == layer.out_features % 16 == 0
        ),
        config=config,
    )


class Precision:
    """Autocast for the forward pass; with float16 also loss scaling, without which gradients would underflow to 0.

    Args:
        name: one of :data:`PRECISIONS`; ``"float32"`` leaves the model as it is.
        device: device of the model.

    Attributes:
        scaler: scales losses and unscales gradients; does nothing unless the precision is float16.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype = None if name == "float32" else torch.float16 if name == "float16" else torch.bfloat16
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "float16")

    def computing(self) -> AbstractContextManager[Any]:
        """Return the autocast context, in which operations compute in the lower precision where that is safe."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def for_loss(self, outputs: Tensor) -> Tensor:
        """Return the outputs in float32 if they are in the lower precision, because losses sum up many values."""
        return outputs.float() if outputs.dtype == self._dtype else outputs
