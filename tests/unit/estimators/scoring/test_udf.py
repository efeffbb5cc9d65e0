from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.data import Column
from sparkdl.errors import DataError
from sparkdl.estimators.scoring.udf import ScoringModel, load_predictor, score_batch, score_columns
from sparkdl.model.architecture import pack_module
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from tests.training.signatures import make_inputs, make_signature


def make_model(shape=(2,), prediction_shape=(3,)):
    torch.manual_seed(0)
    kind = "value" if prediction_shape else "class"
    signature = make_signature(shape, kind, prediction_shape)
    module = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3))
    return ScoringModel(pack_module(module), signature, 4), module


ROWS = [[1.0, 2.0], [3.0, -1.0], [0.5, 0.0], [2.0, 2.0], [9.0, 1.0]]


def test_arrays_of_any_kind_and_slices_of_them_are_scored():
    model, module = make_model()
    expected = module(torch.tensor(ROWS)).detach().double().tolist()
    for kind in (pa.list_(pa.float64()), pa.list_(pa.float32()), pa.list_(pa.float64(), 2)):
        column = pa.array([[0.0, 0.0], *ROWS], kind)[1:]
        assert score_batch(load_predictor(model), (column,)).to_pylist() == expected


def test_null_rows_have_null_predictions():
    for prediction_shape in ((), (3,)):
        model, _ = make_model(prediction_shape=prediction_shape)
        whole = next(score_columns(model, iter([(pa.array(ROWS),)]))).to_pylist()
        holes = pa.array([None, *ROWS[:2], None, *ROWS[2:]])
        found = next(score_columns(model, iter([(holes,)]))).to_pylist()
        assert found == [None, *whole[:2], None, *whole[2:]]
        only_null = next(
            score_columns(model, iter([(pa.array([None, None], pa.list_(pa.float64())),)]))
        ).to_pylist()
        assert only_null == [None, None]


def test_rows_with_nan_that_the_model_answers_with_nan_have_null_predictions():
    for prediction_shape in ((), (3,)):
        model, _ = make_model(prediction_shape=prediction_shape)
        whole = next(score_columns(model, iter([(pa.array(ROWS),)]))).to_pylist()
        holes = pa.array([None, ROWS[0], [math.nan, 1.0], ROWS[1], None, *ROWS[2:], [0.0, math.nan]])
        found = next(score_columns(model, iter([(holes,)]))).to_pylist()
        np.testing.assert_allclose(
            [each for each in found if each is not None], whole, rtol=1e-5, err_msg=str(prediction_shape)
        )
        assert [each is None for each in found] == [True, False, True, False, True, *[False] * 3, True]
        assert next(score_columns(model, iter([(pa.array([[math.nan] * 2]),)]))).to_pylist() == [None]


def test_a_model_that_answers_finite_numbers_with_nan_is_an_error():
    model, module = make_model(prediction_shape=())
    with torch.no_grad():
        module[1].bias.fill_(math.nan)
    broken = ScoringModel(pack_module(module), model.signature, 4)
    with pytest.raises(DataError, match="output is NaN for 5 of 5 rows, .* features are finite numbers"):
        next(score_columns(broken, iter([(pa.array(ROWS),)])))
    with pytest.raises(DataError, match="for 1 of 5 rows, .* column 'x' holds infinity in 1"):
        next(score_columns(model, iter([(pa.array([*ROWS[:4], [math.inf, 0.0]]),)])))


def test_scalars_are_features_too():
    model, _ = make_model(shape=(), prediction_shape=())
    assert len(next(score_columns(model, iter([(pa.array([1.0, 2.0]),)])))) == 2


def test_rows_that_do_not_fit_are_named():
    predictor = load_predictor(make_model()[0])
    with pytest.raises(
        DataError,
        match=r"'x' has arrays of 1 to 2 elements; all must have 2\. The model was trained on arrays",
    ) as refusal:
        score_batch(predictor, (pa.array([[1.0, 2.0], [1.0]]),))
    assert "ParquetFeed" not in str(refusal.value)
    with pytest.raises(DataError, match="'x' has 1 null"):
        score_batch(predictor, (pa.array([[1.0, None]]),))


def test_error_of_a_failing_model_describes_its_input():
    ids = Column(name="x", dtype="int64", shape=(2,))
    output = ModelOutput(name="y", kind="value", shape=(2, 3))
    signature = ModelSignature(inputs=make_inputs("x", dtypes=("int64",), x=ids), outputs=(output,))
    predictor = load_predictor(ScoringModel(pack_module(nn.Embedding(5, 3)), signature, 4))
    with pytest.raises(
        DataError,
        match=r"failed with IndexError: index out of range.* given x int64 \(2, 2\) from 0 to 9\. Look for rows",
    ):
        score_batch(predictor, (pa.array([[0, 1], [9, 1]]),))


def test_a_model_is_loaded_once_per_process():
    model, _ = make_model()
    assert load_predictor(model) is load_predictor(model)
    assert load_predictor(make_model()[0]) is not load_predictor(model)


class Knotted(nn.Module):
    """A module that refers to itself, so that only the garbage collector frees it."""

    def __init__(self):
        super().__init__()
        self.knot = [self]

    def forward(self, rows):
        return rows


def test_garbage_collector_skips_imported_objects_and_frees_unused_models():
    signature = make_signature((2,), "value", (2,))
    loaded = [
        weakref.ref(load_predictor(ScoringModel(pack_module(Knotted()), signature, 4))) for _ in range(4)
    ]
    modules = [weakref.ref(predictor()._module) for predictor in loaded]
    assert gc.get_freeze_count() > 0
    garbage = Knotted()
    lost = weakref.ref(garbage)
    del garbage
    load_predictor(make_model()[0])
    assert lost() is None
    assert [module() is None for module in modules] == [True, False, False, False]
    gc.unfreeze()


class Sized(nn.Module):
    """A module that adds columns, and notes their shapes."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, a, b, c):
        self.shapes.append({tuple(column.shape) for column in (a, b, c)})
        return a + 10 * b + 100 * c


@pytest.mark.parametrize("rows_at_once", [1, 9, 100])
@pytest.mark.parametrize("given_by", ["position", "name"])
def test_many_columns_of_numbers_are_cut_into_passes(given_by, rows_at_once, monkeypatch):
    monkeypatch.setattr("sparkdl.model.predictor._ROWS_AT_ONCE", rows_at_once)
    inputs = replace(make_inputs("a", "b", "c"), given_by=given_by)
    signature = ModelSignature(inputs=inputs, outputs=(ModelOutput(name="y", kind="value"),))
    module = Sized()
    predictor = Predictor(SavedModel(module, signature), batch_size=4)
    columns = {"c": np.full(10, 3), "b": np.arange(10.0)[::-1], "a": np.arange(10.0, dtype=np.float32)}
    assert predictor.predict(columns)["y"].tolist() == [390.0 - 9 * index for index in range(10)]
    assert module.shapes == [{(4, 1)}, {(4, 1)}, {(2, 1)}]
    assert predictor.predict({name: values[:0] for name, values in columns.items()})["y"].shape == (0,)
    assert len(module.shapes) == 3
