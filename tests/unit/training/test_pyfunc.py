from __future__ import annotations

import math
from dataclasses import replace
from datetime import date
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparkdl.data import Column
from sparkdl.errors import DataError
from sparkdl.training.predictor import decide
from sparkdl.training.pyfunc import PyfuncModel
from sparkdl.training.saved_model import SavedModel
from sparkdl.training.served_columns import as_trained
from sparkdl.training.signature import ModelOutput
from tests.training.signatures import make_inputs, make_signature


def make_pyfunc(shape=(3,), outputs=2, kind="class", prediction_shape=()):
    torch.manual_seed(0)
    signature = make_signature(shape, kind, prediction_shape)
    module = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), outputs))
    return PyfuncModel(SavedModel(module, signature))


def test_lists_arrays_and_a_numpy_array_give_the_same_predictions():
    model = make_pyfunc()
    rows = np.random.default_rng(0).normal(size=(5, 3))
    index = list("abcde")
    from_lists = model.predict(pd.DataFrame({"x": rows.tolist(), "other": 1}, index=index))
    from_arrays = model.predict(pd.DataFrame({"x": list(rows)}))
    assert from_lists.index.tolist() == index
    assert (
        from_lists["prediction"].tolist()
        == from_arrays["prediction"].tolist()
        == model.predict(rows).tolist()
    )


def test_arrays_and_scalars_have_their_shapes():
    values = make_pyfunc(outputs=4, kind="value", prediction_shape=(4,))
    assert values.predict(pd.DataFrame({"x": [[1.0, 2.0, 3.0]]}))["prediction"][0].shape == (4,)
    nested = make_pyfunc(shape=(2, 2))
    assert len(nested.predict(pd.DataFrame({"x": [[[1, 2], [3, 4]], [[1, 2], [3, 4]]]}))) == 2
    assert len(make_pyfunc().predict(pd.DataFrame({"x": []}))) == 0


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"y": [[1.0, 2.0, 3.0]]}, "There is no column 'x'. The columns are: y"),
        ({"x": [[1.0, 2.0, 3.0], [1.0, 2.0]]}, "Row 1 of column 'x' has 2 values, and the model takes 3"),
        ({"x": [[1.0, 2.0, 3.0], None]}, "Row 1 of column 'x' holds a null"),
        ({"x": [[1.0, None, 3.0]]}, "Row 0 of column 'x' holds a null"),
        ({"x": [["a", "b", "c"]]}, "'x' holds values that are not numbers"),
        ({"x": [["1", "2", "3"]]}, "'x' holds values that are not numbers, such as '1'"),
        ({"x": [[1.0, pd.NA, 3.0]]}, "Row 0 of column 'x' holds a null"),
        (
            {"x": [[0.0, 0.0, 0.0], [0.0, 1e300, 0.0]]},
            "Row 1 of column 'x' holds 1e.300, .* trained on float32",
        ),
    ],
)
def test_bad_input_is_named(frame, message):
    with pytest.raises(DataError, match=message):
        make_pyfunc().predict(pd.DataFrame(frame))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 3)), r"gives 2 columns, kind, size: give a DataFrame with x instead of an array"),
        (np.zeros((2, 4)), None),
    ],
)
def test_an_array_is_refused_where_one_cannot_answer_it(rows, message):
    shape = rows.shape[1:]
    outputs = tuple(ModelOutput(name=name, kind="value") for name in ("kind", "size"))
    signature = make_signature(shape) if message is None else replace(make_signature(shape), outputs=outputs)
    model = PyfuncModel(SavedModel(nn.Linear(shape[0], 1), signature))
    if message is None:
        assert model.predict(rows).shape == (2,)
        return
    with pytest.raises(DataError, match=message):
        model.predict(rows)


def number(dtype, shape=()):
    return Column(name="x", dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([1.0, math.nan], "int64", "Row 1 of column 'x' holds a null"),
        ([1.0, 1.7], "int64", "Row 1 of column 'x' holds 1.7, and the model was trained on int64"),
        ([1, 300], "int8", "Row 1 of column 'x' holds 300, and the model was trained on int8"),
        ([1, 2**63], "int64", "Row 1 of column 'x' holds 9223372036854775808, and"),
        ([-1], "uint8", "Row 0 of column 'x' holds -1, and"),
        ([True, 2], "bool", "Row 1 of column 'x' holds 2, and"),
        (pd.array([1, None], "Int64"), "int64", "Row 1 of column 'x' holds a null"),
        (pd.array([1.5, None], "Float64"), "float64", "Row 1 of column 'x' holds a null"),
        ([1.5, pd.NaT], "float64", "Row 1 of column 'x' holds a null"),
        (["7"], "int64", "not numbers, such as '7'"),
        ([Decimal("1.5"), "7"], "float64", "not numbers"),
    ],
)
def test_what_the_trained_dtype_does_not_hold_is_named(values, dtype, message):
    with pytest.raises(DataError, match=message):
        as_trained(pd.Series(values), number(dtype))


