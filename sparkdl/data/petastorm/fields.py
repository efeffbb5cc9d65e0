"""Conversion of the fields and values of Petastorm's Unischema to the columns of the feed.

Values are decoded with Petastorm's codecs on the reader threads of every *rank*. Arrays that ``np.save`` wrote are
read without ``np.load``, which parses the header with :mod:`ast`; in CPython 3.11 that fails occasionally if several
threads parse at once: "AST constructor recursion depth mismatch" (github.com/python/cpython/issues/106905). The
headers of plain dtypes need no Python parser; without it, reading an array of four floats takes 2 us instead of 28 us.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import TYPE_CHECKING, Any, Literal
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

from sparkdl.data.dataset.dataset import Column
from sparkdl.data.petastorm.containment import install
from sparkdl.errors import DataError
from sparkdl.foreign_errors import needing

install()
from petastorm.codecs import OPENCV_AVAILABLE, CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec
from petastorm.unischema import Unischema, UnischemaField
from petastorm.utils import decode_row

if TYPE_CHECKING:
    from collections.abc import Iterable


_KINDS = "biuf"


def schema_of(columns: Iterable[Column]) -> Unischema:
    """Return the Unischema for columns of plain Parquet files."""
    fields = [
        UnischemaField(column.name, np.dtype(column.dtype).type, column.shape, None, False)
        for column in columns
    ]
    return Unischema("sparkdl", fields)


def columns_of(schema: Any, known: Iterable[Column] = ()) -> tuple[tuple[Column, ...], dict[str, str]]:
    """Return columns for the fields that can be fed, and the reason why each of the others cannot, by name.

    Args:
        schema: the Unischema.
        known: columns that are already described, which are returned as they are.
    """
    columns, unusable = [], {}
    by_name = {column.name: column for column in known}
    for field in schema.fields.values():
        if field.name in by_name:
            columns.append(by_name[field.name])
            continue
        reason = _obstacle(field)
        if reason is None:
            columns.append(_column_of(field))
        else:
            unusable[field.name] = reason
    return tuple(columns), unusable


def _obstacle(field: Any) -> str | None:
    try:
        kind = np.dtype(field.numpy_dtype).kind
    except TypeError:
        kind = "O"
    if kind == "U" and not field.shape:
        return None
    if kind not in _KINDS:
        name = getattr(field.numpy_dtype, "__name__", field.numpy_dtype)
        return f"its type is {name}; have a TransformSpec make numbers of it"
    if None in tuple(field.shape or ())[1:]:
        return (
            f"its shape {tuple(field.shape)} varies in more than the first dimension; have a TransformSpec give it "
            "another with edit_fields"
        )
    return None


def _column_of(field: Any) -> Column:
    dtype = np.dtype(field.numpy_dtype)
    lengths = tuple(field.shape or ())
    if dtype.kind == "U":
        return Column(name=field.name, dtype="object", kind="string")
    if None in lengths:
        return Column(
            name=field.name, dtype="object", kind="ragged", lengths=lengths, element=("number", dtype.name)
        )
    return Column(name=field.name, dtype=dtype.name, shape=tuple(map(int, lengths)))


_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
"""Number of bytes that hold the length of the header, by format version; see ``numpy.lib.format``."""

_PLAIN = re.compile(
    rb"\{'descr': '([<>|=][a-zA-Z]\d+)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), \} *\n"
)
_parsing = threading.Lock()


def array_from_npy(value: bytes) -> npt.NDArray[np.generic]:
    """Return the array in the bytes of an ``.npy`` file, as ``np.load`` does; it is writable.

    Raises:
        ValueError: if the bytes are not a ``.npy`` file, are truncated, or hold Python objects.
    """
    value = bytes(value)
    start = len(_MAGIC) + 2
    num_length_bytes = (
        _LENGTH_BYTES.get(value[len(_MAGIC)], 0) if value[: len(_MAGIC)] == _MAGIC and value[start:] else 0
    )
    data = start + num_length_bytes + int.from_bytes(value[start : start + num_length_bytes], "little")
    plain = _plain_header(value[start + num_length_bytes : data]) if num_length_bytes else None
    if plain is None:
        with _parsing:
            array: npt.NDArray[np.generic] = np.load(BytesIO(value))
            return array
    dtype, shape, order = plain
    return np.frombuffer(value, dtype, prod(shape), data).reshape(shape, order=order).copy(order="K")


def array_from_npz(value: bytes, name: str) -> npt.NDArray[np.generic]:
    """Return the array of that name in the bytes of an ``.npz`` file.

    Raises:
        ValueError: as :func:`array_from_npy` raises.
        KeyError: if there is no array of that name.
        zipfile.BadZipFile: if the bytes are not a ``.npz`` file.
    """
    with ZipFile(BytesIO(value)) as archive:
        return array_from_npy(archive.read(f"{name}.npy"))


@lru_cache(maxsize=1024)
def _plain_header(header: bytes) -> tuple[np.dtype[np.generic], tuple[int, ...], Literal["C", "F"]] | None:
    """Return dtype, shape and order of a header; None unless the dtype has neither fields nor objects."""
    match = _PLAIN.fullmatch(header)
    if match is None:
        return None
    descr, is_fortran, shape = match.groups()
    sizes = tuple(int(size) for size in shape.split(b",") if size.strip())
    return np.dtype(descr.decode()), sizes, "F" if is_fortran == b"True" else "C"


def decode_values(schema: Any, name: str, values: Iterable[Any]) -> list[Any]:
    """Return the values of a field as its codec decodes them; nulls stay None.

    Raises:
        DataError: if a value cannot be decoded; the message names the column and the value's row.
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
            elif isinstance(value, str) and field.numpy_dtype is np.bool_:  # from the name of a folder
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
    with needing("Decoding images without OpenCV", "images", "pillow", kind=DataError):
        from PIL import Image
    with Image.open(BytesIO(value)) as image:
        pixels = np.asarray(image)
    return (
        pixels.astype(np.uint16) if pixels.dtype == np.int32 else pixels
    )  # Pillow's mode I holds 16 bit grey
