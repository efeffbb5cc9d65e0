"""A bfloat16 array without torch: a stand-in for a torch tensor, for code that only calls ``__dlpack__``."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_BFLOAT_CODE = 4
_TYPE_CODE_OFFSET = 20
"""Offset of ``DLDataType.code`` in ``DLTensor``: after a pointer, a device of 8 bytes and ``ndim``."""


class Bfloat16Array:
    """Float32 values truncated to bfloat16, exported through DLPack."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.bits = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    @classmethod
    def of_bits(cls, bits: np.ndarray[Any, Any]) -> Bfloat16Array:
        """Make an array from elements as their bits, an array of dtype uint16."""
        array = cls.__new__(cls)
        array.bits = bits
        return array

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """The elements as float32."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)

    def __dlpack__(self, **_options: object) -> object:
        capsule = self.bits.__dlpack__()
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_uint8.from_address(
            get_pointer(capsule, b"dltensor") + _TYPE_CODE_OFFSET
        ).value = _BFLOAT_CODE
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)
