"""A column of images as a network takes it. On *ranks*, in predictions, and when a fit learns of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import DataError
from sparkdl.training.ready_made.image_pixels import brought_to, decoded, encoded_size, in_colours


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """Makes an array ``(rows, channels, height, width)`` of a column; saved with the model.

    Encoded images and those of Spark's image source become uint8 in red, green and blue, arrays become float32 with
    the channels that they have.

    Attributes:
        column: name of the column.
        kind: what it holds: ``"binary"``, encoded images; ``"image"``, those of Spark's image source; or
            ``"number"``, arrays.
        size: height and width of what is made.
        resize_mode: how images of another size are brought to that, see :func:`.image_pixels.brought_to`.
        shape: of arrays, height and width, or with the channels after them, or before; ``()`` for images.
        has_channels_first: whether the channels come before.
    """

    column: str
    kind: str
    size: tuple[int, int]
    resize_mode: str = "crop"
    shape: tuple[int, ...] = ()
    has_channels_first: bool = False

    @property
    def num_channels(self) -> int:
        """How many channels the images have."""
        if self.kind != "number":
            return 3
        if len(self.shape) == 2:
            return 1
        return self.shape[0 if self.has_channels_first else 2]

    @property
    def imported_when_called(self) -> tuple[str, ...]:
        """What serving a model with it has to install: arrays are not decoded."""
        return () if self.kind == "number" else ("PIL",)

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the images of a batch.

        Raises:
            DataError: if one cannot be decoded, or holds what is no number.
        """
        rows = columns[self.column]
        if self.kind == "number":
            return self._of_arrays(rows)
        images = np.empty((len(rows), 3, *self.size), np.uint8)
        for index, pixels in enumerate(self._pixels(rows)):
            images[index] = brought_to(pixels.transpose(2, 0, 1), self.size, self.resize_mode)
        return images

    def sizes(self, columns: Mapping[str, npt.NDArray[Any]]) -> list[tuple[int, int]]:
        """Return height and width of each image of a batch, which is no array, before it is brought to one size."""
        rows = columns[self.column]
        if self.kind == "binary":
            return [encoded_size(content, where=self._where(index)) for index, content in enumerate(rows)]
        return [pixels.shape[:2] for pixels in rows]

    @property
    def size_of_arrays(self) -> tuple[int, int]:
        """Height and width of images that are arrays."""
        height, width = self.shape[1:] if self.has_channels_first else self.shape[:2]
        return height, width

    def _pixels(self, rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.uint8]]:
        for index, row in enumerate(rows):
            where = self._where(index)
            if self.kind == "binary":
                yield decoded(row, where=where, size=self.size)
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
        return np.ascontiguousarray(brought_to(images, self.size, self.resize_mode))

    def _where(self, index: int) -> str:
        return f"column {self.column!r}, row {index} of its batch,"
