from __future__ import annotations

import math
from dataclasses import replace
from datetime import date

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from sparkdl.data import Column
from sparkdl.errors import DataError, ParamError
from sparkdl.model.decisions import decide
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.served_columns import to_column_dtype
from sparkdl.model.served_model import PyfuncModel
from sparkdl.model.signature import ModelOutput
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
    predicted = model.predict(rows).tolist()
    assert from_lists["prediction"].tolist() == from_arrays["prediction"].tolist() == predicted


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
        ({"x": [[1.0, 2.0, 3.0], [1.0, 2.0]]}, "Row 1 of column 'x' has 2 values, .* takes 3"),
        ({"x": [[1.0, 2.0, 3.0], None]}, "'x' holds null or NaN in 1 of 2 rows, .* row 1"),
        ({"x": [[1.0, None, 3.0]]}, "'x' holds null or NaN in 1 of 1 rows, .* row 0"),
        ({"x": [["a", "b", "c"]]}, "'x' holds values that are not numbers"),
        ({"x": [["1", "2", "3"]]}, "'x' holds values that are not numbers, such as '1'"),
        ({"x": [[1.0, pd.NA, 3.0]]}, "'x' holds null or NaN in 1 of 1 rows, .* row 0"),
        (
            {"x": [[0.0] * 3, [math.nan] * 3, [0.0] * 3, [0.0, 0.0, math.nan]]},
            "'x' holds null or NaN in 2 of 4 rows, .* row 1.* allow_nan",
        ),
        ({"x": [[0.0] * 3, [0.0, 1e300, 0.0]]}, "Row 1 of column 'x' holds 1e.300, .* trained on float32"),
    ],
)
def test_bad_input_is_named(frame, message):
    with pytest.raises(DataError, match=message):
        make_pyfunc().predict(pd.DataFrame(frame))


def test_array_is_refused_where_the_answer_needs_several_columns():
    rows = np.zeros((2, 3))
    assert make_pyfunc().predict(rows).shape == (2,)
    outputs = tuple(ModelOutput(name=name, kind="value") for name in ("kind", "size"))
    model = PyfuncModel(SavedModel(nn.Linear(3, 1), replace(make_signature((3,)), outputs=outputs)))
    with pytest.raises(DataError, match=r"gives 2 columns, kind, size: give a DataFrame with x"):
        model.predict(rows)


def number(dtype, shape=()):
    return Column(name="x", dtype=dtype, shape=shape)


def test_columns_reach_the_function_that_prepares_them_in_their_own_dtypes():
    seen = {}

    def prepare(columns):
        seen.update({name: (values.dtype.name, values.shape) for name, values in columns.items()})
        return {"x": np.zeros((1, 1), np.float32)}

    columns = {
        "small": number("float32"),
        "count": number("int32", (2,)),
        "tokens": replace(number("object"), kind="ragged", lengths=(None,), element=("number", "int16")),
        "words": Column(name="x", dtype="object", kind="string", shape=(2,)),
        "day": Column(name="x", dtype="datetime64[D]", kind="date"),
    }
    columns = {name: replace(column, name=name) for name, column in columns.items()}
    inputs = replace(make_inputs("x", prepare=prepare), columns=tuple(columns.values()))
    row = {"small": 1.5, "count": [1, 2], "tokens": [3, 4, 5], "words": ["a", "b"], "day": date(2020, 1, 2)}
    frame = pd.DataFrame([row])
    PyfuncModel(SavedModel(nn.Linear(1, 1), replace(make_signature(), inputs=inputs))).predict(frame)
    assert seen == {
        "small": ("float32", (1,)),
        "count": ("int32", (1, 2)),
        "tokens": ("object", (1,)),
        "words": ("object", (1, 2)),
        "day": ("datetime64[D]", (1,)),
    }
    (tokens,) = to_column_dtype(frame["tokens"], columns["tokens"])
    assert (tokens.dtype.name, tokens.tolist()) == ("int16", [3, 4, 5])


def test_outputs_become_decisions():
    outputs = torch.tensor([[0.2, 0.7], [-1.0, -2.0]])
    assert decide(outputs, "class").tolist() == [1, 0]
    assert decide(outputs, "binary_logit").tolist() == [[True, True], [False, False]]
    assert decide(outputs, "binary_probability").tolist() == [[False, True], [False, False]]
    assert decide(outputs, "value") is outputs


