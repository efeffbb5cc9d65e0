"""Validation, early stopping, callbacks and the summary of a fit, from the DataFrame to MLflow."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from sparkdl.collective import current_communicator
from sparkdl.errors import DataError
from sparkdl.estimators import Callback, TorchModel
from tests.spark.estimators.estimator_examples import NUM_ROWS, make_estimator


class WritesDown(Callback):
    """Writes the wire format, and the model's weights after each epoch, to files on each rank."""

    def __init__(self, folder):
        self.folder = str(folder)

    def on_epoch_end(self, context):
        Path(self.folder, f"{context.rank}.wire").write_text(current_communicator().wire)
        weights = [parameter.tolist() for parameter in context.module.parameters()]
        Path(self.folder, f"{context.rank}-{context.epoch}.json").write_text(json.dumps(weights))


def is_right(outputs, labels):
    return outputs.argmax(dim=1) == labels


@pytest.mark.any_spark_will_do
def test_marked_rows_are_validated_on_and_not_trained_on(frame, tmp_path):
    marked = frame.withColumn("validates", F.col("id") % 4 == 0)
    model = make_estimator(
        tmp_path,
        validationIndicatorCol="validates",
        metrics={"right": is_right},
        bestMetric="val_loss",
        epochs=3,
        callbacks=[WritesDown(tmp_path)],
        wire="bfloat16",
    ).fit(marked)
    assert [(tmp_path / f"{rank}.wire").read_text() for rank in (0, 1)] == ["bfloat16"] * 2
    num_validated = marked.filter("validates").count()
    assert {record.rows for record in model.history} == {NUM_ROWS - num_validated}
    losses = [record.metrics["val_loss"] for record in model.history]
    best = model.summary.model_epoch
    assert best == int(np.argmin(losses)) + 1
    kept = json.loads((tmp_path / f"0-{best}.json").read_text())
    for weights, parameter in zip(kept, model.module.parameters(), strict=True):
        np.testing.assert_array_equal(np.array(weights, np.float32), parameter.detach().numpy())
    scored = model.transform(marked.filter("validates"))
    right = scored.filter(F.col("prediction") == F.col("digit")).count() / num_validated
    assert model.history[best - 1].metrics["val_right"] == pytest.approx(right)


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_marked_rows_are_validated_on_and_the_best_model_comes_back(frame, tracked):
    marked = frame.withColumn("validates", F.col("id") % 4 == 0)
    estimator = make_estimator(
        tracked,
        tracking="on",
        validationIndicatorCol="validates",
        metrics={"right": is_right, "accuracy": MulticlassAccuracy(3, average="micro")},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=6.0, momentum=0.9),
        bestMetric="val_loss",
        earlyStoppingPatience=2,
        callbacks=[WritesDown(tracked)],
        epochs=30,
        wire="bfloat16",
    )
    model = estimator.fit(marked)
    assert [(tracked / f"{rank}.wire").read_text() for rank in (0, 1)] == ["bfloat16"] * 2
    num_validated = marked.filter("validates").count()
    assert {record.rows for record in model.history} == {NUM_ROWS - num_validated}
    losses = [record.metrics["val_loss"] for record in model.history]
    best = model.summary.model_epoch
    assert best == int(np.argmin(losses)) + 1 == len(losses) - 2
    kept = json.loads((tracked / f"0-{best}.json").read_text())
    for weights, parameter in zip(kept, model.module.parameters(), strict=True):
        np.testing.assert_array_equal(np.array(weights, np.float32), parameter.detach().numpy())
    assert (tracked / f"1-{len(losses)}.json").exists()

    # The predictions of transform on the marked rows agree with the validation of the best epoch.
    scored = model.transform(marked.filter("validates"))
    right = scored.filter(F.col("prediction") == F.col("digit")).count() / num_validated
    found = model.history[best - 1].metrics
    assert (found["val_right"], found["val_accuracy"]) == pytest.approx((right, right))

    client = mlflow.MlflowClient()
    for name in ("val_loss", "val_right", "accuracy"):
        logged = client.get_metric_history(model.summary.run_id, name)
        assert [metric.value for metric in logged] == [record.metrics[name] for record in model.history]
    params = client.get_run(model.summary.run_id).data.params
    assert (params["metrics"], params["callbacks"]) == ("right, accuracy", "WritesDown")

    model.save(str(tracked / "model"))
    loaded = TorchModel.load(str(tracked / "model"))
    assert loaded.summary == model.summary
    assert len(loaded.summary.rank_seconds) == 2
    assert f"the model is from epoch {best}" in str(loaded.summary)


