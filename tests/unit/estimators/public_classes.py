"""The public estimators, for the suites that run each of them through the contract of Spark ML.

A new estimator is one more line here and one in ``tests/spark/test_ml_contract.py``.
"""

from __future__ import annotations

import torch
from torch import nn

from sparkdl.estimators import TorchEstimator, TorchModel
from sparkdl.estimators.torch_model import TrainingSummary
from sparkdl.training.history import EpochRecord
from sparkdl.training.saved_model import ModelSignature, SavedModel


def make_torch_estimator(**changes):
    params = {
        "model": nn.Linear(2, 3),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    return TorchEstimator(**{**params, **changes})


def make_torch_model():
    signature = ModelSignature(
        features="x",
        features_shape=(2,),
        column_dtype="float32",
        features_dtype="float32",
        prediction_kind="class",
        prediction_shape=(),
    )
    history = (EpochRecord(epoch=1, loss=0.5, rows=3, seconds=1.0, rows_per_s=3.0),)
    return TorchModel(SavedModel(nn.Linear(2, 3), signature), TrainingSummary(history=history, run_id="abc"))


ESTIMATORS = {"TorchEstimator": make_torch_estimator}
"""Makes an estimator that could be fitted, with Params changed by keyword."""

MODELS = {"TorchModel": make_torch_model}
"""Makes a model as a fit returns it."""
