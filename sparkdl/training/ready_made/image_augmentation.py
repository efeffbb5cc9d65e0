"""Random changes of images for training: mirrored, or moved by a few pixels. Runs on a *rank*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

AUGMENTATIONS = ("flip", "crop")
_MOVED_BY = 8
"""An image moves by up to one part of its side in so many: 4 pixels of 32, as He et al. (2016) do on CIFAR."""


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation:
    """Changes the images of a batch, each by a lot of its own; NumPy's random numbers are the rank's.

    Attributes:
        column: by which name the images ``(rows, channels, height, width)`` come.
        flips: whether every second image, on average, is mirrored left to right.
        crops: whether images are moved by up to an eighth of their height and width, their borders mirrored outwards.
    """

    column: str
    flips: bool
    crops: bool

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays of a batch with other images."""
        images = arrays[self.column]
        if self.flips:
            mirrored = np.random.random(len(images)) < 0.5
            images = np.where(mirrored[:, None, None, None], images[..., ::-1], images)
        if self.crops:
            images = _moved(images)
        return {**arrays, self.column: images}


def _moved(images: npt.NDArray[Any]) -> npt.NDArray[Any]:
    height, width = images.shape[2:]
    vertical, horizontal = (max(1, round(side / _MOVED_BY)) for side in (height, width))
    margins = [(0, 0), (0, 0), (vertical, vertical), (horizontal, horizontal)]
    padded = np.pad(images, margins, mode="symmetric")
    tops = np.random.randint(0, 2 * vertical + 1, len(images))
    lefts = np.random.randint(0, 2 * horizontal + 1, len(images))
    moved = np.empty_like(images)
    for index, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        moved[index] = padded[index, :, top : top + height, left : left + width]
    return moved
