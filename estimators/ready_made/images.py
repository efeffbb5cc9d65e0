"""What is learned of a column of images: their layout, a size for all of them, scales. Runs on the *driver*."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkdl.data import ParquetFeed
from sparkdl.errors import DataError
from sparkdl.networks.images import ImageInputs
from sparkdl.networks.standardization import Moments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.data.dataset.rows import RowChoice

LOOKED_AT = 512
"""Images of which size and scales are learned; to decode all would take the driver longer than the ranks train."""

LARGEST_LEARNED = 224
"""Pixels a side: what networks for ImageNet take; more are a choice that the user makes."""

_ROWS_AT_ONCE = 16
_PLAIN_CHANNELS = (1, 3, 4)

IMAGENET_SCALES = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of its channels, of pixels from 0 to 1."""


def image_inputs(
    column: Column, *, shape: Sequence[int] | None, size: Sequence[int] | None, resize_mode: str
) -> ImageInputs:
    """Return what makes inputs of a column.

    Args:
        column: of images.
        shape: of those in flat arrays, as the user gave it.
        size: to bring them to; None leaves it at 1 x 1, to be learned.
        resize_mode: how.

    Raises:
        DataError: if the column holds no images, or arrays whose shape is none of images or not known.
    """
    height, width = size or (1, 1)
    inputs = ImageInputs(column=column.name, kind=column.kind, size=(height, width), resize_mode=resize_mode)
    if column.kind in ("binary", "image") and not column.shape:
        if shape is not None:
            raise DataError(
                f"Column {column.name!r} holds images that tell their own shape. Leave imageShape out; imageSize says "
                "to what they are brought."
            )
        return inputs
    if column.kind != "number" or not column.shape:
        what = "arrays that differ in length" if column.kind == "ragged" else f"{column.kind} values"
        raise DataError(
            f"Column {column.name!r} holds {what}, and ImageClassifier takes images of Spark's image source, encoded "
            "ones (binary), or arrays of one shape."
        )
    found = _shape_of_arrays(column, shape)
    has_channels_first = len(found) == 3 and found[2] not in _PLAIN_CHANNELS and found[0] in _PLAIN_CHANNELS
    return replace(inputs, shape=found, has_channels_first=has_channels_first)


def _shape_of_arrays(column: Column, shape: Sequence[int] | None) -> tuple[int, ...]:
    if len(column.shape) in (2, 3):
        if shape is not None and tuple(shape) != column.shape:
            raise DataError(
                f"Column {column.name!r} holds arrays of {_by(column.shape)}, and Param imageShape is {list(shape)}. "
                "Leave imageShape out: it is for flat arrays."
            )
        return column.shape
    if len(column.shape) > 3:
        raise DataError(
            f"Column {column.name!r} holds arrays of {_by(column.shape)}, which are no images: those have a height, a "
            "width, and channels where there are several."
        )
    if shape is None:
        side = math.isqrt(column.shape[0])
        example = [side, side] if side * side == column.shape[0] else [column.shape[0] // 8, 8]
        raise DataError(
            f"Column {column.name!r} holds flat arrays of {column.shape[0]} numbers. Say of which shape their images "
            f"are, for instance imageShape={example}."
        )
    if math.prod(shape) != column.shape[0]:
        raise DataError(
            f"Param imageShape is {list(shape)}, which are {math.prod(shape)} numbers, and the arrays in column "
            f"{column.name!r} have {column.shape[0]}."
        )
    return tuple(shape)


def learn_size(inputs: ImageInputs, dataset: ParquetDataset, training: RowChoice | None) -> tuple[int, int]:
    """Return the median height and width of some images, no side longer than :data:`LARGEST_LEARNED`.

    Raises:
        DataError: if an image cannot be read.
    """
    if inputs.kind == "number":
        sizes = [inputs.size_of_arrays]
    else:
        sizes = [size for batch in _some(inputs.column, dataset, training) for size in inputs.sizes(batch)]
    height, width = np.median(np.array(sizes), axis=0)
    scale = min(1.0, LARGEST_LEARNED / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def learn_scales(
    inputs: ImageInputs, dataset: ParquetDataset, training: RowChoice | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and deviation of each channel over some images, as they go into the network.

    Raises:
        DataError: if an image cannot be read.
    """
    moments = Moments()
    for batch in _some(inputs.column, dataset, training):
        images = inputs(batch)
        moments.add(np.moveaxis(images, 1, -1).reshape(-1, inputs.num_channels))
    return moments.mean, moments.deviation


def known_scales(
    inputs: ImageInputs,
    dataset: ParquetDataset,
    training: RowChoice | None,
    scales: tuple[Sequence[float], Sequence[float]],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and deviation in the unit of the images: 0 to 255, or 0 to 1 where arrays hold fractions.

    Args:
        inputs: of the column.
        dataset: of the rows.
        training: which of them are trained on.
        scales: mean and deviation of 3 channels, of pixels from 0 to 1.

    Raises:
        DataError: if the images have another number of channels than 1 or 3.
    """
    if inputs.num_channels not in (1, 3):
        raise DataError(
            f"Param normalization is 'imagenet', which has 3 channels, and the images in column {inputs.column!r} have "
            f"{inputs.num_channels}. Take 'learned'."
        )
    mean, deviation = (np.array(each, np.float64) for each in scales)
    if inputs.num_channels == 1:
        mean, deviation = mean.mean(keepdims=True), deviation.mean(keepdims=True)
    is_float = inputs.kind == "number" and "float" in dataset.column(inputs.column).dtype
    if is_float and max(float(inputs(batch).max()) for batch in _some(inputs.column, dataset, training)) <= 1:
        return mean, deviation
    return mean * 255, deviation * 255


def _some(
    name: str, dataset: ParquetDataset, training: RowChoice | None
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Some rows, of row groups in a random order that is the same every time, as files may be sorted by class."""
    with (
        ParquetFeed(
            dataset, columns=[name], batch_size=_ROWS_AT_ONCE, shuffle=True, seed=0, row_filter=training
        ) as feed,
        closing(feed.epoch(0)) as batches,
    ):
        for _, batch in zip(range(LOOKED_AT // _ROWS_AT_ONCE), batches, strict=False):
            yield batch


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
