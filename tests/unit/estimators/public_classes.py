"""The public estimators, for the test suites that run each of them through the contract of Spark ML.

A new estimator needs one more line here and one in ``tests/spark/estimators/test_ml_contract.py``.
"""

from __future__ import annotations

import torch
from torch import nn

from sparkdl.estimators import (
    ImageClassifier,
    LanguageModel,
    TextClassifier,
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from sparkdl.estimators.torch_model import TrainingSummary
from sparkdl.model.saved_model import SavedModel
from sparkdl.training.history import EpochRecord, RankSeconds
from tests.training.signatures import make_signature


def make_torch_estimator(**changes):
    params = {
        "model": nn.Linear(2, 3),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    return TorchEstimator(**{**params, **changes})


def make_scheduler(optimizer, num_steps):
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=num_steps)


def make_ready_made(made):
    """Return a function that makes an estimator with a function among its Params, as all estimators here have."""
    return lambda **changes: made(**{"scheduler": make_scheduler, **changes})


def make_model(made, kind):
    def make():
        signature = make_signature((2,), kind, **({"num_classes": 3} if kind == "class" else {}))
        seconds = (RankSeconds(reading=0.25, communicating=0.25, computing=0.5),)
        times = {"seconds": 1.0, "rows_per_s": 3.0, "data_wait_share": 0.25, "validation_s": 0.5}
        course = {**times, "learning_rate": 0.1, "rank_seconds": seconds}
        record = EpochRecord(epoch=1, loss=0.5, rows=3, metrics={"right": 0.5, "val_loss": 0.25}, **course)
        summary = TrainingSummary(history=(record,), model_epoch=1, run_id="abc")
        return made(SavedModel(nn.Linear(2, 3), signature), summary)

    return make


ESTIMATORS = {
    "TorchEstimator": make_torch_estimator,
    "TorchClassifier": make_ready_made(TorchClassifier),
    "TorchRegressor": make_ready_made(TorchRegressor),
    "TextClassifier": make_ready_made(TextClassifier),
    "ImageClassifier": make_ready_made(ImageClassifier),
    "LanguageModel": make_ready_made(LanguageModel),
}
"""Functions that make an estimator that could be fitted, with Params changed by keyword."""

MODELS = {
    "TorchModel": make_model(TorchModel, "class"),
    "TorchClassificationModel": make_model(TorchClassificationModel, "class"),
    "TorchRegressionModel": make_model(TorchRegressionModel, "value"),
}
"""Functions that make a model like one returned by a fit."""
