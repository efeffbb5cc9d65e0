"""Decoding the values of a Unischema dataset with Petastorm's codecs, on the reader threads of every *rank*."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkdl.data.petastorm.array_bytes import array_from_npy, array_from_npz
from sparkdl.data.petastorm.containment import install
from sparkdl.errors import DataError

install()
from petastorm.codecs import OPENCV_AVAILABLE, CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec
from petastorm.utils import decode_row

if TYPE_CHECKING:
    from collections.abc import Iterable


def decode_values(schema: Any, name: str, values: Iterable[Any]) -> list[Any]:
    """Return the values of a field as its codec decodes them; nulls stay None.

    Raises:
        DataError: if a value cannot be decoded; it names the column and the value's row.
    """
    field = schema.fields[name]
    codec = type(field.codec)
    is_image = isinstance(field.codec, CompressedImageCodec) and not OPENCV_AVAILABLE
    decoded: list[Any] = []
    for row, value in enumerate(values):
        try:
            if value is None:
                decoded.append(None)
            elif is_image:
                decoded.append(_decode_image(value))
            elif codec is NdarrayCodec:
                decoded.append(array_from_npy(value))
            elif codec is CompressedNdarrayCodec:
                decoded.append(array_from_npz(value, "arr"))
            elif isinstance(value, str) and field.numpy_dtype is np.bool_:  # of a folder
                decoded.append(np.bool_(value == "true"))
            else:
                decoded.append(decode_row({name: value}, schema)[name])
        except DataError:
            raise
        except Exception as error:
            cause = error.__cause__ or error.__context__ or error
            raise DataError(
                f"column {name!r} cannot be decoded in row {row} of those that were read by its "
                f"{type(field.codec).__name__}: {type(cause).__name__}: {cause}"
            ) from error
    return decoded


def _decode_image(value: bytes) -> npt.NDArray[Any]:
    """Decode an image with Pillow as Petastorm's codec does with OpenCV: RGB, or grey as it was written."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "images need OpenCV or Pillow: pip install opencv-python-headless, or pip install pillow"
        ) from error
    with Image.open(BytesIO(value)) as image:
        pixels = np.asarray(image)
    return (
        pixels.astype(np.uint16) if pixels.dtype == np.int32 else pixels
    )  # Pillow's mode I holds 16 bit grey
