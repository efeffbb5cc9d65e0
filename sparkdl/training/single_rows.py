"""Batches of one row, which the last step of an epoch may have, in models with BatchNorm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def single_rows_allowed(module: nn.Module) -> Iterator[None]:
    """Inside, a BatchNorm that gets one value per channel normalizes it by its running statistics.

    One value has no variance, and torch refuses it in training. Any number of rows has to finish, and dropping the row
    would leave it out of the training. Layers that normalize over ranks (SyncBatchNorm) see to it themselves.
    """
    frozen: set[nn.Module] = set()

    def freeze_for_one_value(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        values = inputs[0]
        if layer.training and isinstance(values, Tensor) and values.numel() == values.shape[1]:
            layer.training = False
            frozen.add(layer)

    def thaw(layer: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        del inputs, output
        if layer in frozen:
            layer.training = True
            frozen.discard(layer)

    with ExitStack() as stack:
        for layer in module.modules():
            if (
                isinstance(layer, _BatchNorm)
                and not isinstance(layer, nn.SyncBatchNorm)
                and not hasattr(layer, "counts_rows")  # sparkdl's SyncBatchNorm
                and layer.track_running_stats
            ):
                stack.callback(layer.register_forward_pre_hook(freeze_for_one_value).remove)
                stack.callback(layer.register_forward_hook(thaw, always_call=True).remove)
        yield
