"""Runs the user's own training step in the place of model, loss and labels. The same on a *rank* and when tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from sparkdl.errors import ParamError
from sparkdl.training.columns import dtype_named, to_features, to_tensor
from sparkdl.training.losses import LossTerm

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.training.spec import TrainingSpec

UserStep: TypeAlias = Callable[["nn.Module", dict[str, Tensor]], Any]
"""Takes the model and a batch of tensors by name, and returns the mean loss of its rows, or that and the outputs."""


def run_user_step(
    spec: TrainingSpec, module: nn.Module, batch: Mapping[str, Any], device: torch.device
) -> tuple[Any, LossTerm]:
    """Return the outputs, None where the step does not tell them, and the loss.

    Raises:
        ParamError: if the step returns something else.
    """
    assert spec.user_step is not None, "called where there is one"
    inputs = {
        each.name: to_features(batch[each.name], dtype_named(each.dtype), device)
        for each in spec.inputs.inputs
    }
    labels = {
        head.label.name: to_tensor(batch[head.label.name], dtype_named(head.label.dtype), device)
        for head in spec.heads
    }
    weight = (
        {} if spec.weight is None else {spec.weight: to_tensor(batch[spec.weight], torch.float32, device)}
    )
    returned = spec.user_step(module, {**inputs, **labels, **weight})
    loss, outputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ParamError(
            "Param trainStep must return the mean loss of the batch as a tensor with one value, or a tuple of that "
            f"and the outputs; it returned {found}."
        )
    num_rows = len(next(iter(batch.values())))
    return outputs, LossTerm(mean=loss.reshape(()), weight=float(num_rows))
