"""Estimators and users' functions for the tests of the checks before a fit."""

from __future__ import annotations

import torch
from torch import nn

from sparkdl.data.spark.columns import faults_error
from sparkdl.estimators import TorchEstimator
from sparkdl.estimators.fit.inputs import column_names, prepare_fit
from sparkdl.estimators.fit.rows import column_faults
from tests.training.scenes.input_scenes import Heads


def make_estimator(**changes):
    params = {
        "model": nn.Linear(4, 3),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "featuresCol": "dense",
        "labelCol": "number",
    }
    return TorchEstimator(**{**params, **changes})


def prepare(estimator, dataset):
    """The inputs of a fit that would go to the ranks, and the signature of its model, after the checks of a schema."""
    params = estimator._params_of_fit()
    columns = {name: dataset.column(name) for name in column_names(params)}
    if faults := list(column_faults(params, columns)):
        raise faults_error(faults)
    dataset = dataset.with_nulls(estimator._nulls())
    return prepare_fit(params, dataset, estimator._learn(params, dataset, None))


def learn(estimator, dataset):
    """The inputs of a fit of a ready-made estimator, whose Params are checked first."""
    estimator._check_values()
    return prepare(estimator, dataset)


def fail(batch):
    raise KeyError("nowhere")


def two_values(model, batch):
    return model(batch["dense"]).mean(dim=1).repeat(2)


def loss_alone(model, batch):
    return model(batch["dense"]).mean()


def loss_by_gradients(model, batch):
    """A loss that penalizes the gradient of the output with respect to the features."""
    rows = batch["dense"].requires_grad_()
    (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
    return slope.pow(2).sum()


class Encoder(nn.Module):
    """A model with more outputs than there are labels, like a variational encoder."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.last, self.table = nn.Linear(4, 2), nn.Embedding(3, 4, sparse=sparse)

    def forward(self, dense):
        rows = dense + self.table(torch.zeros(len(dense), dtype=torch.int64))
        found = self.last(rows)
        return found, found.mean(dim=1), {"rows": rows}


def first_mean(model, batch):
    return model(batch["dense"])[0].mean()


HEADS = {"model": Heads(named=False), "labelCol": ["number", "target"]}
