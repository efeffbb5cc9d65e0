from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.collective.buffers import DTYPES, flatten
from sparkdl.collective.mpi.operations import Signature
from sparkdl.collective.mpi.reductions import narrow_into, reduction_of, widen
from sparkdl.errors import ParamError
from tests.collective.checks.bfloat16_array import Bfloat16Array
from tests.collective.checks.element_types import decode

torch = pytest.importorskip("torch", reason="bfloat16 is compared with torch's rounding")


def how(dtype: str, op: str, **factors: Any) -> Signature:
    return Signature(kind="allreduce", dtype=dtype, op=op, **factors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_is_seen_without_a_copy(dtype: str) -> None:
    tensor = torch.ones(2, 3, dtype=getattr(torch, dtype))
    buffer = flatten(tensor)
    assert (buffer.dtype, buffer.data.shape) == (dtype, (6,))
    buffer.data[:] = 0
    assert not tensor.any()


def test_slice_of_a_tensor_starts_where_the_slice_does() -> None:
    tensor = torch.arange(10, dtype=torch.float32)
    assert flatten(tensor[4:7]).data.tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 0, 3)])
def test_tensor_without_elements_is_flat_whatever_its_shape(shape: tuple[int, ...]) -> None:
    assert flatten(torch.zeros(shape, dtype=torch.bfloat16)).data.size == 0
    assert flatten(Bfloat16Array(np.zeros(shape))).data.size == 0


@pytest.mark.parametrize(
    "array", [np.ones(3, np.complex64), torch.ones(3, dtype=torch.complex64), [1.0, 2.0]]
)
def test_unsupported_arrays_are_refused(array: Any) -> None:
    with pytest.raises(ParamError):
        flatten(array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(16.0).reshape(4, 4)[:, ::-2],
        np.arange(16).reshape(4, 4).T % 3 == 0,
        torch.arange(16.0).view(4, 4).t(),
        torch.arange(16.0).view(2, 8).to(torch.bfloat16)[:, 1:7:3],
        Bfloat16Array.of_bits(Bfloat16Array(np.arange(16.0)).bits[::-3]),
    ],
)
def test_noncontiguous_elements_are_packed_and_unpacked(array: Any) -> None:
    def elements() -> list[float]:
        values = array.float().numpy() if isinstance(array, torch.Tensor) else getattr(array, "values", array)
        return [float(value) for value in np.asarray(values).reshape(-1)]

    before, buffer = elements(), flatten(array, writes=True)
    buffer.pack()
    assert decode(buffer.data, buffer.dtype).tolist() == before
    buffer.data[...] = buffer.data[::-1].copy()
    buffer.unpack()
    assert elements() == before[::-1]


def test_overlapping_elements_can_be_read_but_not_written() -> None:
    shared = np.lib.stride_tricks.sliding_window_view(np.arange(4.0), 2, writeable=True)
    buffer = flatten(shared)
    buffer.pack()
    assert buffer.data.tolist() == [0, 1, 1, 2, 2, 3]
    with pytest.raises(ParamError, match="share memory"):
        flatten(shared, writes=True)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 100_000, dtype=np.uint32)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00008000, 0x00018000], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    rounded = np.empty(len(values), np.uint16)
    narrow_into(rounded, values.copy(), how("bfloat16", "sum"), 1)
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(widen(rounded, how("bfloat16", "sum")), expected)


