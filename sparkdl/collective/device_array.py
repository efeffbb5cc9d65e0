"""Arrays in GPU memory, by what they say of themselves: DLPack or ``__cuda_array_interface__``. Runs on ranks.

No array library is needed: torch tensors, CuPy and Numba arrays are all described this way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl import _native
from sparkdl.errors import ParamError

_DLPACK_ON_GPU = {2: "CUDA", 13: "CUDA managed"}
_NO_SYNCHRONIZATION = -1


@dataclass(frozen=True, kw_only=True)
class DeviceArray:
    """A C-contiguous array in GPU memory.

    Attributes:
        pointer: address of its first element.
        count: how many elements it has.
        dtype: NumPy's name of their type, or ``"bfloat16"``.
        gpu: number of the GPU in this process, if the array says it.
        is_writable: whether it may be written to.
        owner: what keeps the memory.
    """

    pointer: int
    count: int
    dtype: str
    gpu: int | None = None
    is_writable: bool = True
    owner: object = None

    def elements(self, start: int, count: int, item_bytes: int) -> int:
        """Address of the elements from ``start`` on, which must be ``count`` and inside the array."""
        if not 0 <= start <= start + count <= self.count:
            raise ParamError(f"elements {start} to {start + count} are outside an array of {self.count}")
        return self.pointer + start * item_bytes


def device_array(array: Any) -> DeviceArray:
    """Describe an array in GPU memory. Its stream is not waited for: order is the caller's.

    Args:
        array: a :class:`DeviceArray`, or whatever has ``__dlpack__`` or ``__cuda_array_interface__``.

    Raises:
        ParamError: if the array does not say where it lies, is not in GPU memory or not C-contiguous.
    """
    if isinstance(array, DeviceArray):
        return array
    if hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _from_interface(array)
    raise ParamError(
        f"NCCL takes arrays in GPU memory, with __dlpack__ or __cuda_array_interface__; got {type(array).__name__}"
    )


def _from_dlpack(array: Any) -> DeviceArray:
    kind, gpu = array.__dlpack_device__()
    if int(kind) not in _DLPACK_ON_GPU:
        raise ParamError(
            f"NCCL takes arrays in GPU memory, got a {type(array).__name__} on a device of DLPack type {int(kind)};"
            " the communicator itself takes those in CPU memory"
        )
    capsule = array.__dlpack__(stream=_NO_SYNCHRONIZATION)
    pointer, count, dtype, is_contiguous, _, _ = _native.describe_dlpack(capsule)
    if not is_contiguous:
        raise _not_contiguous(array)
    return DeviceArray(pointer=pointer, count=count, dtype=dtype, gpu=int(gpu), owner=array)


def _from_interface(array: Any) -> DeviceArray:
    described = array.__cuda_array_interface__
    shape, dtype = described["shape"], np.dtype(described["typestr"])
    pointer, is_read_only = described["data"]
    count, strides = math.prod(shape), described.get("strides")
    if count and strides is not None and not _is_contiguous(shape, strides, dtype.itemsize):
        raise _not_contiguous(array)
    return DeviceArray(
        pointer=int(pointer or 0),
        count=count,
        dtype=dtype.name,
        is_writable=not is_read_only,
        owner=array,
    )


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    expected = item_bytes
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _not_contiguous(array: Any) -> ParamError:
    return ParamError(
        f"a {type(array).__name__} is not C-contiguous; pass a contiguous copy and copy the result back"
    )
