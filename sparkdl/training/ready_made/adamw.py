"""The optimizer of ready-made estimators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class AdamW:
    """Makes an optimizer of a model's parameters.

    Attributes:
        learning_rate: its learning rate.
        weight_decay: its weight decay.
    """

    learning_rate: float
    weight_decay: float

    def __call__(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
