"""Fits with class weights and balanced sampling: three ranks compute what one rank does, and what plain torch does."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from sparkdl.estimators import TorchEstimator
from sparkdl.estimators.fit.inputs import prepare_fit
from tests.run_ranks import run_ranks
from tests.training.scenes.training_scenes import assert_same_weights, make_model, train_all, write_dataset

NUM_ROWS, EPOCHS = 50, 4
CASES = {"weights": {"classWeights": "balanced"}, "sampling": {"sampling": "balanced"}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("rows") / "rows", NUM_ROWS)


def make_fit(dataset, num_ranks, batch_size, changes):
    estimator = TorchEstimator(
        model=make_model(),
        loss=nn.CrossEntropyLoss(),
        featuresCol="x",
        labelCol="y",
        batchSize=batch_size,
        epochs=EPOCHS,
        numWorkers=num_ranks,
        **{"optimizer": partial(torch.optim.SGD, lr=0.3), **changes},
    )
    return prepare_fit(estimator, dataset).spec, dataset


def train_plainly(dataset):
    """Plain training on all rows at once, with torch's own weights of classes."""
    table = pq.read_table(dataset.url.removeprefix("file://"))
    rows, labels = torch.tensor(np.stack(table["x"].to_numpy())), torch.tensor(table["y"].to_numpy())
    weights = (len(labels) / (3 * torch.bincount(labels))).float()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        nn.CrossEntropyLoss(weights)(model(rows), labels).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def test_three_ranks_balance_classes_as_one_process_does(dataset):
    # One step per epoch, so that the order of the rows does not matter.
    of_three = run_ranks(3, train_all, [make_fit(dataset, 3, 200, changes) for changes in CASES.values()])[0]
    expected = train_plainly(dataset)
    for outcome in of_three:
        assert_same_weights(outcome.weights, expected, atol=2e-6)


def test_loss_of_validation_rows_is_balanced_as_with_class_weights(dataset):
    # The weights do not change, so that both fits validate the same model.
    still = {"optimizer": partial(torch.optim.SGD, lr=0.0), "validationFraction": 0.4}
    cases = [make_fit(dataset, 2, 5, {**changes, **still}) for changes in CASES.values()]
    weighted, sampled = run_ranks(2, train_all, cases)[0]
    expected = weighted.history[-1].metrics["val_loss"]
    assert sampled.history[-1].metrics["val_loss"] == pytest.approx(expected, rel=1e-5)
