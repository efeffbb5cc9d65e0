"""The loss of ready-made networks that tell a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class StandardizedMSELoss(nn.MSELoss):
    """The squared error in the labels' own unit, with the gradient of that of standardized labels.

    What a network learns does then not depend on the unit: the gradients of errors of 1e-5 would be smaller than the
    number that AdamW adds to their root.

    Args:
        deviation: of the labels.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    has_rules_of_torch = True

    def __init__(self, deviation: float, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        self.deviation = deviation

    def extra_repr(self) -> str:
        """Return what tells this loss from another."""
        return f"deviation={self.deviation:g}, reduction={self.reduction}"

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of outputs by labels of the same shape."""
        errors = (outputs - labels) / self.deviation
        loss = super().forward(errors, torch.zeros_like(errors))
        in_unit: Tensor = _Scaled.apply(loss, self.deviation**2)
        return in_unit


class _Scaled(torch.autograd.Function):
    """Multiplies values, and leaves their gradients as they are."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        del ctx
        return values * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None
