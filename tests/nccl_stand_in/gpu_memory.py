"""Memory and streams of the stand-in for CUDA, whose GPUs use the memory of the process."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class GpuArray:
    """An array in memory of a GPU, which describes itself as CuPy's arrays do."""

    def __init__(self, values: Any, gpu: int, dtype: Any = None) -> None:
        source = np.ascontiguousarray(values, dtype)
        context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
        call("cuCtxPushCurrent_v2", context)
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(1, source.nbytes)))
        call("cuCtxPopCurrent_v2", ctypes.byref(context))
        self.pointer, self.shape, self.dtype = pointer.value, source.shape, source.dtype
        self.is_read_only = False
        self.strides: tuple[int, ...] | None = None
        self.host[...] = source

    @property
    def host(self) -> np.ndarray:
        """The same memory as a NumPy array."""
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        memory = (ctypes.c_byte * size).from_address(self.pointer)
        return np.frombuffer(memory, self.dtype).reshape(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, self.is_read_only),
            "strides": self.strides,
            "version": 3,
        }


def new_stream() -> int:
    """Create a stream; return it as an integer."""
    stream = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(stream), 0)
    assert stream.value is not None
    return stream.value


def call(name: str, *arguments: Any) -> None:
    result = getattr(driver(), name)(*arguments)
    assert result == 0, f"{name} returned {result}"
