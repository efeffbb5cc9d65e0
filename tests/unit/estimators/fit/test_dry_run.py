"""A user's train step: its trial before the fit starts, and the predictions of a model trained by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.estimators.fit.inputs import prepare_fit
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from tests.unit.estimators.fit_examples import (
    HEADS,
    Encoder,
    first_mean,
    loss_alone,
    loss_by_gradients,
    make_estimator,
)


def test_a_step_may_do_without_labels(dataset):
    estimator = make_estimator(loss=None, trainStep=loss_alone, labelCol=None)
    fit = prepare_fit(estimator, dataset)
    assert fit.spec.heads == ()
    assert [(output.name, output.kind, output.shape) for output in fit.signature.outputs] == [
        ("prediction", "value", (3,))
    ]
    rows = {"dense": np.zeros((2, 4), np.float32)}
    assert Predictor(SavedModel(nn.Linear(4, 3), fit.signature)).predict(rows)["prediction"].shape == (2, 3)


def test_trial_of_a_step_uses_gradients_and_restores_model_and_random_state(dataset):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    before = [tensor.clone() for tensor in model.state_dict().values()]
    estimator = make_estimator(
        model=model, loss=None, trainStep=loss_by_gradients, labelCol=None, batchSize=1
    )
    torch.manual_seed(0)
    spec = prepare_fit(estimator, dataset).spec
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert drawn == torch.rand(())
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert spec.has_unused_parameters  # the last bias


def test_fit_with_a_train_step_expects_unused_parameters(dataset):
    assert not prepare_fit(make_estimator(), dataset).spec.has_unused_parameters
    assert prepare_fit(make_estimator(loss=None, trainStep=loss_alone), dataset).spec.has_unused_parameters


@pytest.mark.parametrize("labels", [None, "number", ["number", "target"]])
def test_model_with_a_step_may_have_other_outputs_than_its_labels(dataset, labels):
    estimator = make_estimator(model=Encoder(), loss=None, trainStep=first_mean, labelCol=labels)
    signature = prepare_fit(estimator, dataset).signature
    assert [(output.name, output.shape) for output in signature.outputs] == [("prediction", (2,))]
    model, rows = Encoder(), np.ones((5, 4), np.float32)
    predicted = Predictor(SavedModel(model, signature)).predict({"dense": rows})["prediction"]
    np.testing.assert_allclose(predicted, model(torch.from_numpy(rows))[0].detach().numpy(), rtol=1e-6)


def test_model_with_a_step_and_one_output_per_label_predicts_each_label(dataset):
    def step(model, batch):
        return sum(output.mean() for output in model(batch["dense"]))

    estimator = make_estimator(**HEADS, loss=None, trainStep=step)
    outputs = prepare_fit(estimator, dataset).signature.outputs
    assert [(output.name, output.shape) for output in outputs] == [("number", (3,)), ("target", ())]
