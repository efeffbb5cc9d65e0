"""A multilayer perceptron for tables: standardized numbers, embedded categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class TabularNetwork(nn.Module):
    """Standardizes numbers, embeds categories, and passes both through layers of ``Linear``, ``ReLU``, ``Dropout``.

    Called with numbers ``(rows, numbers)`` and the numbers of categories ``(rows, categorical columns)``, or with
    whichever of the two there are. A category of the number 0, one that was not there in training, is embedded as
    zeros. With a scale for the output, as for a regression, the layers learn its standardized values.

    Args:
        mean: of each number, ``(numbers,)``; empty where there are only categories.
        deviation: of each number.
        num_categories: of each categorical column how many were found.
        hidden_sizes: width of each hidden layer; none for a linear model.
        dropout: share of the outputs of hidden layers that are dropped in training.
        num_outputs: per row.
        output_mean: what is added to the outputs.
        output_deviation: what they are multiplied with before.
    """

    mean: Tensor
    deviation: Tensor
    output_mean: Tensor
    output_deviation: Tensor

    def __init__(
        self,
        *,
        mean: Any,
        deviation: Any,
        num_categories: Sequence[int] = (),
        hidden_sizes: Sequence[int],
        dropout: float,
        num_outputs: int,
        output_mean: float = 0.0,
        output_deviation: float = 1.0,
    ) -> None:
        super().__init__()
        scales = {
            "mean": mean,
            "deviation": deviation,
            "output_mean": output_mean,
            "output_deviation": output_deviation,
        }
        for name, value in scales.items():
            self.register_buffer(name, torch.from_numpy(np.array(value, np.float32)))
        self.embeddings = nn.ModuleList(_embedding(count) for count in num_categories)
        width = self.mean.numel() + sum(_embedding_size(count) for count in num_categories)
        layers: list[nn.Module] = []
        for size in hidden_sizes:
            layers += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(dropout)]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, num_outputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return ``(rows, outputs)``."""
        parts = []
        if self.mean.numel():
            numbers = inputs[0].to(self.mean.dtype).flatten(1)
            parts.append((numbers - self.mean) / self.deviation)
        if self.embeddings:
            codes = inputs[-1]
            parts += [embed(codes[:, place]) for place, embed in enumerate(self.embeddings)]
        # In a lower precision labels of 100,000 would be infinite, and those of 0.00001 nothing.
        outputs: Tensor = self.layers(torch.cat(parts, dim=1)).to(self.output_mean.dtype)
        return outputs * self.output_deviation + self.output_mean


def _embedding(num_categories: int) -> nn.Embedding:
    return nn.Embedding(num_categories + 1, _embedding_size(num_categories), padding_idx=0)


def _embedding_size(num_categories: int) -> int:
    """The rule of thumb of fastai: the 0.56th power, up to 50."""
    return int(min(50, max(1, round(1.6 * float(num_categories) ** 0.56))))
