from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.errors import DataError
from sparkdl.estimators.scoring import ScoringModel, load_predictor, score_batch, score_columns
from sparkdl.training.architecture import pack_module
from tests.training.signatures import make_signature


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


def test_a_model_is_loaded_once_per_process():
    model, _ = make_model()
    assert load_predictor(model) is load_predictor(model)
    assert load_predictor(make_model()[0]) is not load_predictor(model)
