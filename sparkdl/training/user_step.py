"""Runs the user's own training step in the place of model, loss and labels. The same on a *rank* and when tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.training.columns import dtype_named, to_features, to_tensor
from sparkdl.training.losses import LossTerm

if TYPE_CHECKING:
    from sparkdl.training.spec import TrainingSpec

UserStep: TypeAlias = Callable[[nn.Module, dict[str, Tensor]], Any]
"""Takes the model and a batch of tensors by name, and returns the mean loss of its rows, or that and the outputs."""


class StepModule(nn.Module):
    """The user's step as a module: what averages gradients wraps it, and the step has the model itself.

    It may then call any method of the model, and the model as often as it likes: whatever it does happens within the
    one forward pass that the wrapper sees.

    Args:
        module: the model.
        step: called with it and a batch.
    """

    def __init__(self, module: nn.Module, step: UserStep) -> None:
        super().__init__()
        self.module = module
        self._step = partial(step)  # a step that is a module has no part in the model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return what the step returns."""
        return self._step(self.module, batch)


def run_user_step(
    spec: TrainingSpec, module: nn.Module, batch: Mapping[str, Any], device: torch.device
) -> tuple[Any, LossTerm]:
    """Return the outputs, None where the step does not tell them, and the loss.

    Args:
        spec: of the fit.
        module: the model, or a :class:`StepModule`, which something may wrap.
        batch: prepared.
        device: of the model.

    Raises:
        ParamError: if the step returns something else.
    """
    assert spec.user_step is not None, "called where there is one"
    inputs = {
        each.name: to_features(batch[each.name], dtype_named(each.dtype), device)
        for each in spec.inputs.inputs
    }
    labels = {head.label.name: head.label.tensor(batch, device) for head in spec.heads}
    weight = (
        {} if spec.weight is None else {spec.weight: to_tensor(batch[spec.weight], torch.float32, device)}
    )
    is_step = any(isinstance(each, StepModule) for each in (module, getattr(module, "module", None)))
    step = module if is_step else StepModule(module, spec.user_step)
    returned = step({**inputs, **labels, **weight})
    loss, outputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ParamError(
            "Param trainStep must return the mean loss of the batch as a tensor with one value, or a tuple of that "
            f"and the outputs; it returned {found}."
        )
    num_rows = len(next(iter(batch.values())))
    return outputs, LossTerm(mean=loss.reshape(()), weight=float(num_rows))