@pytest.mark.parametrize("divisor", [1, 2, 3, 7])
def test_integer_average_is_rounded_toward_zero_and_keeps_its_sign_at_the_ends_of_the_range(
    divisor: int,
) -> None:
    ends = np.iinfo(np.int64)
    totals = [ends.min, ends.min + 1, -7, -1, 0, 1, 6, 7, ends.max - 1, ends.max]
    out = np.zeros(len(totals), np.int64)
    narrow_into(out, np.array(totals), how("int64", "avg"), divisor)
    assert out.tolist() == [abs(total) // divisor * (1 if total > 0 else -1) for total in totals]


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint64"])
def test_integers_are_scaled_as_float64_and_rounded_toward_zero(dtype: str) -> None:
    values = np.array([7, 8, 100]).astype(dtype)
    assert widen(values, how(dtype, "sum", prescale=0.3)).tolist() == [2, 2, 30]
    assert values.tolist() == [7, 8, 100]
    out = np.zeros(3, dtype)
    narrow_into(out, values, how(dtype, "sum", postscale=0.5), 2)
    assert out.tolist() == [3, 4, 50]


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64", "uint64"])
def test_scaled_integers_stop_at_the_ends_of_their_type(dtype: str) -> None:
    ends = np.iinfo(dtype)
    values = np.array([ends.max, ends.min], dtype)
    assert widen(values, how(dtype, "sum", prescale=3.0)).tolist() == [ends.max, ends.min]
    out = np.zeros(2, dtype)
    narrow_into(out, widen(values // 2, how(dtype, "avg")), how(dtype, "avg", postscale=9.0), 1)
    assert out.tolist() == [ends.max, ends.min]


@pytest.mark.parametrize(("factor", "scaled"), [(-1.0, 0), (0.5, 0), (1.5, 1), (300.0, 1)])
def test_scaled_bools_stop_at_false_and_true(factor: float, scaled: int) -> None:
    values = np.array([0, 1], np.uint8)
    assert widen(values, how("bool", "sum", prescale=factor)).tolist() == [0, scaled]
    out = np.zeros(2, np.uint8)
    narrow_into(out, values, how("bool", "sum", postscale=factor), 2)
    assert out.tolist() == [0, scaled]


def test_scaling_does_not_modify_its_input() -> None:
    values = np.array([1.0, 2.0], np.float32)
    assert widen(values, how("float32", "sum", prescale=2.0)).tolist() == [2.0, 4.0]
    assert values.tolist() == [1.0, 2.0]


def test_bools_have_no_average() -> None:
    with pytest.raises(ParamError, match="bools"):
        reduction_of("bool", op="avg")


def test_average_of_large_unsigned_integers_does_not_overflow_to_negative_ones() -> None:
    wide = widen(np.array([2**63], np.uint64), how("uint64", "avg"))
    out = np.zeros(1, np.uint64)
    narrow_into(out, wide, how("uint64", "avg"), 2)
    assert out.tolist() == [2**62]


@pytest.mark.parametrize(("dtype", "half"), [("uint8", 44), ("int8", 44), ("uint16", 300), ("int16", 300)])
def test_sums_of_small_integers_wrap_around_before_they_are_scaled(dtype: str, half: int) -> None:
    wide = widen(np.array([88], dtype), how(dtype, "sum"))
    out = np.zeros(1, dtype)
    narrow_into(out, wide + 512, how(dtype, "sum", postscale=0.5), 2)
    assert out.tolist() == [half]


def test_average_of_bytes_does_not_overflow() -> None:
    assert widen(np.array([250], np.uint8), how("uint8", "avg")).dtype == np.int64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_min_and_max_of_floats_use_integers_of_the_same_order(dtype: str) -> None:
    numbers = [-np.inf, -2.0, -(2.0**-14), -0.0, 0.0, 2.0**-14, 1.0, np.inf]
    values = np.array([*numbers, np.nan, -np.nan], np.float64 if dtype == "float64" else np.float32)
    stored = Bfloat16Array(values).bits if dtype == "bfloat16" else values.astype(dtype)
    for op in ("min", "max"):
        wide = widen(stored, how(dtype, op))
        assert wide.dtype.kind == "i"
        assert (np.diff(wide[: len(numbers)]) > 0).all()
        assert set(wide[-2:]) == {wide.min() if op == "min" else wide.max()}
        assert wide[-1] not in wide[: len(numbers)]
        out = np.empty_like(stored)
        narrow_into(out, wide, how(dtype, op), 1)
        assert out[: len(numbers)].tobytes() == stored[: len(numbers)].tobytes()
        assert np.isnan(Bfloat16Array.of_bits(out).values if dtype == "bfloat16" else out)[-2:].all()


def test_extremes_of_floats_are_scaled_as_floats() -> None:
    values = np.array([1.5, -3.0, np.nan], np.float32)
    out = np.empty_like(values)
    for op in ("min", "max"):
        narrow_into(
            out, widen(values, how("float32", op, prescale=-2.0)), how("float32", op, postscale=0.5), 2
        )
        np.testing.assert_array_equal(out, [-1.5, 3.0, np.nan])
    assert values[0] == 1.5


@pytest.mark.parametrize("op", ["sum", "product", "avg"])
def test_array_that_needs_no_wider_type_is_not_copied(op: str) -> None:
    values = np.ones(3, np.float32)
    assert widen(values, how("float32", op)) is values
