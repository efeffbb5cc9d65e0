"""Reads and writes safetensors files of any size without a copy of the tensors in memory.

Runs on the *driver*, on *ranks* and on *executors*. Writing takes the tensors from where they are, a few MiB at a
time, and computes the checksum of the file as it is written, so that the file need not be read again. Reading puts
the tensors into memory of their own, or maps the file, whose pages are then read on first access.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparkdl.errors import SavedModelError, SerializationError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class HashingFile:
    """Takes what is written, in its order, and knows how much it was and its SHA-256.

    Args:
        file: where it goes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        """Write bytes, or what lies in memory as they do; return how many they were."""
        self._digest.update(data)
        self._file.write(data)
        num_bytes = memoryview(data).nbytes
        self._num_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def describe(self) -> dict[str, Any]:
        """Return the size as ``bytes`` and the checksum as ``sha256``."""
        return {"bytes": self._num_bytes, "sha256": self._digest.hexdigest()}


_CHUNK_BYTES = 4 << 20
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header, as in the library safetensors: a file that is none could claim any size."""
_ALIGNMENT = 64
"""Alignment of the first tensor in the file, and so in mapped memory, as the fastest kernels need it."""

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""What https://github.com/huggingface/safetensors#format calls the dtypes of torch."""

_DTYPES = {
    name: getattr(torch, dtype)
    for dtype, name in _NAMES.items()
    if hasattr(torch, dtype)  # older ones of torch lack some
}


def write_weights(tensors: Mapping[str, Tensor], file: IO[bytes]) -> dict[str, Any]:
    """Write tensors, wherever they lie, and return size and checksum of what was written.

    One that is not contiguous, or lies on a GPU, is copied while it is its turn. Tensors that share memory are written
    each.

    Raises:
        SerializationError: if a tensor has a dtype that the format has no name for.
    """
    ordered = dict(sorted(tensors.items(), key=_place))
    hashing = HashingFile(file)
    header = _header(ordered)
    hashing.write(len(header).to_bytes(_LENGTH_BYTES, "little"))
    hashing.write(header)
    for tensor in ordered.values():
        lying = memoryview(_bytes_of(tensor.detach().to("cpu").contiguous()))
        for start in range(0, len(lying), _CHUNK_BYTES):
            hashing.write(lying[start : start + _CHUNK_BYTES])
    return hashing.describe()


def read_weights(file: IO[bytes]) -> dict[str, Tensor]:
    """Return the tensors of a file that :func:`write_weights` wrote, in memory of their own.

    Raises:
        SavedModelError: if it ends too early, or is another kind of file.
    """
    tensors: dict[str, Tensor] = {}
    for name, stored in read_header(file).items():
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        _fill(memoryview(_bytes_of(tensor)), file, name)
        tensors[name] = tensor
    return tensors


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file of weights.

    Attributes:
        begin: the number of its first byte in the file.
        dtype: of its elements.
        shape: of the tensor.
    """

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(file: IO[bytes]) -> dict[str, StoredTensor]:
    """Return where the tensors of a file lie, in their order; leaves the file at the first one.

    Raises:
        SavedModelError: if it is another kind of file.
    """
    size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size > _MAX_HEADER_BYTES:
        raise SavedModelError(f"This is no file of weights: its header would have {size} bytes.")
    try:
        header = json.loads(file.read(size))
        stored = {
            name: StoredTensor(
                _LENGTH_BYTES + size + entry["data_offsets"][0],
                _DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SavedModelError(f"This is no file of weights: {type(error).__name__}: {error}") from error
    return dict(sorted(stored.items(), key=lambda item: item[1].begin))


def read_rows(file: IO[bytes], stored: StoredTensor, first: int, count: int) -> Tensor:
    """Return some rows, along the first dimension, of a tensor in a file that can be read at any place.

    Raises:
        SavedModelError: if the file ends too early.
    """
    tensor = torch.empty((count, *stored.shape[1:]), dtype=stored.dtype)
    file.seek(stored.begin + first * math.prod(stored.shape[1:]) * stored.dtype.itemsize)
    _fill(memoryview(_bytes_of(tensor)), file, "a tensor")
    return tensor


def map_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a local file, mapped into memory: what is written to them stays here.

    Raises:
        SavedModelError: if it cannot be read, or is another kind of file.
    """
    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError) as error:
        raise SavedModelError(f"The weights in {path} cannot be read: {error}") from error


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        dtype = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise SerializationError(
                f"The tensor {name!r} has the dtype {tensor.dtype}, which files of weights cannot hold. Give it "
                "another one."
            )
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = math.ceil((_LENGTH_BYTES + len(text)) / _ALIGNMENT) * _ALIGNMENT
    return text.ljust(padded - _LENGTH_BYTES)


def _place(item: tuple[str, Tensor]) -> tuple[bool, int, str]:
    """The order in the file: those first behind which the next one is aligned, then wide items before narrow ones."""
    name, tensor = item
    return tensor.numel() * tensor.element_size() % _ALIGNMENT != 0, -tensor.element_size(), name


def _bytes_of(tensor: Tensor) -> Any:
    # A tensor of one element or none may have any stride, and then is refused as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def _fill(target: memoryview, file: IO[bytes], name: str) -> None:
    filled = 0
    while filled < len(target):
        chunk = file.read(min(_CHUNK_BYTES, len(target) - filled))
        if not chunk:
            raise SavedModelError(f"The weights end {len(target) - filled} bytes too early, in {name!r}.")
        target[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
