from __future__ import annotations

import numpy as np
import pytest

from sparkdl.collective.flat_buffers import flatten
from sparkdl.collective.mpi_operations import for_mpi, written_by_mpi


@pytest.fixture
def odd() -> np.ndarray:
    """Elements that do not lie at multiples of their size."""
    return np.arange(17, dtype=np.uint8)[1:].view(np.float32)


def test_elements_at_odd_addresses_are_copied_only_for_mpi(odd: np.ndarray) -> None:
    assert np.shares_memory(flatten(odd).data, odd)
    copy = for_mpi(odd)
    assert copy.flags.aligned
    assert copy.tobytes() == odd.tobytes()
    assert for_mpi(copy) is copy


def test_copy_that_mpi_wrote_is_written_back_only_when_it_is_complete(odd: np.ndarray) -> None:
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
