"""From encoded images and images of any size to arrays of pixels of one size. On *ranks* and in predictions.

Pixels are uint8 in the order height, width, channel; colours are red, green, blue. Pillow, which decodes bytes, is
imported with the first of them.
"""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sparkdl.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

RESIZE_MODES = ("crop", "stretch")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Pillow's modes for grey values up to 65535, which its own conversion to colours would cut off at 255."""


def encoded_size(content: bytes, *, where: str) -> tuple[int, int]:
    """Return height and width of an encoded image, of which only the header is read.

    Raises:
        DataError: if it is none; it says where that was.
    """
    image = _opened(content, where)
    width, height = image.size
    is_turned = image.getexif().get(0x0112, 1) >= 5  # EXIF's orientations from 5 on lie on their side
    return (width, height) if is_turned else (height, width)


def decoded(content: bytes, *, where: str, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return an encoded image as ``(height, width, 3)``, upright as its EXIF data have it, without transparency.

    Args:
        content: a file of any format that Pillow reads.
        where: the image is, for errors.
        size: that it will be brought to; a JPEG is decoded no larger than it has to be for that.

    Raises:
        DataError: if it cannot be decoded; it says where that was and how to find the row.
    """
    image = _opened(content, where)
    from PIL import ImageOps

    try:
        image.draft(None, (max(size), max(size)))
        upright = ImageOps.exif_transpose(image)
        if upright.mode == "F":
            raise ValueError("its pixels are floating-point numbers; give such images as arrays")
        if upright.mode in _SIXTEEN_BITS:
            grey = (np.clip(np.asarray(upright), 0, 0xFFFF) >> 8).astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        return np.array(upright.convert("RGB"))
    except Exception as error:
        raise _broken(content, where, error) from error


def in_colours(pixels: npt.NDArray[np.uint8], *, where: str) -> npt.NDArray[np.uint8]:
    """Return pixels of Spark's image source, which are grey or blue, green, red (and alpha), as red, green, blue.

    Raises:
        DataError: if there are other numbers of channels.
    """
    channels = pixels.shape[2]
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    if channels not in (3, 4):
        raise DataError(
            f"The image in {where} has {channels} channels. Spark's image source has 1, 3 or 4; give others as arrays."
        )
    return pixels[..., 2::-1]


def brought_to(images: npt.NDArray[Any], size: tuple[int, int], mode: str = "crop") -> npt.NDArray[Any]:
    """Return images ``(..., channels, height, width)`` in another size, in their dtype.

    By linear interpolation, which takes the mean over what becomes one pixel where they shrink.

    Args:
        images: as uint8 or float32.
        size: height and width.
        mode: ``"crop"`` keeps the proportions, and the middle of what is too long; ``"stretch"`` does not.
    """
    height, width = images.shape[-2:]
    if (height, width) == size:
        return images
    scaled = size
    if mode == "crop":
        # Rounded up to what may be cut, so that neither side is ever too short.
        scale = max(size[0] / height, size[1] / width)
        scaled = max(size[0], round(height * scale)), max(size[1], round(width * scale))
    if scaled != (height, width):
        images = _scaled(images, scaled)
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    return images[..., top : top + size[0], left : left + size[1]]


def _scaled(images: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
    # As floats: torch 2.13 fails with an internal error on some batches of bytes that are a pixel wide.
    batch = torch.from_numpy(images.reshape(-1, *images.shape[-3:]).astype(np.float32))
    scaled = torch.nn.functional.interpolate(batch, size, mode="bilinear", antialias=True)
    if images.dtype == np.uint8:
        scaled = scaled.round_().clamp_(0, 255).to(torch.uint8)
    return scaled.numpy().reshape(*images.shape[:-2], *size)


def _opened(content: bytes, where: str) -> Image.Image:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            f"The image in {where} has to be decoded, and Pillow, which does that, is not installed on this host: "
            f"{error}. Install it with: pip install pillow"
        ) from error
    try:
        return Image.open(io.BytesIO(content))
    except Exception as error:
        raise _broken(content, where, error) from error


def _broken(content: bytes, where: str, error: Exception) -> DataError:
    digest = hashlib.sha256(content).hexdigest()
    starts = f", which begin with {bytes(content[:8])!r}" if content else ""
    return DataError(
        f"The image in {where} cannot be decoded: {type(error).__name__}: {error}. It has {len(content)} "
        f"bytes{starts}. Leave such rows out; this one has sha2(column, 256) = '{digest}'."
    )