class FillsHoles(nn.Module):
    """A model that accepts NaN, like networks trained on rows with NaN."""

    def forward(self, x):
        return torch.nan_to_num(x, nan=-1.0).reshape(len(x), -1).sum(dim=1)


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        (number("float32"), [1.0, None, math.nan], [1.0, -1.0, -1.0]),
        (number("float32"), pd.array([1.0, None], "Float64"), [1.0, -1.0]),
        (number("float32", (2,)), [[1.0, None], [math.nan, 3.0]], [0.0, 2.0]),
    ],
)
def test_a_model_is_given_nan_if_the_request_says_so(column, values, expected):
    signature = replace(make_signature(), inputs=make_inputs("x", x=column))
    model = PyfuncModel(SavedModel(FillsHoles(), signature))
    frame = pd.DataFrame({"x": pd.Series(values)})
    with pytest.raises(DataError, match="'x' holds null or NaN in"):
        model.predict(frame)
    assert model.predict(frame, {"allow_nan": True})["prediction"].tolist() == expected
    with pytest.raises(ParamError, match="allow_nan is 'yes'. Give True or False"):
        model.predict(frame, {"allow_nan": "yes"})


class Echo(nn.Module):
    """A model that returns its input."""

    def forward(self, x):
        return x


INFINITY = math.inf


@pytest.mark.parametrize(
    ("kind", "rows", "bad"),
    [
        ("class", [[0.0, 1.0], [math.nan, 1.0], [math.nan, math.nan]], 2),
        ("class", [[0.0, 1.0], [INFINITY, 1.0], [-INFINITY, -INFINITY]], 2),
        ("class_margin", [[0.0, 1.0], [0.0, math.nan]], 1),
        ("binary_logit", [[0.0], [math.nan]], 1),
        ("binary_probability", [[0.5], [math.nan]], 1),
        ("value", [[0.5], [math.nan]], 1),
    ],
)
def test_nan_outputs_are_an_error_that_names_the_columns_with_nan(kind, rows, bad):
    width = len(rows[0])
    count = {"num_classes": width} if kind.startswith("class") else {}
    model = Predictor(SavedModel(Echo(), make_signature((width,), kind, **count)), batch_size=2)
    columns = {"x": np.array(rows, np.float32)}
    what = "NaN" if np.isnan(columns["x"]).any() else "infinity"
    told = f"NaN for {bad} of {len(rows)} rows, .* row 1, .* column 'x' holds {what} in {bad}"
    with pytest.raises(DataError, match=told):
        model.predict(columns)
    assert len(model.predict({"x": columns["x"][:1]})["y"]) == 1
    if what == "infinity":
        with pytest.raises(DataError, match="output is NaN for 2 of 3 rows"):
            model.answer_complete(columns, ("prediction",))
        return
    answers, without = model.answer_complete(columns, ("prediction",))
    assert without.tolist() == [False, *[True] * (len(rows) - 1)]
    assert len(answers["y"]["prediction"]) == len(rows) - bad


def test_scores_of_minus_infinity_are_probabilities_of_zero():
    model = Predictor(SavedModel(Echo(), make_signature((2,), "class", num_classes=2)))
    answers = model.answer({"x": np.array([[-INFINITY, 0.0]], np.float32)}, ("prediction", "probability"))
    assert answers["y"]["prediction"].tolist() == [1.0]
    assert answers["y"]["probability"].tolist() == [[0.0, 1.0]]


def test_a_model_that_has_diverged_names_no_class():
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, math.nan)
    saved = SavedModel(module, make_signature((3,), "class", num_classes=2))
    for rows in (pd.DataFrame({"x": [[0.0, 1.0, 2.0]] * 3}), np.zeros((3, 3))):
        with pytest.raises(DataError, match="NaN for 3 of 3 rows, .* finite numbers"):
            PyfuncModel(saved).predict(rows)
    with pytest.raises(DataError, match="output is NaN for 3 of 3 rows"):
        Predictor(saved).answer_complete({"x": np.zeros((3, 3), np.float32)}, ("prediction",))


def test_infinite_answer_is_an_error_as_json_has_no_infinity():
    model = PyfuncModel(SavedModel(Echo(), make_signature()))
    for rows in (pd.DataFrame({"x": [1.0, INFINITY]}), np.array([1.0, INFINITY])):
        with pytest.raises(DataError, match="'y' is infinite in 1 of 2 rows, .* row 1"):
            model.predict(rows)
