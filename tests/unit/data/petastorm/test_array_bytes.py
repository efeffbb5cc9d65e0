"""Arrays parsed from bytes as NumPy does, but without NumPy's parser, in which threads block each other."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from sparkdl.data.petastorm.fields import array_from_npy, array_from_npz


def saved(array: npt.NDArray[Any]) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


PLAIN = arrays.scalar_dtypes() | arrays.unicode_string_dtypes() | arrays.byte_string_dtypes()


@settings(max_examples=200, deadline=None)
@given(arrays.arrays(PLAIN, arrays.array_shapes(min_dims=0, min_side=0, max_side=4)))
def test_arrays_come_back_as_numpy_has_them(array: npt.NDArray[Any]) -> None:
    for given_array in (array, np.asfortranarray(array)):
        found, expected = array_from_npy(saved(given_array)), np.load(BytesIO(saved(given_array)))
        assert (found.dtype, found.shape, found.flags.writeable) == (expected.dtype, expected.shape, True)
        assert found.flags.f_contiguous == expected.flags.f_contiguous
        assert found.tobytes() == expected.tobytes()


def test_compressed_and_structured_arrays_are_restored() -> None:
    table = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", "<f8")])
    file = BytesIO()
    np.savez_compressed(file, arr=table)
    np.testing.assert_array_equal(array_from_npz(file.getvalue(), "arr"), table)
    np.testing.assert_array_equal(array_from_npy(bytearray(saved(table))), table)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (saved(np.arange(10))[:-1], "buffer is smaller"),
        (saved(np.array([None], object)), "allow_pickle=False"),
        (b"\x93NUMPY", "magic string"),
        (b"no array", "pickled"),
    ],
    ids=["cut short", "objects", "nothing behind the magic", "something else"],
)
def test_invalid_bytes_of_an_array_are_an_error(value: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        array_from_npy(value)


def test_plain_arrays_need_no_parser_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr(ast, "literal_eval", fail)
    for shape in ((), (3,), (2, 3)):
        expected = np.ones(shape, np.float32)
        np.testing.assert_array_equal(array_from_npy(saved(expected)), expected)


def test_threads_that_read_at_once_get_their_arrays() -> None:
    values = [saved(np.full((number % 7, 2), number, np.float32)) for number in range(300)]

    def wrong(_: int) -> list[int]:
        return [number for number, value in enumerate(values) if not np.all(array_from_npy(value) == number)]

    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(wrong, range(4))) == [[]] * 4
