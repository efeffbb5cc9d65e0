"""A small residual network for images, with the inputs and the augmentation of image networks.

The network follows He et al., 2016, Deep Residual Learning for Image Recognition. :class:`ImageNetwork` wraps a
backbone: it normalizes the channels of the images and passes as many channels as the backbone takes.

Encoded images and images of any size are converted to pixel arrays of one size, on *ranks*, in predictions, and when
a fit examines its rows. Pixels are uint8 in the order height, width, channel; colours are red, green, blue. Pillow,
which decodes bytes, is imported when the first encoded image is read.

:class:`ImageAugmentation` mirrors and shifts images at random for training, on a *rank*.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.errors import DataError
from sparkdl.foreign_errors import errors_as, needing

if TYPE_CHECKING:
    from PIL import Image


ROWS_AT_ONCE = 64
"""Number of images per forward pass: a ResNet-50 takes 12.5 MB for the layers of an image of 224 x 224 pixels."""

_LARGE = 96
"""Images of at least this height and width are first reduced by a factor of four, as He et al. do for ImageNet."""


class ResidualNetwork(nn.Module):
    """Stages of residual blocks, a mean over the remaining height and width, and a linear layer.

    Each stage after the first halves height and width. The weight of each block's last BatchNorm is initialized with 0,
    so that blocks begin as the identity (Goyal et al., 2017).

    Args:
        num_channels: number of channels of the images ``(rows, channels, height, width)``.
        size: height and width of the images.
        stage_widths: number of channels of each stage.
        blocks_per_stage: number of blocks in each stage, of two convolutions each.
        dropout: share of the means that are dropped in training.
        num_outputs: number of outputs per row.
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
        self.stem = _stem(num_channels, width, is_large=min(size) >= _LARGE)
        blocks: list[_ResidualBlock] = []
        for stage, stage_width in enumerate(stage_widths):
            for number in range(blocks_per_stage):
                blocks.append(_ResidualBlock(width, stage_width, stride=2 if stage and not number else 1))
                width = stage_width
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_outputs)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        for block in blocks:
            nn.init.zeros_(block.last_norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(rows, outputs)``."""
        means = self.blocks(self.stem(images)).mean(dim=(2, 3))
        outputs: Tensor = self.head(self.dropout(means))
        return outputs


class _ResidualBlock(nn.Module):
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


def _stem(num_channels: int, width: int, *, is_large: bool) -> nn.Sequential:
    kernel, stride = (7, 2) if is_large else (3, 1)
    first = nn.Conv2d(num_channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)
    layers: list[nn.Module] = [first, nn.BatchNorm2d(width), nn.ReLU()]
    if is_large:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    return nn.Sequential(*layers)


class ImageNetwork(nn.Module):
    """Normalizes the channels of images and passes them through a backbone.

    Args:
        mean: mean of each channel, ``(channels,)``.
        deviation: standard deviation of each channel, ``(channels,)``.
        backbone: module that takes images ``(rows, channels, height, width)`` and returns the scores
            ``(rows, classes)``, or an object with ``logits``, as some do in training.
        takes_colours: whether the backbone needs three channels; the channel of grey images is then repeated.
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
            # Without this, bytes would be widened to int64 before they arrive here, which takes twice the memory of
            # floats. The word dtype lets a caller that tries several dtypes report other failures, as of the size.
            raise TypeError(f"images enter as floating-point numbers, not with dtype {images.dtype}")
        images = (images - self.mean) / self.deviation
        if self.takes_colours and images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        outputs = self.backbone(images)
        scores: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
        return scores


RESIZE_MODES = ("crop", "stretch")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Pillow's modes for grey values up to 65535; its own conversion to colours would clip them at 255."""


def encoded_size(content: bytes, *, where: str) -> tuple[int, int]:
    """Return height and width of an encoded image; only its header is read.

    Raises:
        DataError: if the content is not an image; the message contains ``where``.
    """
    image = _open(content, where)
    width, height = image.size
    is_turned = image.getexif().get(0x0112, 1) >= 5  # EXIF's orientations from 5 on lie on their side
    return (width, height) if is_turned else (height, width)


def open_upright(content: bytes, *, where: str, size: tuple[int, int] | None = None) -> Image.Image:
    """Return an encoded image in red, green and blue, rotated as its EXIF data say, without transparency.

    Args:
        content: content of an image file in any format that Pillow reads.
        where: column and row of the image, used in error messages.
        size: height and width to which it will be resized; a JPEG is decoded no larger than that requires. None for its
            full size.

    Raises:
        DataError: if it cannot be decoded; the message contains ``where`` and says how to find the row.
    """
    image = _open(content, where)
    from PIL import Image, ImageOps

    try:
        if size is not None:
            image.draft(None, (max(size), max(size)))
        upright = ImageOps.exif_transpose(image)
        if upright.mode == "F":
            raise ValueError("its pixels are floating-point numbers; give such images as arrays")
        if upright.mode in _SIXTEEN_BITS:
            grey = (np.clip(np.asarray(upright), 0, 0xFFFF) >> 8).astype(np.uint8)
            upright = Image.fromarray(grey)
        return upright.convert("RGB")
    except Exception as error:
        raise _error_of(content, where, error) from error


def in_colours(pixels: npt.NDArray[np.uint8], *, where: str) -> npt.NDArray[np.uint8]:
    """Return pixels of Spark's image source, which are grey or blue, green, red (and alpha), as red, green, blue.

    Raises:
        DataError: if the number of channels is not 1, 3 or 4.
    """
    channels = pixels.shape[2]
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    if channels not in (3, 4):
        raise DataError(
            f"The image in {where} has {channels} channels. Spark's image source has 1, 3 or 4; give others as arrays."
        )
    return pixels[..., 2::-1]


def resize_images(images: npt.NDArray[Any], size: tuple[int, int], mode: str = "crop") -> npt.NDArray[Any]:
    """Resize images ``(..., channels, height, width)``, in their dtype.

    By linear interpolation, with antialiasing where images shrink.

    Args:
        images: images, uint8 or float32.
        size: height and width of the result.
        mode: ``"crop"`` keeps the proportions, and the middle of the side that is too long; ``"stretch"`` does not.
    """
    height, width = images.shape[-2:]
    if (height, width) == size:
        return images
    scaled = size
    if mode == "crop":
        # At least the wanted size, so that neither side is ever too short.
        scale = max(size[0] / height, size[1] / width)
        scaled = max(size[0], round(height * scale)), max(size[1], round(width * scale))
    if scaled != (height, width):
        images = _scale(images, scaled)
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    return images[..., top : top + size[0], left : left + size[1]]


def _scale(images: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
    # As floats: torch 2.13 fails with an internal error on some batches of bytes that are a pixel wide.
    batch = torch.from_numpy(images.reshape(-1, *images.shape[-3:]).astype(np.float32))
    scaled = torch.nn.functional.interpolate(batch, size, mode="bilinear", antialias=True)
    if images.dtype == np.uint8:
        scaled = scaled.round_().clamp_(0, 255).to(torch.uint8)
    return scaled.numpy().reshape(*images.shape[:-2], *size)


def _open(content: bytes, where: str) -> Image.Image:
    with needing(f"Decoding the image in {where}", "images", "pillow", kind=DataError):
        from PIL import Image
    try:
        return Image.open(io.BytesIO(content))
    except Exception as error:
        raise _error_of(content, where, error) from error


def _error_of(content: bytes, where: str, error: Exception) -> DataError:
    digest = hashlib.sha256(content).hexdigest()
    starts = f", which begin with {bytes(content[:8])!r}" if content else ""
    return DataError(
        f"The image in {where} cannot be decoded: {type(error).__name__}: {error}. It has {len(content)} "
        f"bytes{starts}. Leave such rows out; this one has sha2(column, 256) = '{digest}'."
    )


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """Converts a column to an array ``(rows, channels, height, width)``; saved with the model.

    Encoded images and images of Spark's image source become uint8 in red, green and blue; arrays become float32 and
    keep their channels.

    Attributes:
        column: name of the column.
        kind: content of the column: ``"binary"`` for encoded images, ``"image"`` for images of Spark's image source,
            ``"number"`` for arrays.
        size: height and width of the result.
        resize_mode: how images of another size are resized, see :func:`resize_images`.
        shape: shape of each array: height and width, optionally with the channels after or before them; ``()`` for
            images that are not arrays.
        has_channels_first: whether the channels of arrays come before height and width.
    """

    column: str
    kind: str
    size: tuple[int, int]
    resize_mode: str = "crop"
    shape: tuple[int, ...] = ()
    has_channels_first: bool = False
    rows_at_once: ClassVar = ROWS_AT_ONCE

    @property
    def num_channels(self) -> int:
        """Number of channels of the resulting images."""
        if self.kind != "number":
            return 3
        if len(self.shape) == 2:
            return 1
        return self.shape[0 if self.has_channels_first else 2]

    @property
    def imported_when_called(self) -> tuple[str, ...]:
        """Modules that are imported when images are converted, as serving must install them; arrays need none."""
        return () if self.kind == "number" else ("PIL",)

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the images of a batch.

        Raises:
            DataError: if an image cannot be decoded, or an array holds NaN or infinity.
        """
        rows = columns[self.column]
        if self.kind == "number":
            return self._of_arrays(rows)
        images = np.empty((len(rows), 3, *self.size), np.uint8)
        for index, pixels in enumerate(self._pixels(rows)):
            images[index] = resize_images(pixels.transpose(2, 0, 1), self.size, self.resize_mode)
        return images

    def sizes(self, columns: Mapping[str, npt.NDArray[Any]]) -> list[tuple[int, int]]:
        """Return height and width of each image of a batch before it is resized; for images that are not arrays."""
        rows = columns[self.column]
        if self.kind == "binary":
            return [encoded_size(content, where=self._where(index)) for index, content in enumerate(rows)]
        return [pixels.shape[:2] for pixels in rows]

    @property
    def size_of_arrays(self) -> tuple[int, int]:
        """Height and width of the images in a column of arrays, before they are resized."""
        height, width = self.shape[1:] if self.has_channels_first else self.shape[:2]
        return height, width

    def _pixels(self, rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.uint8]]:
        for index, row in enumerate(rows):
            where = self._where(index)
            if self.kind == "binary":
                yield np.array(open_upright(row, where=where, size=self.size))
            else:
                yield in_colours(row, where=where)

    def _of_arrays(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        images = np.asarray(rows, np.float32).reshape(len(rows), *self.shape)
        finite = np.isfinite(images).reshape(len(rows), -1).all(axis=1)
        if not finite.all():
            raise DataError(
                f"The image in {self._where(int(np.argmin(finite)))} holds NaN or infinity, or what is too large for "
                "float32. Fill such values, or leave those rows out."
            )
        if images.ndim == 3:
            images = images[:, None]
        elif not self.has_channels_first:
            images = images.transpose(0, 3, 1, 2)
        return np.ascontiguousarray(resize_images(images, self.size, self.resize_mode))

    def _where(self, index: int) -> str:
        return f"column {self.column!r}, row {index} of its batch,"


@dataclass(frozen=True, kw_only=True)
class TransformedImages:
    """Makes a network's input of each image of a column, by a transform of timm or torchvision; saved with the model.

    Attributes:
        column: name of the column of encoded images, or of images of Spark's image source.
        transform: function that makes an array or a tensor of one image of Pillow in red, green and blue. Encoded
            images are turned as their EXIF data say.
    """

    column: str
    transform: Callable[[Image.Image], Any]
    rows_at_once: ClassVar = ROWS_AT_ONCE
    imported_when_called: ClassVar = ("PIL",)
    """Modules that are imported when images are converted, as serving must install them."""

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> Tensor:
        """Return the inputs of a batch.

        Raises:
            DataError: if a row is not an image, or the transform fails or makes inputs of several shapes.
        """
        inputs = [
            self._transform(row, f"column {self.column!r}, row {index} of its batch,")
            for index, row in enumerate(columns[self.column])
        ]
        shapes = {tuple(array.shape) for array in inputs}
        if len(shapes) > 1:
            raise DataError(
                f"The transform of the images in column {self.column!r} made inputs of the shapes "
                f"{' and '.join(map(str, sorted(shapes)[:2]))}. Make it end with one size for all images: for instance "
                "torchvision.transforms.Resize(256) before CenterCrop(224)."
            )
        return torch.stack(inputs)

    def _transform(self, row: Any, where: str) -> Tensor:
        if isinstance(row, np.ndarray) and row.ndim == 3:
            from PIL import Image

            image = Image.fromarray(in_colours(row, where=where))
        elif isinstance(row, bytes | bytearray | memoryview):
            image = open_upright(bytes(row), where=where)
        else:
            raise DataError(
                f"The value in {where} is not an image but {type(row).__name__}. A transform takes encoded images "
                "(binary, as spark.read.format('binaryFile') has them in the column content) or images of Spark's "
                "image source."
            )
        with errors_as(DataError, f"The transform failed on the image in {where}"):
            made = self.transform(image)
            return made if isinstance(made, Tensor) else torch.from_numpy(np.array(made))


AUGMENTATIONS = ("flip", "crop")
_MOVED_BY = 8
"""An image is shifted by up to its side divided by this number: 4 pixels of 32, as He et al. (2016) do on CIFAR."""


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation:
    """Changes each image of a batch at random, with the random numbers of the rank's NumPy.

    Attributes:
        column: name under which the batch has the images ``(rows, channels, height, width)``.
        flips: whether each image is mirrored left to right with probability 1/2.
        crops: whether images are shifted by up to an eighth of their height and width; the pixels at their borders are
            mirrored to fill the gap.
    """

    column: str
    flips: bool
    crops: bool

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays of a batch with changed images."""
        images = arrays[self.column]
        if self.flips:
            mirrored = np.random.random(len(images)) < 0.5
            images = np.where(mirrored[:, None, None, None], images[..., ::-1], images)
        if self.crops:
            images = _move(images)
        return {**arrays, self.column: images}


def _move(images: npt.NDArray[Any]) -> npt.NDArray[Any]:
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
