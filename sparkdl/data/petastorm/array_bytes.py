"""Arrays out of the bytes that ``np.save`` wrote, on the reader threads of every *rank*.

``np.load`` parses the header with :mod:`ast`, which in CPython 3.11 fails now and then where several threads do so at
once: "AST constructor recursion depth mismatch" (github.com/python/cpython/issues/106905). The headers of plain dtypes
need no parser of Python; without it an array of four floats takes 2 us instead of 28.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Literal
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
"""How many bytes tell the length of the header, by the version of the format; see ``numpy.lib.format``."""

_PLAIN = re.compile(
    rb"\{'descr': '([<>|=][a-zA-Z]\d+)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), \} *\n"
)
_parsing = threading.Lock()


def array_from_npy(value: bytes) -> npt.NDArray[np.generic]:
    """Return the array of an ``.npy`` file's bytes, as ``np.load`` does; it may be written to.

    Raises:
        ValueError: if they are none, or end too early, or hold Python objects.
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
            found: npt.NDArray[np.generic] = np.load(BytesIO(value))
            return found
    dtype, shape, order = plain
    return np.frombuffer(value, dtype, prod(shape), data).reshape(shape, order=order).copy(order="K")


def array_from_npz(value: bytes, name: str) -> npt.NDArray[np.generic]:
    """Return an array of an ``.npz`` file's bytes by its name.

    Raises:
        ValueError: as :func:`array_from_npy`.
        KeyError: if there is none of that name.
        zipfile.BadZipFile: if they are no such file.
    """
    with ZipFile(BytesIO(value)) as archive:
        return array_from_npy(archive.read(f"{name}.npy"))


@lru_cache(maxsize=1024)
def _plain_header(header: bytes) -> tuple[np.dtype[np.generic], tuple[int, ...], Literal["C", "F"]] | None:
    """What a header tells; None unless it is of a dtype without fields and objects."""
    found = _PLAIN.fullmatch(header)
    if found is None:
        return None
    descr, is_fortran, shape = found.groups()
    sizes = tuple(int(size) for size in shape.split(b",") if size.strip())
    return np.dtype(descr.decode()), sizes, "F" if is_fortran == b"True" else "C"
