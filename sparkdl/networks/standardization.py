"""Mean and standard deviation of numeric columns in one pass over the data, and the loss of ready-made regressors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


class Moments:
    """Mean and standard deviation of each column of the values that are added, batch by batch.

    Computed in float64 by the parallel algorithm of Chan, Golub and LeVeque (1979), which stays accurate if the mean is
    large compared to the spread. NaN stands for a missing value, which does not count.

    Attributes:
        num_rows: number of rows that were added.
        counts: number of values of each column, ``(columns,)``.
        mean: mean of each column, ``(columns,)``; empty before the first batch, 0 without values.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.mean: npt.NDArray[np.float64] = np.zeros(0)
        self._squares: npt.NDArray[np.float64] = np.zeros(0)

    def add(self, values: npt.NDArray[np.floating]) -> None:
        """Add a batch of shape ``(rows, columns)``."""
        rows = len(values)
        if not rows:
            return
        batch = values.astype(np.float64)
        is_present = ~np.isnan(batch)
        counts = is_present.sum(axis=0)
        mean = np.where(is_present, batch, 0.0).sum(axis=0) / np.maximum(counts, 1)
        squares = (np.where(is_present, batch - mean, 0.0) ** 2).sum(axis=0)
        if not self.num_rows:
            self.num_rows, self.counts, self.mean, self._squares = rows, counts, mean, squares
            return
        total, difference = self.counts + counts, mean - self.mean
        share = counts / np.maximum(total, 1)
        self._squares += squares + difference**2 * (self.counts * share)
        self.mean = self.mean + difference * share
        self.num_rows, self.counts = self.num_rows + rows, total

    @property
    def deviation(self) -> npt.NDArray[np.float64]:
        """Standard deviation of each column, ``(columns,)``; 1 for a constant column, which is then not scaled."""
        deviation = np.sqrt(self._squares / np.maximum(self.counts, 1))
        # Rounding errors of a constant column are not a spread.
        is_constant = deviation <= 1e-14 * np.abs(self.mean)
        return np.where(is_constant, 1.0, deviation)


class StandardizedMSELoss(nn.MSELoss):
    """The squared error in the labels' own unit, with the gradient of the squared error of standardized labels.

    The training then does not depend on the unit: for errors of 1e-5, the gradients would be smaller than the epsilon
    that AdamW adds to the root of their squares.

    Args:
        deviation: standard deviation of the labels.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    has_rules_of_torch = True

    def __init__(self, deviation: float, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        self.deviation = deviation

    def extra_repr(self) -> str:
        """Return what distinguishes this loss from another."""
        return f"deviation={self.deviation:g}, reduction={self.reduction}"

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of outputs for labels of the same shape."""
        errors = (outputs - labels) / self.deviation
        loss = super().forward(errors, torch.zeros_like(errors))
        in_unit: Tensor = _Scaled.apply(loss, self.deviation**2)
        return in_unit


class _Scaled(torch.autograd.Function):
    """Multiplies values by a factor, and leaves their gradients unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        del ctx
        return values * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None
