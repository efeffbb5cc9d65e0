"""Views of CPU buffers, of any array library, as flat NumPy arrays, and descriptions of arrays in GPU memory.

A contiguous CPU buffer is viewed without a copy. NumPy arrays are taken as they are; all other buffers through DLPack
(https://dmlc.github.io/dlpack), which, unlike the buffer protocol, supports bfloat16. NumPy has no such type:
bfloat16 elements are viewed as uint16. Bools are viewed as the bytes 0 and 1.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl.errors import ParamError

DTYPES = (
    *("float32", "float64", "bfloat16", "float16"),
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
    "bool",
)

FLOAT_DTYPES = tuple(name for name in DTYPES if "float" in name)

_CPU_DEVICES = (1, 3)
"""``kDLCPU`` and ``kDLCUDAHost`` (pinned host memory)."""

_NAMES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
}
"""Type code and bits of DLPack to dtype name."""

_STORAGE = {"bfloat16": "uint16", "bool": "uint8"}
"""NumPy type as which elements are viewed, if it differs from their dtype."""


_NUMPY_NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}
"""Names by dtype: NumPy takes microseconds to format the name of a dtype."""


class _Tensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def item_bytes(dtype: str) -> int:
    """Return the size in bytes of an element of ``dtype``, one of :data:`DTYPES`."""
    return storage_of(dtype).itemsize


@dataclass(frozen=True)
class FlatBuffer:
    """The elements of a buffer as a flat array.

    Attributes:
        dtype: one of :data:`DTYPES`.
        data: elements, shape ``(n,)``; uint16 for bfloat16, uint8 for bool.
        owner: object that keeps the memory alive.
        shape: shape of the original array.
        strided: the original array if it is not C-contiguous; ``data`` is then separate memory.
        is_read: whether the operation reads the elements.
        is_written: whether the operation writes the elements.
    """

    dtype: str
    data: np.ndarray[Any, Any]
    owner: object = None
    shape: tuple[int, ...] = ()
    strided: np.ndarray[Any, Any] | None = None
    is_read: bool = True
    is_written: bool = False

    def pack(self) -> None:
        """Copy the elements of ``strided``, if any, to ``data``; to be called before ``data`` is read."""
        if self.strided is not None and self.is_read:
            self._as_strided()[...] = self.strided

    def unpack(self) -> None:
        """Copy the elements of ``data`` to ``strided``, if any; to be called after ``data`` was written."""
        if self.strided is not None and self.is_written:
            self.strided[...] = self._as_strided()

    def _as_strided(self) -> np.ndarray[Any, Any]:
        assert self.strided is not None
        elements: np.ndarray[Any, Any] = self.data.view(self.strided.dtype)
        return elements.reshape(self.strided.shape)

    @property
    def unread(self) -> np.ndarray[Any, Any]:
        """The elements as unsigned integers of the same width, for libraries that only move them."""
        return self.data.view(f"u{self.data.itemsize}")


def zeros(count: int, dtype: str) -> FlatBuffer:
    """A new buffer of ``count`` zeros."""
    return FlatBuffer(dtype=dtype, data=np.zeros(count, storage_of(dtype)))


def storage_of(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of ``FlatBuffer.data`` for ``dtype``."""
    storage: np.dtype[Any] = np.dtype(_STORAGE.get(dtype, dtype))
    return storage


def flatten(array: Any, *, reads: bool = True, writes: bool = False) -> FlatBuffer:
    """View a CPU buffer of one of :data:`DTYPES` as a flat array of the same memory.

    A buffer that is not C-contiguous gets separate memory; ``pack()`` and ``unpack()`` copy the elements.

    Args:
        array: NumPy array, or any object with ``__dlpack__``.
        reads: whether the operation reads the elements.
        writes: whether the operation writes the elements.

    Raises:
        ParamError: if the buffer is not in CPU memory or has another dtype, or if it is to be written but is read-only
            or has elements that share memory.
    """
    if isinstance(array, np.ndarray):
        name = _NUMPY_NAMES.get(array.dtype)
        if name is None:
            raise _unknown(array.dtype.name if array.dtype.isnative else f"{array.dtype.str} (byte-swapped)")
        if writes and not array.flags.writeable:
            raise ParamError(f"array of shape {array.shape} is read-only; pass a writable array")
        if not array.flags.c_contiguous:
            return _stand_in(name, array, array, reads=reads, writes=writes)
        data = array.reshape(-1)
        elements = data.view(np.uint8) if name == "bool" else data
        return FlatBuffer(dtype=name, data=elements, owner=array, shape=array.shape)
    if not hasattr(array, "__dlpack__"):
        raise ParamError(f"{type(array).__name__} is not a NumPy array and has no __dlpack__ method")
    if getattr(array, "is_neg", bool)():  # torch exports such a tensor without the negation
        raise ParamError(f"{type(array).__name__} is yet to be negated; pass tensor.resolve_neg()")
    try:
        is_here = array.__dlpack_device__()[0] in _CPU_DEVICES
        capsule = array.__dlpack__() if is_here else None
    except (BufferError, RuntimeError, ValueError) as error:
        # The standard asks for a BufferError. torch 2.4 and earlier raised RuntimeError, and ValueError for devices
        # that DLPack does not know.
        raise ParamError(f"{type(array).__name__} cannot be used: {error}") from error
    if capsule is None:
        raise ParamError(f"{type(array).__name__} is not in CPU memory")
    return _flatten_capsule(array, capsule, reads=reads, writes=writes)


