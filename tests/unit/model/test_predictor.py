from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdl.data import Column
from sparkdl.errors import DataError
from sparkdl.model.decisions import class_probabilities, class_scores, decide
from sparkdl.model.inputs import ModelInput, ModelInputs
from sparkdl.model.losses import prediction_kind
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature

LOSSES_OF_CLASSES = (nn.CrossEntropyLoss(), nn.NLLLoss(), nn.BCEWithLogitsLoss(), nn.BCELoss())


def outputs_for(loss, seed, rows, trailing):
    torch.manual_seed(seed)
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        scores = 9 * torch.randn(rows, 4)
        return scores.log_softmax(1) if isinstance(loss, nn.NLLLoss) else scores
    outputs = 9 * torch.randn((rows, 1) if trailing else (rows,))
    return outputs.sigmoid() if isinstance(loss, nn.BCELoss) else outputs


@given(
    loss=st.sampled_from(LOSSES_OF_CLASSES),
    seed=st.integers(0, 1000),
    rows=st.integers(0, 5),
    trailing=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_probabilities_match_the_loss_and_the_most_likely_class_is_predicted(loss, seed, rows, trailing):
    kind, outputs = prediction_kind(loss), outputs_for(loss, seed, rows, trailing)
    probabilities, scores = class_probabilities(outputs, kind), class_scores(outputs, kind)
    assert probabilities.shape == scores.shape == (rows, 4 if kind == "class" else 2)
    np.testing.assert_allclose(probabilities.sum(dim=1), np.ones(rows), rtol=0, atol=2e-6)
    predicted = decide(outputs, kind).reshape(rows).long()
    assert probabilities.argmax(dim=1).tolist() == scores.argmax(dim=1).tolist() == predicted.tolist()
    for row in range(rows):
        for label in range(probabilities.shape[1]):
            target = torch.tensor([label]) if kind == "class" else torch.full_like(outputs[:1], label)
            found = float(loss(outputs[row : row + 1], target))
            if found < 80:  # BCELoss clamps its logarithms at -100
                np.testing.assert_allclose(
                    -np.log(float(probabilities[row, label])), found, rtol=1e-3, atol=2e-5
                )


def test_scores_of_two_classes_match_sparks_logistic_regression():
    assert class_scores(torch.tensor([[2.0], [-0.5]]), "binary_logit").tolist() == [[-2.0, 2.0], [0.5, -0.5]]
    assert class_scores(torch.tensor([0.25]), "binary_probability").tolist() == [[0.75, 0.25]]
    assert class_scores(torch.tensor([[3.0, 1.0]]), "class_margin").tolist() == [[3.0, 1.0]]


def test_margins_predict_the_class_of_the_largest():
    kind = prediction_kind(nn.MultiMarginLoss())
    assert kind == "class_margin"
    assert decide(torch.tensor([[3.0, 1.0], [0.0, 1.0]]), kind).tolist() == [0, 1]


@pytest.mark.parametrize("value", [1.7, math.nan, math.inf])
def test_fractions_are_no_indices_of_an_embedding(value):
    inputs = ModelInputs(
        columns=(Column(name="x", dtype="int64"),), inputs=(ModelInput(name="x", dtype="int64"),)
    )
    outputs = (ModelOutput(name="y", kind="value", shape=(2,)),)
    predictor = Predictor(SavedModel(nn.Embedding(3, 2), ModelSignature(inputs=inputs, outputs=outputs)))
    assert predictor.predict({"x": np.array([1.0, 2.0])})["y"].shape == (2, 2)
    with pytest.raises(DataError, match="'x' holds .* takes it as int64, which has no such value"):
        predictor.predict({"x": np.array([1.0, value])})