def holds(dtype, value):
    if dtype.startswith("float"):
        with np.errstate(over="ignore"):
            return math.isinf(value) or not np.isinf(np.dtype(dtype).type(value))
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return math.isfinite(value) and value == int(value) and low <= value <= high


@given(
    values=st.lists(st.integers(-(2**70), 2**70) | st.floats() | st.booleans(), min_size=1, max_size=4),
    dtype=st.sampled_from(["bool", "int8", "uint8", "int32", "int64", "float32", "float64"]),
)
def test_numbers_come_out_as_they_went_in_or_not_at_all(values, dtype):
    rows = pd.Series(values, dtype=object)
    if not all(holds(dtype, value) for value in values):
        with pytest.raises(DataError):
            as_trained(rows, number(dtype))
        return
    found = as_trained(rows, number(dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, [np.dtype(dtype).type(value) for value in values])


def test_columns_reach_the_function_that_prepares_them_in_their_own_dtypes():
    seen = {}

    def prepare(columns):
        seen.update({name: (values.dtype.name, values.shape) for name, values in columns.items()})
        return {"x": np.zeros((1, 1), np.float32)}

    columns = {
        "small": number("float32"),
        "count": number("int32", (2,)),
        "tokens": Column(
            name="x", dtype="object", kind="ragged", lengths=(None,), element=("number", "int16")
        ),
        "words": Column(name="x", dtype="object", kind="string", shape=(2,)),
        "day": Column(name="x", dtype="datetime64[D]", kind="date"),
    }
    columns = {name: replace(column, name=name) for name, column in columns.items()}
    signature = make_signature()
    inputs = make_inputs("x", prepare=prepare)
    signature = replace(signature, inputs=replace(inputs, columns=tuple(columns.values())))
    frame = pd.DataFrame(
        {
            "small": [1.5],
            "count": [[1, 2]],
            "tokens": [[3, 4, 5]],
            "words": [["a", "b"]],
            "day": [date(2020, 1, 2)],
        }
    )
    PyfuncModel(SavedModel(nn.Linear(1, 1), signature)).predict(frame)
    assert seen == {
        "small": ("float32", (1,)),
        "count": ("int32", (1, 2)),
        "tokens": ("object", (1,)),
        "words": ("object", (1, 2)),
        "day": ("datetime64[D]", (1,)),
    }
    (tokens,) = as_trained(frame["tokens"], columns["tokens"])
    assert (tokens.dtype.name, tokens.tolist()) == ("int16", [3, 4, 5])


def ragged(*lengths, element=("number", "float32")):
    return Column(name="x", dtype="object", kind="ragged", lengths=lengths, element=element)


def test_ragged_rows_are_nested_as_in_training():
    pairs = as_trained([[[1, 2], [3, 4], [5, 6]], []], ragged(None, 2))
    assert [row.shape for row in pairs] == [(3, 2), (0, 2)]
    (uneven,) = as_trained([[[1, 2], [3]]], ragged(None, None))
    assert [inner.tolist() for inner in uneven] == [[1.0, 2.0], [3.0]]
    (words,) = as_trained([["a", "b"]], ragged(None, element=("string", "object")))
    assert words.tolist() == ["a", "b"]
    for rows, column, message in (
        ([[1, 2], [1, None]], ragged(None), "Row 1 of column 'x' holds a null"),
        ([[0.5]], ragged(None, element=("number", "int64")), "Row 0 of column 'x' holds 0.5, and"),
        ([[[1, 2], [3]]], ragged(None, 2), "Row 0 of column 'x' has lists that differ in length"),
        (
            [[[1, 2, 3]]],
            ragged(None, 2),
            "Row 0 of column 'x' has the shape .1, 3., and the model takes lists of 2",
        ),
    ):
        with pytest.raises(DataError, match=message):
            as_trained(rows, column)


def test_outputs_become_decisions():
    outputs = torch.tensor([[0.2, 0.7], [-1.0, -2.0]])
    assert decide(outputs, "class").tolist() == [1, 0]
    assert decide(outputs, "binary_logit").tolist() == [[True, True], [False, False]]
    assert decide(outputs, "binary_probability").tolist() == [[False, True], [False, False]]
    assert decide(outputs, "value") is outputs
