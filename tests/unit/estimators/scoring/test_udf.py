from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.data import Column
from sparkdl.errors import DataError
from sparkdl.estimators.scoring.models import ScoringModels
from sparkdl.estimators.scoring.udf import ScoringModel, load_predictor, score_batch, score_columns
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from tests.training.signatures import make_inputs, make_signature, packed


def make_model(shape=(2,), prediction_shape=(3,)):
    torch.manual_seed(0)
    kind = "value" if prediction_shape else "class"
    signature = make_signature(shape, kind, prediction_shape)
    module = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3))
    return ScoringModel(*packed(module), signature, 4), module


def predictor_of(made):
    """The predictor of what :func:`make_model` returns."""
    model, module = made
    return Predictor(SavedModel(module, model.signature), batch_size=4)


ROWS = [[1.0, 2.0], [3.0, -1.0], [0.5, 0.0], [2.0, 2.0], [9.0, 1.0]]


def test_arrays_of_any_kind_slices_of_them_and_scalars_are_scored():
    predictor = load_predictor(make_model()[0])
    expected = make_model()[1](torch.tensor(ROWS)).detach().double().tolist()
    for kind in (pa.list_(pa.float64()), pa.list_(pa.float32()), pa.list_(pa.float64(), 2)):
        column = pa.array([[0.0, 0.0], *ROWS], kind)[1:]
        assert score_batch(predictor, (column,)).to_pylist() == expected
    scalars = predictor_of(make_model(shape=(), prediction_shape=()))
    assert len(score_batch(scalars, (pa.array([1.0, 2.0]),))) == 2


@pytest.mark.parametrize("prediction_shape", [(), (3,)])
def test_rows_with_null_and_rows_with_nan_answered_with_nan_have_null_predictions(prediction_shape):
    model, _ = make_model(prediction_shape=prediction_shape)
    nulls = pa.array([None, None], pa.list_(pa.float64()))
    holes = pa.array([None, ROWS[0], [math.nan, 1.0], ROWS[1], None, *ROWS[2:], [0.0, math.nan]])
    batches = [
        pa.array(ROWS),
        pa.array([None, *ROWS[:2], None, *ROWS[2:]]),
        nulls,
        holes,
        pa.array([[math.nan] * 2]),
    ]
    found = [scored.to_pylist() for scored in score_columns(model, ((batch,) for batch in batches))]
    whole = found[0]
    assert found[1] == [None, *whole[:2], None, *whole[2:]]
    assert found[2] == [None, None]
    assert [prediction is None for prediction in found[3]] == [
        True,
        False,
        True,
        False,
        True,
        *[False] * 3,
        True,
    ]
    np.testing.assert_allclose(
        [prediction for prediction in found[3] if prediction is not None], whole, rtol=1e-5
    )
    assert found[4] == [None]


def test_module_is_packed_once_for_all_batch_sizes():
    _, module = make_model(prediction_shape=())
    models, session = ScoringModels(SavedModel(module, make_signature((2,), "value", ()))), object()
    first, other = models.for_session(session, 64), models.for_session(session, 128)
    assert models.for_session(session, 64) is first
    assert (other.structure, other.weights) == (first.structure, first.weights)
    assert other.weights is first.weights
    assert (other.batch_size, other.key == first.key) == (128, False)


def test_a_model_that_answers_finite_numbers_with_nan_is_an_error():
    model, module = make_model(prediction_shape=())
    with pytest.raises(DataError, match="1 of 5 .* 'x' holds infinity in 1"):
        next(score_columns(model, iter([(pa.array([*ROWS[:4], [math.inf, 0.0]]),)])))
    with torch.no_grad():
        module[1].bias.fill_(math.nan)
    broken = Predictor(SavedModel(module, model.signature))
    with pytest.raises(DataError, match="NaN for 5 of 5 "):
        score_batch(broken, (pa.array(ROWS),))


def test_rows_that_do_not_fit_are_named():
    predictor = predictor_of(make_model())
    with pytest.raises(DataError, match="'x' has arrays of 1 to 2 elements.*model was trained on") as refusal:
        score_batch(predictor, (pa.array([[1.0, 2.0], [1.0]]),))
    assert "ParquetFeed" not in str(refusal.value)
    with pytest.raises(DataError, match="'x' has 1 null"):
        score_batch(predictor, (pa.array([[1.0, None]]),))


def test_error_of_a_failing_model_describes_its_input():
    ids = Column(name="x", dtype="int64", shape=(2,))
    output = ModelOutput(name="y", kind="value", shape=(2, 3))
    signature = ModelSignature(inputs=make_inputs("x", dtypes=("int64",), x=ids), outputs=(output,))
    predictor = Predictor(SavedModel(nn.Embedding(5, 3), signature))
    with pytest.raises(DataError, match=r"IndexError: .* x int64 \(2, 2\) from 0 to 9"):
        score_batch(predictor, (pa.array([[0, 1], [9, 1]]),))


def test_a_model_is_loaded_once_per_process():
    model, _ = make_model()
    assert load_predictor(model) is load_predictor(model)
    assert load_predictor(make_model()[0]) is not load_predictor(model)


class Knotted(nn.Module):
    """A module that refers to itself, so that only the garbage collector frees it; it notes who is called."""

    called: ClassVar[list[weakref.ref]] = []

    def __init__(self):
        super().__init__()
        self.knot = [self]

    def forward(self, rows):
        Knotted.called.append(weakref.ref(self))
        return rows


@pytest.mark.slow
def test_garbage_collector_skips_imported_objects_and_frees_unused_models():
    knotted, signature = packed(Knotted()), make_signature((2,), "value", (2,))
    for _ in range(4):
        load_predictor(ScoringModel(*knotted, signature, 4)).predict({"x": np.zeros((1, 2), np.float32)})
    assert gc.get_freeze_count() > 0
    garbage = Knotted()
    lost = weakref.ref(garbage)
    del garbage
    load_predictor(make_model()[0])
    assert lost() is None
    assert [module() is None for module in Knotted.called] == [True, False, False, False]
    gc.unfreeze()


class Sized(nn.Module):
    """A module that adds columns, and notes their shapes."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, a, b, c):
        self.shapes.append({tuple(column.shape) for column in (a, b, c)})
        return a + 10 * b + 100 * c


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 4), (20_000, 6000), (40_000, 20_000)])
@pytest.mark.parametrize("given_by", ["position", "name"])
def test_many_columns_of_numbers_are_cut_into_passes(given_by, num_rows, batch_size):
    inputs = replace(make_inputs("a", "b", "c"), given_by=given_by)
    signature = ModelSignature(inputs=inputs, outputs=(ModelOutput(name="y", kind="value"),))
    module = Sized()
    predictor = Predictor(SavedModel(module, signature), batch_size=batch_size)
    count = np.arange(num_rows, dtype=np.float32)
    columns = {"c": np.full(num_rows, 3), "b": count.astype(float)[::-1], "a": count}
    assert predictor.predict(columns)["y"].tolist() == (300 + count + 10 * count[::-1]).tolist()
    sizes = [min(batch_size, num_rows - start) for start in range(0, num_rows, batch_size)]
    assert module.shapes == [{(size, 1)} for size in sizes]
    assert predictor.predict({name: values[:0] for name, values in columns.items()})["y"].shape == (0,)
    assert len(module.shapes) == len(sizes)
