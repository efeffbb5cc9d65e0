"""What is around a backbone for images: their channels normalized, and as many as it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class ImageNetwork(nn.Module):
    """Normalizes the channels of images and passes them through a backbone.

    Args:
        mean: of each channel, ``(channels,)``.
        deviation: of each channel.
        backbone: takes images ``(rows, channels, height, width)`` and returns the scores ``(rows, classes)``, or an
            object with ``logits``, as some do in training.
        takes_colours: whether the backbone wants three channels also of grey images, which have one.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, *, mean: Any, deviation: Any, backbone: nn.Module, takes_colours: bool) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("deviation", deviation)):
            per_channel = torch.from_numpy(np.array(value, np.float32)).reshape(-1, 1, 1)
            self.register_buffer(name, per_channel)
        self.backbone = backbone
        self.takes_colours = takes_colours

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(rows, classes)``."""
        if not images.is_floating_point():
            # Without this, bytes would be widened to int64 on their way here, which takes twice what floats do. The
            # word dtype tells who tries several that another failure, as of the size, is the one to report.
            raise TypeError(f"images enter as floating-point numbers, not with dtype {images.dtype}")
        images = (images - self.mean) / self.deviation
        if self.takes_colours and images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        outputs = self.backbone(images)
        scores: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
        return scores
