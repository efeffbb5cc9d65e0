"""Reads and writes safetensors files of any size without a copy of the tensors in memory.

Runs on the *driver*, on *ranks* and on *executors*. Writing takes the tensors from where they are, a few MiB at a time,
and computes the checksum of the file at the same time, so that the file need not be read again. Reading either copies
the tensors into new memory, or maps the file, whose pages are then read on first access.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparkdl.errors import SavedModelError, SerializationError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping


class HashingFile:
    """A sequential writer that keeps the number of bytes written and their SHA-256.

    Args:
        file: file to write to; None to compute size and checksum only.
    """

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        """Write a bytes-like object; return the number of bytes."""
        self._digest.update(data)
        if self._file is not None:
            self._file.write(data)
        num_bytes = memoryview(data).nbytes
        self._num_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Flush the file."""
        if self._file is not None:
            self._file.flush()

    def describe(self) -> dict[str, Any]:
        """Return the size as ``bytes`` and the checksum as ``sha256``."""
        return {"bytes": self._num_bytes, "sha256": self._digest.hexdigest()}


def verify_file(
    file: IO[bytes],
    written: Mapping[str, Any],
    error: Callable[[str], Exception],
    *,
    copy: IO[bytes] | None = None,
) -> None:
    """Read a file to its end, and compare its size and checksum with those that were written.

    Args:
        file: file to read.
        written: what :meth:`HashingFile.describe` returned when the file was written.
        error: function that makes the error from the text that says how the file differs.
        copy: file to which the content is copied; None for none.

    Raises:
        Exception: of ``error``, if the file differs.
    """
    hashing = HashingFile(copy)
    while chunk := file.read(_CHUNK_BYTES):
        hashing.write(chunk)
    actual = hashing.describe()
    if actual["bytes"] != written.get("bytes"):
        raise error(f"it has {actual['bytes']} bytes instead of {written.get('bytes')}")
    if actual["sha256"] != written.get("sha256"):
        raise error(
            f"its content does not match its checksum: its SHA-256 is {actual['sha256']} instead of "
            f"{written.get('sha256')}"
        )


_CHUNK_BYTES = 4 << 20
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header, as in the library safetensors: a file of another kind could claim any size."""
_ALIGNMENT = 64
"""Alignment in bytes of the first tensor in the file, and so in mapped memory, as the fastest kernels need it."""

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
"""Names of torch's dtypes in the format of https://github.com/huggingface/safetensors#format."""

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for dtype, name in _NAMES.items()}


def can_be_written(value: object) -> bool:
    """Whether a value is a tensor that a file of weights can hold: dense, of a dtype that the format has.

    A DTensor counts, as each rank writes its own part. Of other tensors in wrappers, the file would lack the wrapper.
    """
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and str(value.dtype).removeprefix("torch.") in _NAMES
        and (not is_traceable_wrapper_subclass(value) or hasattr(value, "full_tensor"))
    )


def write_weights(tensors: Mapping[str, Tensor], file: IO[bytes]) -> dict[str, Any]:
    """Write tensors from any device, and return the size and checksum of the file.

    A tensor that is not contiguous, or lies on a GPU, is copied while it is written. Tensors that share memory are each
    written as a whole.

    Raises:
        SerializationError: if a tensor has a dtype for which the format has no name.
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


def weights_as_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of the file that :func:`write_weights` writes; for small models."""
    file = io.BytesIO()
    write_weights(tensors, file)
    return file.getvalue()


def read_weights(file: IO[bytes]) -> dict[str, Tensor]:
    """Return the tensors of a file that :func:`write_weights` wrote, in new memory.

    Raises:
        SavedModelError: if the file ends too early, or is another kind of file.
    """
    tensors: dict[str, Tensor] = {}
    for name, stored in read_header(file).items():
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        _fill(memoryview(_bytes_of(tensor)), file, name)
        tensors[name] = tensor
    return tensors


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file of weights.

    Attributes:
        begin: offset of its first byte in the file.
        dtype: dtype of its elements.
        shape: shape of the tensor.
    """

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(file: IO[bytes]) -> dict[str, StoredTensor]:
    """Return the places of a file's tensors, by name and in their order; leave the file's position at the first one.

    Raises:
        SavedModelError: if the file is of another kind.
    """
    size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size > _MAX_HEADER_BYTES:
        raise SavedModelError(f"This is not a file of weights: its header would have {size} bytes.")
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
        raise SavedModelError(f"This is not a file of weights: {type(error).__name__}: {error}") from error
    return dict(sorted(stored.items(), key=lambda item: item[1].begin))


def read_rows(file: IO[bytes], stored: StoredTensor, first: int, count: int) -> Tensor:
    """Return ``count`` rows, along the first dimension and from ``first`` on, of a tensor in a seekable file.

    Raises:
        SavedModelError: if the file ends too early.
    """
    tensor = torch.empty((count, *stored.shape[1:]), dtype=stored.dtype, device="cpu")
    file.seek(stored.begin + first * math.prod(stored.shape[1:]) * stored.dtype.itemsize)
    _fill(memoryview(_bytes_of(tensor)), file, "a tensor")
    return tensor


def map_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a local file, mapped into memory; changes of them are not written to the file.

    Raises:
        SavedModelError: if the file cannot be read, or is another kind of file.
    """
    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError) as error:
        raise SavedModelError(f"The weights in {path} cannot be read: {error}") from error


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
    """Sort key: tensors that keep the next one aligned come first, then tensors with wide elements before narrow."""
    name, tensor = item
    return tensor.numel() * tensor.element_size() % _ALIGNMENT != 0, -tensor.element_size(), name


def _bytes_of(tensor: Tensor) -> Any:
    # A tensor of one element or none may have any stride, and then cannot be viewed as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def _fill(target: memoryview, file: IO[bytes], name: str) -> None:
    filled = 0
    while filled < len(target):
        chunk = file.read(min(_CHUNK_BYTES, len(target) - filled))
        if not chunk:
            raise SavedModelError(f"The weights end {len(target) - filled} bytes too early, in {name!r}.")
        target[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
