"""Memory and streams of the stand-in for CUDA, whose GPUs use the memory of the process."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from sparkdl.collective.buffers import DeviceArray


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class GpuArray(DeviceArray):
    """An array in memory of a GPU, for which NCCL finds out the GPU."""

    def __init__(self, values: Any, gpu: int, dtype: Any = None) -> None:
        source = np.ascontiguousarray(values, dtype)
        context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
        call("cuCtxPushCurrent_v2", context)
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(1, source.nbytes)))
        call("cuCtxPopCurrent_v2", ctypes.byref(context))
        assert pointer.value is not None
        super().__init__(
            pointer=pointer.value, count=source.size, dtype=source.dtype.name, owner=source.shape
        )
        self.host[...] = source

    @property
    def host(self) -> np.ndarray:
        """The same memory as a NumPy array."""
        shape: Any = self.owner
        memory = (ctypes.c_byte * (self.count * np.dtype(self.dtype).itemsize)).from_address(self.pointer)
        return np.frombuffer(memory, self.dtype).reshape(shape)


def new_stream() -> int:
    """Create a stream; return it as an integer."""
    stream = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(stream), 0)
    assert stream.value is not None
    return stream.value


def call(name: str, *arguments: Any) -> None:
    result = getattr(driver(), name)(*arguments)
    assert result == 0, f"{name} returned {result}"
