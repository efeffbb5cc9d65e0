"""A small residual network for images (He et al., 2016, Deep Residual Learning for Image Recognition)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_LARGE = 96
"""Images from so many pixels a side on are first made four times smaller, as He et al. do with those of ImageNet."""


class ResidualNetwork(nn.Module):
    """Stages of residual blocks, a mean over what is left of height and width, and a linear layer.

    From stage to stage height and width are halved. The last BatchNorm of each block begins with 0, so that blocks
    begin as the identity (Goyal et al., 2017).

    Args:
        num_channels: of the images ``(rows, channels, height, width)``.
        size: their height and width.
        stage_widths: channels of each stage.
        blocks_per_stage: of two convolutions each.
        dropout: share of the means that are dropped in training.
        num_outputs: per row.
    """

    def __init__(
        self,
        *,
        num_channels: int,
        size: tuple[int, int],
        stage_widths: Sequence[int],
        blocks_per_stage: int,
        dropout: float,
        num_outputs: int,
    ) -> None:
        super().__init__()
        width = stage_widths[0]
        self.stem = _large_stem(num_channels, width) if min(size) >= _LARGE else _stem(num_channels, width)
        blocks: list[_Block] = []
        for stage, stage_width in enumerate(stage_widths):
            for block in range(blocks_per_stage):
                blocks.append(_Block(width, stage_width, stride=2 if stage and not block else 1))
                width = stage_width
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_outputs)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        for each in blocks:
            nn.init.zeros_(each.last_norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(rows, outputs)``."""
        means = self.blocks(self.stem(images)).mean(dim=(2, 3))
        outputs: Tensor = self.head(self.dropout(means))
        return outputs


class _Block(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_inputs, num_outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_outputs)
        self.last = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(num_outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or num_inputs != num_outputs:
            projection = nn.Conv2d(num_inputs, num_outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(num_outputs))

    def forward(self, images: Tensor) -> Tensor:
        inner = torch.relu(self.first_norm(self.first(images)))
        return torch.relu(self.last_norm(self.last(inner)) + self.shortcut(images))


def _stem(num_channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    )


def _large_stem(num_channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_channels, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
