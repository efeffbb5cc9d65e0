"""The sum of the losses of many batches, kept on the device until somebody asks. Runs on a *rank*."""

from __future__ import annotations

import torch
from torch import Tensor


class LossSum:
    """Adds up losses in double precision, as thousands of steps need more digits than float32 has.

    MPS has no float64; CPU and CUDA do.

    Args:
        device: of the model.

    Attributes:
        total: on the device.
        weight: what the total is to be divided by.
    """

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.weight = 0.0

    def add(self, mean: Tensor, weight: float) -> None:
        """Add the mean loss of a batch, without a graph, and the weight that it stands for."""
        if weight > 0:  # the mean over nothing may be NaN
            self.total += mean.to(torch.float64) * weight
        self.weight += weight
