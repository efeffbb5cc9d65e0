from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import DataError, ParamError
from sparkdl.model.inputs import pad_rows


def objects(rows):
    found = np.empty(len(rows), dtype=object)
    found[:] = rows
    return found


@given(
    st.lists(st.lists(st.integers(-(2**31), 2**31), max_size=7), min_size=1, max_size=9), st.integers(-5, 5)
)
def test_rows_are_padded_at_their_end_with_the_value(rows, value):
    padded = pad_rows(objects([np.array(row, np.int64) for row in rows]), name="x", value=value)
    longest = max(map(len, rows))
    assert padded.dtype == np.int64
    assert padded.tolist() == [[*row, *[value] * (longest - len(row))] for row in rows]


def test_matrices_are_padded_in_both_dimensions():
    rows = objects([np.ones((1, 3), np.float32), np.ones((2, 1), np.float32)])
    padded = pad_rows(rows, name="x", value=0)
    assert padded.dtype == np.float32
    assert padded.tolist() == [[[1, 1, 1], [0, 0, 0]], [[1, 0, 0], [1, 0, 0]]]


@pytest.mark.parametrize(
    ("rows", "value", "message"),
    [
        ([np.ones(2), np.ones(3)], None, r"'x' differ in shape, such as \(2,\) and \(3,\). Set paddingValue"),
        ([np.ones(2), np.ones((1, 2))], 0, "differ in shape, such as .* Make them alike"),
        ([np.ones(2, int), np.ones(1, int)], 0.5, "paddingValue is 0.5, and 'x' holds int64"),
        ([np.ones(2, int), np.ones(1, int)], float("nan"), "paddingValue is nan, and 'x' holds int64"),
        ([np.ones(2, np.uint8), np.ones(1, np.uint8)], -1, "paddingValue is -1, and 'x' holds uint8"),
        (["a", "b"], 0, "Column 'x' holds values that are not numbers, such as 'a'"),
        ([objects([np.ones(1), np.ones(2)])], 0, "arrays inside arrays that differ in length"),
    ],
)
def test_rows_that_cannot_form_one_array_are_named(rows, value, message):
    with pytest.raises((DataError, ParamError), match=message):
        pad_rows(objects(rows), name="x", value=value)
