"""Metrics of one rank; tests/training/test_validation.py combines those of several ranks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import (
    AUROC,
    Accuracy,
    MeanSquaredError,
    MetricCollection,
    MultioutputWrapper,
    PearsonCorrCoef,
    SpearmanCorrCoef,
)
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from sparkdl.errors import ParamError, TrainingError
from sparkdl.training.metrics import EpochMetrics

ALONE = SimpleNamespace(world_size=1, rank=0)
CPU = torch.device("cpu")


def absolute_errors(outputs, targets):
    return (outputs - targets).abs()


def mean_absolute_error(outputs, targets):
    return float((outputs - targets).abs().mean())


def metrics_of(metrics, batches):
    made = EpochMetrics(metrics, CPU)
    for outputs, targets in batches:
        evaluation = SimpleNamespace(outputs=torch.tensor(outputs), targets=torch.tensor(targets))
        made.add(evaluation, len(outputs))
    return made.close(ALONE)[0]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_functions_are_means_over_rows_however_the_rows_are_cut_into_batches(sizes):
    rng = np.random.default_rng(sum(sizes))
    batches = [(rng.normal(size=(size, 2)).tolist(), rng.normal(size=(size, 2)).tolist()) for size in sizes]
    joined = tuple([row for batch in batches for row in batch[side]] for side in (0, 1))
    joined_values = metrics_of({"per row": absolute_errors}, [joined])
    found = metrics_of({"per row": absolute_errors, "mean": mean_absolute_error}, batches)
    assert found == pytest.approx({"per row": joined_values["per row"], "mean": joined_values["per row"]})


@pytest.mark.parametrize(
    "metric", [MulticlassAccuracy(3, average="micro"), partial(MulticlassAccuracy, 3, average="micro")]
)
def test_torchmetrics_and_factories_of_them_are_accepted(metric):
    batches = [([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [0, 0]), ([[0.0, 0.0, 1.0]], [2])]
    assert metrics_of({"accuracy": metric}, batches) == pytest.approx({"accuracy": 2 / 3})
    # The metric is copied and reset, so that another pass only counts its own rows.
    assert metrics_of({"accuracy": metric}, batches[1:]) == {"accuracy": 1.0}


def test_class_without_arguments_makes_a_metric_and_classification_takes_float_labels():
    batches = [([0.9, 0.2, 0.6, 0.4], [1.0, 0.0, 0.0, 1.0])]
    assert metrics_of({"auroc": BinaryAUROC, "mse": MeanSquaredError}, batches) == pytest.approx(
        {"auroc": 0.75, "mse": 0.1925}
    )


@pytest.mark.parametrize("metric", [BinaryAUROC, partial(Accuracy, task="binary")])
def test_binary_metrics_of_two_class_scores_take_the_probability_of_the_second(metric):
    scores = torch.randn(390, 2, generator=torch.Generator().manual_seed(0)) * 4
    labels = [index % 2 for index in range(390)]
    expected = float(metric()(scores.softmax(dim=1)[:, 1], torch.tensor(labels)))
    assert metrics_of({"m": metric}, [(scores.tolist(), labels)]) == pytest.approx({"m": expected})


def test_a_pass_without_rows_has_no_value():
    found = metrics_of({"error": absolute_errors, "r": PearsonCorrCoef}, [])
    assert list(found) == ["error", "r"]
    assert np.isnan(list(found.values())).all()


STATES = {
    "mse": MeanSquaredError,  # sums
    "r": PearsonCorrCoef,  # states that only the metric itself can merge
    "rho": SpearmanCorrCoef,  # lists of all values
    "error": absolute_errors,
}


@pytest.mark.filterwarnings("ignore:Metric `Spearman")
@settings(deadline=None, max_examples=40)
@given(
    cuts=st.lists(st.integers(1, 11), min_size=3, max_size=3, unique=True).map(sorted),
    again=st.booleans(),
)
def test_metrics_of_two_ranks_continue_on_one(cuts, again):
    """Also from a checkpoint taken later in the same epoch."""
    rng = np.random.default_rng(cuts)
    outputs, targets = (torch.from_numpy(rng.normal(size=12)) for _ in range(2))

    def add(metrics, start, stop):
        rows = slice(start, stop)
        metrics.add(SimpleNamespace(outputs=outputs[rows], targets=targets[rows]), stop - start)

    first, second, whole = (EpochMetrics(STATES, CPU) for _ in range(3))
    add(first, 0, cuts[0])
    add(second, cuts[0], cuts[1])
    alone = EpochMetrics(STATES, CPU)
    alone.load_state_dicts([first.state_dict(), second.state_dict()])
    add(alone, cuts[1], cuts[2])
    if again:
        states = [alone.state_dict()]
        alone = EpochMetrics(STATES, CPU)
        alone.load_state_dicts(states)
    add(alone, cuts[2], 12)
    add(whole, 0, 12)
    assert alone.close(ALONE)[0] == pytest.approx(whole.close(ALONE)[0], rel=1e-4)


def failing(outputs, targets):
    raise KeyError("no such key")


def two_values(outputs, targets):
    return torch.zeros(2)


def makes_a_number():
    return 3


@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        (failing, TrainingError, "Metric 'm' failed: KeyError: 'no such key'"),
        (two_values, ParamError, r"'m' returned shape \(2,\) for 3 rows"),
        (makes_a_number, ParamError, "'m' is a function .* returned a int"),
        (
            MeanSquaredError() + PearsonCorrCoef(),
            ParamError,
            "is a CompositionalMetric, which consists of other",
        ),
        (
            MultioutputWrapper(MeanSquaredError(), 2),
            ParamError,
            "is a MultioutputWrapper, which consists of other",
        ),
        (
            MetricCollection([MeanSquaredError()]),
            ParamError,
            "is a MetricCollection, which consists of other",
        ),
        (AUROC, ParamError, "Metric 'm' cannot be made: TypeError"),
        (
            partial(MulticlassAccuracy, 2, average=None),
            TrainingError,
            r"Metric 'm' is not one number but \(2,\). Choose an average",
        ),
    ],
)
def test_a_metric_that_cannot_be_used_is_named(metric, error, message):
    with pytest.raises(error, match=message):
        metrics_of({"m": metric}, [([1.0, 0.0, 1.0], [1, 0, 1])])
