from __future__ import annotations

import numpy as np
import pytest

from sparkdl.collective.buffers import flatten
from sparkdl.collective.mpi.operations import for_mpi, written_by_mpi
from sparkdl.errors import ParamError


@pytest.fixture
def odd() -> np.ndarray:
    """Misaligned elements."""
    return np.arange(17, dtype=np.uint8)[1:].view(np.float32)


def test_elements_at_odd_addresses_are_copied_only_for_mpi(odd: np.ndarray) -> None:
    assert np.shares_memory(flatten(odd).data, odd)
    copy = for_mpi(odd)
    assert copy.flags.aligned
    assert copy.tobytes() == odd.tobytes()
    assert for_mpi(copy) is copy


def test_copy_for_mpi_is_written_back_only_when_the_call_completes(odd: np.ndarray) -> None:
    before = odd.copy()
    with pytest.raises(InterruptedError), written_by_mpi(odd) as given:
        given[:] = 7.0
        raise InterruptedError
    assert odd.tobytes() == before.tobytes()
    with written_by_mpi(odd) as given:
        given[:] = 7.0
    assert odd.tolist() == [7.0] * 4


def test_empty_arrays_for_mpi_have_addresses_of_their_own() -> None:
    array = np.arange(3.0)
    first, second = for_mpi(array[:0]), for_mpi(array[:0])
    assert len({array.ctypes.data, first.ctypes.data, second.ctypes.data}) == 3


def test_read_only_array_is_refused_only_where_it_would_be_written() -> None:
    array = np.ones(3)
    array.setflags(write=False)
    assert flatten(array).data.tolist() == [1.0] * 3
    with pytest.raises(ParamError, match=r"shape \(3,\) is read-only"):
        flatten(array, writes=True)


def test_byte_swapped_array_is_refused_by_its_byte_order() -> None:
    with pytest.raises(ParamError, match=r"dtype >f4 \(byte-swapped\) cannot be communicated"):
        flatten(np.ones(3, ">f4"))


def test_tensor_that_requires_gradients_is_refused_with_the_reason() -> None:
    torch = pytest.importorskip("torch", reason="its tensors with gradients do not")
    with pytest.raises(ParamError, match="Tensor cannot be used: .*gradient"):
        flatten(torch.ones(3, requires_grad=True))


def test_array_in_gpu_memory_is_refused_before_dlpack_is_called() -> None:
    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self) -> object:
            raise AssertionError("asked for")

    with pytest.raises(ParamError, match=r"^OnGpu is not in CPU memory$"):
        flatten(OnGpu())