def _stand_in(
    name: str, array: np.ndarray[Any, Any], owner: object, *, reads: bool, writes: bool
) -> FlatBuffer:
    if writes and _may_overlap(array):
        raise ParamError(
            f"array of shape {array.shape} has elements that share memory and cannot all be written; pass a copy"
        )
    data = np.empty(array.size, storage_of(name))
    return FlatBuffer(
        dtype=name, data=data, owner=owner, shape=array.shape, strided=array, is_read=reads, is_written=writes
    )


def _may_overlap(array: np.ndarray[Any, Any]) -> bool:
    """Whether elements may share memory; never the case for an array made by slicing and permuting."""
    reach = array.itemsize - 1
    for stride, extent in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if extent > 1 and stride <= reach:
            return True
        reach += stride * (extent - 1) if extent > 1 else 0
    return False


def _flatten_capsule(array: Any, capsule: object, *, reads: bool, writes: bool) -> FlatBuffer:
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = ctypes.cast(get_pointer(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    name = _NAMES.get((tensor.type_code, tensor.type_bits)) if tensor.type_lanes == 1 else None
    if name is None:
        raise _unknown(f"DLPack type {tensor.type_code} of {tensor.type_bits} bits")
    shape = tuple(tensor.shape[: tensor.ndim])
    storage = storage_of(name)
    if 0 in shape:  # regardless of its strides
        return FlatBuffer(dtype=name, data=np.empty(0, storage), owner=array, shape=shape)
    if tensor.data is None:
        raise ParamError(
            f"{type(array).__name__} has no data pointer, like fake and wrapper tensors; pass a plain tensor"
        )
    num_elements, is_contiguous = 1, True
    for position in reversed(range(tensor.ndim)):
        if tensor.strides and shape[position] > 1:
            is_contiguous = is_contiguous and tensor.strides[position] == num_elements
        num_elements *= shape[position]
    address, owner = tensor.data + tensor.byte_offset, (array, capsule)
    if is_contiguous:
        memory = (ctypes.c_char * (num_elements * storage.itemsize)).from_address(address)
        elements = np.frombuffer(memoryview(memory), storage)
        return FlatBuffer(dtype=name, data=elements, owner=owner, shape=shape)
    strides = [stride * storage.itemsize for stride in tensor.strides[: tensor.ndim]]
    # Offsets in bytes of the lowest and the highest element from the first one.
    lowest, highest = (
        sum(pick(0, stride * (extent - 1)) for stride, extent in zip(strides, shape, strict=True))
        for pick in (min, max)
    )
    memory = (ctypes.c_char * (highest - lowest + storage.itemsize)).from_address(address + lowest)
    strided: np.ndarray[Any, Any] = np.ndarray(shape, storage, memoryview(memory), -lowest, strides)
    return _stand_in(name, strided, owner, reads=reads, writes=writes)


def _unknown(dtype: str) -> ParamError:
    return ParamError(f"dtype {dtype} cannot be communicated; it may be one of {', '.join(DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class DeviceArray:
    """A C-contiguous array in GPU memory.

    Attributes:
        pointer: address of the first element.
        count: number of elements.
        dtype: NumPy's name of the element type, or ``"bfloat16"``.
        gpu: number of the GPU in this process; None if the array does not say.
        owner: object that keeps the memory alive.
    """

    pointer: int
    count: int
    dtype: str
    gpu: int | None = None
    owner: Any = None
