"""Arrays in GPU memory are recognized by their description."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.collective.buffers import DeviceArray, device_array
from sparkdl.errors import ParamError


class OnGpu:
    """An array that says by DLPack that it is on a GPU."""

    def __init__(self, array: Any, kind: int = 2) -> None:
        self.array = array
        self.kind = kind
        self.stream: int | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 3

    def __dlpack__(self, stream: int | None = None) -> Any:
        self.stream = stream
        return self.array.__dlpack__()


class Described:
    """An array that describes itself as arrays of CuPy and Numba do."""

    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.__cuda_array_interface__ = {**array.__array_interface__, "version": 3, **changes}


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint64", "bool", "complex64"])
def test_dlpack_gives_address_size_type_and_gpu_without_waiting_for_a_stream(dtype: str) -> None:
    array = np.zeros((2, 3), dtype)
    owner = OnGpu(array)
    found = device_array(owner)
    assert found == DeviceArray(
        pointer=array.ctypes.data, count=6, dtype=dtype, gpu=3, is_writable=True, owner=owner
    )
    assert owner.stream == -1


def test_bfloat16_is_known_by_dlpack() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(5, dtype=torch.bfloat16)
    found = device_array(OnGpu(tensor))
    assert (found.pointer, found.count, found.dtype) == (tensor.data_ptr(), 5, "bfloat16")


def test_cuda_array_interface_gives_the_same_except_the_gpu() -> None:
    array = np.zeros((2, 3), np.int16)
    found = device_array(Described(array))
    assert (found.pointer, found.count, found.dtype) == (array.ctypes.data, 6, "int16")
    assert (found.gpu, found.is_writable) == (None, True)
    assert not device_array(Described(array, data=(array.ctypes.data, True))).is_writable


def test_empty_arrays_are_accepted() -> None:
    assert device_array(OnGpu(np.zeros((0, 3)))).count == 0
    assert device_array(Described(np.zeros((0, 3)), data=(0, False), strides=(800, 8))).count == 0


@pytest.mark.parametrize("wrap", [OnGpu, Described])
def test_array_with_gaps_is_refused(wrap: Any) -> None:
    with pytest.raises(ParamError, match="not C-contiguous"):
        device_array(wrap(np.zeros((4, 4))[:, :2]))


@pytest.mark.parametrize("wrap", [OnGpu, Described])
def test_dimensions_of_one_may_have_any_stride(wrap: Any) -> None:
    assert device_array(wrap(np.zeros((4, 4))[:1])).count == 4


def test_arrays_outside_cuda_memory_are_refused() -> None:
    with pytest.raises(ParamError, match="DLPack type 1"):
        device_array(np.zeros(3))
    with pytest.raises(ParamError, match="DLPack type 8"):
        device_array(OnGpu(np.zeros(3), kind=8))
    with pytest.raises(ParamError, match="got str"):
        device_array("tensor")


def test_elements_outside_the_array_are_refused() -> None:
    array = DeviceArray(pointer=1000, count=10, dtype="float32")
    assert array.elements(2, 8, 4) == 1008
    with pytest.raises(ParamError, match="elements 3 to 11 are outside an array of 10"):
        array.elements(3, 8, 4)
