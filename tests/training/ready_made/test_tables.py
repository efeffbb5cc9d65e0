"""Ready-made networks on scikit-learn's data, on two ranks, against the same layers trained in plain PyTorch.

Noise: the plain trainings differ in initial weights and in the order of rows. The standard deviation of their metrics
on the test rows is 0.003 (accuracy on digits), 0.009 (breast cancer) and 0.009 (R2 of diabetes); the tolerance between
a ready-made network and their mean is about three times that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn import datasets
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn

from sparkdl.estimators import TorchClassifier, TorchRegressor
from tests.run_ranks import run_ranks
from tests.training.scenes.prepared_fits import predictions_of_trained, prepare
from tests.training.scenes.training_scenes import train_all

NUM_RANKS = 2
NUM_PLAIN = 4


@dataclass(frozen=True)
class Case:
    load: Callable
    estimator: type
    metric: Callable
    num_outputs: int
    least: float
    tolerated: float


CASES = {
    "digits": Case(datasets.load_digits, TorchClassifier, accuracy_score, 10, 0.95, 0.01),
    "breast cancer": Case(datasets.load_breast_cancer, TorchClassifier, accuracy_score, 2, 0.94, 0.025),
    "diabetes": Case(datasets.load_diabetes, TorchRegressor, r2_score, 1, 0.3, 0.03),
}


def split(case):
    features, labels = case.load(return_X_y=True)
    return train_test_split(features.astype(np.float32), labels, test_size=0.25, random_state=0)


def make_fit(case, folder, *, unit=1, **params):
    """The spec of a fit with nothing but column names, the rows that it reads, and its signature."""
    features, _, labels, _ = split(case)
    vectors = pa.array(features.tolist(), pa.list_(pa.float32()))
    estimator = case.estimator(**{"numWorkers": NUM_RANKS, **params})
    return prepare(estimator, folder, features=vectors, label=labels * unit)


def train_plainly(case, seed):
    """Train the same layers with the same optimizer, batches and epochs in plain PyTorch; return the metric."""
    features, tested, labels, expected = split(case)
    is_regression = case.num_outputs == 1
    scaler, labels_scaler = StandardScaler().fit(features), StandardScaler().fit(labels[:, None])
    x = torch.from_numpy(scaler.transform(features)).float()
    y = torch.from_numpy(labels_scaler.transform(labels[:, None]) if is_regression else labels)
    torch.manual_seed(seed)
    sizes = [x.shape[1], 128, 64]
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.1))]
    model = nn.Sequential(*hidden, nn.Linear(64, case.num_outputs))
    loss = nn.MSELoss() if is_regression else nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(64 * NUM_RANKS):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows].float() if is_regression else y[rows].long()).backward()
            optimizer.step()
    with torch.no_grad():
        outputs = model.eval()(torch.from_numpy(scaler.transform(tested)).float()).numpy()
    predicted = labels_scaler.inverse_transform(outputs) if is_regression else outputs.argmax(axis=1)
    return case.metric(expected, predicted)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("digits", marks=pytest.mark.slow),
        "breast cancer",
        pytest.param("diabetes", marks=pytest.mark.slow),
    ],
)
def test_a_ready_made_network_is_as_good_as_the_same_layers_in_plain_torch(tmp_path, one_thread, name):
    case = CASES[name]
    _, tested, _, expected = split(case)
    metric = case.metric(expected, predictions_of_trained(make_fit(case, tmp_path / "rows"), tested))
    plain = [train_plainly(case, seed) for seed in range(NUM_PLAIN)]
    print(f"{name}: {metric:.4f}, plain torch {np.mean(plain):.4f} +- {np.std(plain, ddof=1):.4f}")
    assert metric > case.least
    assert abs(metric - np.mean(plain)) <= case.tolerated


def test_a_regression_learns_the_same_in_any_unit_of_its_labels(tmp_path, one_thread):
    """The results are equal to the bit for units that differ by powers of two, here up to a factor of a million."""
    units = (1.0, 2.0**-20, 2.0**20)
    fits = [
        make_fit(CASES["diabetes"], tmp_path / str(unit), unit=unit, numWorkers=1, epochs=3) for unit in units
    ]
    (outcomes,) = run_ranks(1, train_all, [(spec, dataset) for spec, dataset, _ in fits])
    ours = outcomes[0]
    for unit, outcome in zip(units, outcomes, strict=True):
        layers = [name for name in outcome.weights if name.startswith("layers")]
        assert len(layers) == 6
        for name in layers:
            np.testing.assert_array_equal(outcome.weights[name], ours.weights[name], err_msg=f"{unit} {name}")
        assert [record.loss for record in outcome.history] == pytest.approx(
            [record.loss * unit**2 for record in ours.history], rel=1e-6
        )
