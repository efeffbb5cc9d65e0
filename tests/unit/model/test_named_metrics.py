"""Metrics by name: values as scikit-learn computes them, for any division of the rows, and names that do not fit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.model.named_metrics import named_metric
from sparkdl.training.metrics import EpochMetrics

CPU = torch.device("cpu")
ALONE = SimpleNamespace(world_size=1)
NUM_ROWS = 10_000


def values(metrics, outputs, labels, cuts=(NUM_ROWS // 3, NUM_ROWS // 2)):
    """The metrics of rows that two ranks have seen, and of a rank that continues from their states."""
    parts = np.split(np.arange(NUM_ROWS), cuts)
    states = []
    for rows in parts[:2]:
        running = EpochMetrics(metrics, CPU)
        for batch in np.array_split(rows, 50):
            running.add(SimpleNamespace(outputs=outputs[batch], targets=labels[batch]), len(batch))
        states.append(running.state_dict())
    running = EpochMetrics(metrics, CPU)
    running.load_state_dicts(states)
    running.add(SimpleNamespace(outputs=outputs[parts[2]], targets=labels[parts[2]]), len(parts[2]))
    return running.close(ALONE)[0]


def of_classes(names, loss, num_classes=2):
    return {name: named_metric(name, loss, num_classes=num_classes) for name in names}


def rows_of(num_classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, num_classes, (NUM_ROWS,), generator=generator)
    outputs = torch.randn(NUM_ROWS, num_classes, generator=generator)
    return outputs + nn.functional.one_hot(labels, num_classes), labels


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.BCELoss()])
def test_metrics_of_two_classes_equal_scikit_learn(loss):
    outputs, labels = rows_of(2)
    margins = outputs[:, 1] - outputs[:, 0]
    if not isinstance(loss, nn.CrossEntropyLoss):
        outputs, labels = margins[:, None], labels[:, None].float()
        outputs = outputs.sigmoid() if isinstance(loss, nn.BCELoss) else outputs
    found = values(of_classes(["accuracy", "auroc", "f1_score"], loss), outputs, labels)
    labels = labels.flatten()
    assert found["accuracy"] == sklearn_metrics.accuracy_score(labels, margins > 0)
    assert found["auroc"] == pytest.approx(sklearn_metrics.roc_auc_score(labels, margins), abs=1e-4)
    assert found["f1_score"] == pytest.approx(sklearn_metrics.f1_score(labels, margins > 0), rel=1e-6)


def test_metrics_of_three_classes_equal_scikit_learn():
    outputs, labels = rows_of(3)
    labels[:100] = -100  # torch's label that does not count
    found = values(of_classes(["accuracy", "auroc"], nn.CrossEntropyLoss(), 3), outputs, labels)
    predicted, labels, probabilities = outputs[100:].argmax(1), labels[100:], outputs[100:].softmax(1)
    assert found["accuracy"] == sklearn_metrics.accuracy_score(labels, predicted)
    area = sklearn_metrics.roc_auc_score(labels, probabilities, multi_class="ovr")
    assert found["auroc"] == pytest.approx(area, rel=1e-5)


def test_metrics_of_numbers_equal_scikit_learn_also_far_from_zero():
    generator = torch.Generator().manual_seed(0)
    labels = 1e9 + 100 * torch.randn(NUM_ROWS, 1, generator=generator, dtype=torch.float64)
    outputs = labels + 20 * torch.randn(NUM_ROWS, 1, generator=generator, dtype=torch.float64)
    metrics = {
        name: named_metric(name, nn.MSELoss(), num_classes=None, center=float(labels[0]))
        for name in ("mae", "mse", "rmse", "r2")
    }
    found = values(metrics, outputs, labels.squeeze(1))
    assert found["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(labels, outputs))
    assert found["mse"] == pytest.approx(sklearn_metrics.mean_squared_error(labels, outputs))
    assert found["rmse"] == pytest.approx(sklearn_metrics.root_mean_squared_error(labels, outputs))
    assert found["r2"] == pytest.approx(sklearn_metrics.r2_score(labels, outputs))


def test_logits_between_zero_and_one_are_not_taken_for_probabilities():
    """torchmetrics does so, batch by batch."""
    logits, labels = torch.full((NUM_ROWS, 1), 0.2), torch.ones(NUM_ROWS, 1)
    found = values(of_classes(["recall"], nn.BCEWithLogitsLoss()), logits, labels)
    assert found["recall"] == 1.0


@pytest.mark.parametrize(
    ("name", "loss", "text"),
    [
        ("accuracy", nn.MSELoss(), "'accuracy' does not fit the loss MSELoss.*rmse"),
        ("rmse", nn.CrossEntropyLoss(), "'rmse' does not fit the loss CrossEntropyLoss.*accuracy"),
        (
            "f1_score",
            nn.MSELoss(),
            "'f1_score' of torchmetrics does not fit the loss MSELoss: the model predicts numbers",
        ),
        ("acuracy", nn.CrossEntropyLoss(), "no metric 'acuracy'.*Did you mean 'accuracy'"),
    ],
)
def test_a_name_that_does_not_fit_is_refused(name, loss, text):
    with pytest.raises(ParamError, match=text):
        named_metric(name, loss, num_classes=None)


def test_what_rows_do_not_define_is_not_a_number():
    """Not a large negative R2 of equal labels, and not an area of a model that has diverged."""
    labels = torch.full((NUM_ROWS,), 0.1)
    r2 = named_metric("r2", nn.MSELoss(), num_classes=None, center=float(np.mean(np.full(8, 0.1))))
    assert np.isnan(values({"r2": r2}, labels[:, None] + 1, labels)["r2"])
    outputs, labels = rows_of(2)
    outputs[7] = float("nan")
    found = values(of_classes(["accuracy", "auroc"], nn.CrossEntropyLoss()), outputs, labels)
    assert np.isnan([found["accuracy"], found["auroc"]]).all()


def test_labels_of_fewer_axes_are_compared_row_by_row():
    """A loss of the user's own may squeeze outputs itself; torch would compare each row with every other."""

    class Smooth(nn.BCEWithLogitsLoss):
        pass

    outputs, labels = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    sums = torch.zeros(2, dtype=torch.float64)
    named_metric("accuracy", Smooth(), num_classes=2).add(sums, outputs, labels)
    assert sums.tolist() == [3.0, 4.0]


def test_outputs_of_another_shape_than_the_labels_are_refused():
    metric = named_metric("rmse", lambda outputs, labels: outputs.sum(), num_classes=None)
    with pytest.raises(ParamError, match=r"outputs have shape \(4, 2\), the labels \(4,\)"):
        metric.add(torch.zeros(2, dtype=torch.float64), torch.zeros(4, 2), torch.zeros(4))
