from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.collective.flat_buffers import flatten
from sparkdl.collective.reductions import narrow_into, widen
from sparkdl.errors import ParamError

torch = pytest.importorskip("torch", reason="bfloat16 is compared with torch's rounding")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8"])
def test_tensor_is_seen_without_a_copy(dtype: str) -> None:
    tensor = torch.ones(2, 3, dtype=getattr(torch, dtype))
    buffer = flatten(tensor)
    assert (buffer.dtype, buffer.data.shape) == (dtype, (6,))
    buffer.data[:] = 0
    assert not tensor.any()


def test_slice_of_a_tensor_starts_where_the_slice_does() -> None:
    tensor = torch.arange(10, dtype=torch.float32)
    assert flatten(tensor[4:7]).data.tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    "array",
    [
        np.ones((4, 4))[:, ::2],
        np.ones(3, np.complex64),
        np.ones(3, np.int16),
        torch.ones(4, 4).t(),
        torch.ones(3, dtype=torch.complex64),
        [1.0, 2.0],
    ],
)
def test_what_cannot_be_sent_is_refused(array: Any) -> None:
    with pytest.raises(ParamError):
        flatten(array)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 100_000, dtype=np.uint32)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00008000, 0x00018000], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    rounded = np.empty(len(values), np.uint16)
    narrow_into(rounded, values.copy(), "bfloat16", "sum", 1)
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(widen(rounded, "bfloat16", "sum"), expected)


@pytest.mark.parametrize(("total", "average"), [(7, 3), (-7, -3), (1, 0), (-1, 0), (6, 3)])
def test_integer_average_is_rounded_toward_zero(total: int, average: int) -> None:
    out = np.zeros(1, np.int32)
    narrow_into(out, np.array([total]), "int32", "avg", 2)
    assert out.tolist() == [average]


def test_average_of_bytes_does_not_overflow() -> None:
    assert widen(np.array([250], np.uint8), "uint8", "avg").dtype == np.int64
