from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from sparkdl.errors import DataError
from sparkdl.training.predictor import Predictor, decide
from sparkdl.training.pyfunc import PyfuncModel
from sparkdl.training.saved_model import SavedModel
from tests.training.signatures import make_signature


def make_pyfunc(shape=(3,), outputs=2, kind="class", prediction_shape=()):
    torch.manual_seed(0)
    signature = make_signature(shape, kind, prediction_shape)
    module = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), outputs))
    return PyfuncModel(Predictor(SavedModel(module, signature), batch_size=2))


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
    ],
)
def test_bad_input_is_named(frame, message):
    with pytest.raises(DataError, match=message):
        make_pyfunc().predict(pd.DataFrame(frame))


def test_outputs_become_decisions():
    outputs = torch.tensor([[0.2, 0.7], [-1.0, -2.0]])
    assert decide(outputs, "class").tolist() == [1, 0]
    assert decide(outputs, "binary_logit").tolist() == [[True, True], [False, False]]
    assert decide(outputs, "binary_probability").tolist() == [[False, True], [False, False]]
    assert decide(outputs, "value") is outputs
