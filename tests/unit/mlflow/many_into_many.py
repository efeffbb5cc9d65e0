"""A model with several inputs and outputs, in a module that does not import Spark."""

from __future__ import annotations

import torch
from torch import nn


class ManyIntoMany(nn.Module):
    """Takes a tensor, a list of any length and a number per row; predicts a class and two numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.rest = nn.EmbeddingBag(10, 4, padding_idx=0), nn.Linear(7, 4)
        self.kind, self.place = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, matrix, tokens, count):
        row = torch.cat([matrix.flatten(1), count], dim=1)
        found = torch.tanh(self.rest(row) + self.words(tokens))
        return {"kind": self.kind(found), "place": self.place(found)}