@pytest.mark.any_spark_will_do
def test_a_mark_that_is_missing_is_refused_before_ranks_start(frame, tmp_path):
    marked = frame.withColumn("validates", F.when(F.col("id") > 3, F.lit(True)))
    estimator = make_estimator(tmp_path, validationIndicatorCol="validates", loss=nn.CrossEntropyLoss())
    with pytest.raises(DataError, match="validates.* null"):
        estimator.fit(marked)
    with pytest.raises(
        DataError, match="'validates' of validationIndicatorCol is true in each of the 203 rows"
    ):
        estimator.fit(frame.withColumn("validates", F.lit(True)))


@pytest.fixture
def searched(tmp_path):
    """An estimator whose learning rates tell how many epochs were planned."""
    settings = {"optimizer": "sgd", "learningRate": 0.5, "scheduler": "cosine", "loss": "cross_entropy"}
    return make_estimator(tmp_path, metrics=["accuracy"], **settings)


@pytest.mark.any_spark_will_do
def test_optuna_prunes_a_trial_by_the_epochs_that_the_driver_gets(frame, searched):
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    reported, models = [], []

    def objective(trial):
        def report(record):
            reported.append(record)
            trial.report(record.metrics["accuracy"], record.epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

        epochs = trial.suggest_int("epochs", 2, 50)
        models.append(searched.copy().setParams(epochs=epochs, onEpoch=report).fit(frame))
        return models[-1].history[-1].metrics["accuracy"]

    # No accuracy is 2, so each trial that gets to its third epoch is pruned.
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=2.0, n_warmup_steps=3))
    for epochs in (50, 2):
        study.enqueue_trial({"epochs": epochs})
    study.optimize(objective, n_trials=2)
    pruned, complete = study.trials
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]
    accuracies = {record.epoch: record.metrics["accuracy"] for record in reported[:3]}
    assert pruned.intermediate_values == accuracies
    rates = [record.learning_rate for record in reported[:3]]
    assert 0.5 > rates[0] > rates[1] > rates[2] > 0.45, "of a fit with 50 epochs"
    (model,) = models
    assert tuple(reported[3:]) == model.history
    assert model.history[1].learning_rate < 0.01
    assert complete.value == model.history[1].metrics["accuracy"]


class PrunedError(Exception):
    pass


@pytest.mark.any_spark_will_do
def test_hyperopt_goes_on_after_a_trial_that_a_rule_has_ended(frame, searched):
    hyperopt = pytest.importorskip("hyperopt", reason="hyperopt is not installed")

    def report(record):
        if record.epoch == 2:
            raise PrunedError

    def loss_of(epochs):
        try:
            model = searched.copy().setParams(epochs=epochs, onEpoch=report).fit(frame)
        except PrunedError:
            return {"status": hyperopt.STATUS_FAIL}
        return {"status": hyperopt.STATUS_OK, "loss": model.summary.model_record.loss}

    trials = hyperopt.Trials()
    best = hyperopt.fmin(
        loss_of,
        hyperopt.hp.choice("epochs", [1, 50]),
        hyperopt.rand.suggest,
        max_evals=2,
        trials=trials,
        rstate=np.random.default_rng(2),  # draws 50, then 1
        show_progressbar=False,
    )
    assert trials.statuses() == ["fail", "ok"]
    assert best == {"epochs": 0}
