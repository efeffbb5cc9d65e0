"""Interrupted trainings: a model with every kind of randomness and state, and ranks that are killed."""

from __future__ import annotations

import copy
import os
import random
import shutil
import signal
from collections import defaultdict
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics import PearsonCorrCoef

from sparkdl.data.dataset.row_choice import draw_rows
from sparkdl.estimators import TorchClassifier, TorchEstimator
from sparkdl.estimators.fit.inputs import prepare_fit
from sparkdl.model.heads import Head, LabelColumn
from sparkdl.training.callbacks import Callback, Patience
from sparkdl.training.checkpoint.fit_manifest import fit_folder
from sparkdl.training.spec import CheckpointPlan, Goal
from sparkdl.training.trainer import train
from tests.training.scenes.training_scenes import Outcome, assert_same_weights, make_spec

if TYPE_CHECKING:
    from sparkdl.checkpoint.folder import CheckpointFolder
    from sparkdl.data import ParquetDataset
    from sparkdl.training.callbacks import FitContext
    from sparkdl.training.spec import TrainingSpec
    from tests.run_ranks import RankEnvironment


VALIDATION_ROWS = 12


class LossThatEndsItsRank(nn.Module):
    """Cross entropy per row that kills its process by SIGKILL in one of its calls; a buffer counts the calls."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.at_call = at_call
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        if self.calls == self.at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, labels, reduction="none") * (1 + self.seen / 1000)


class RandomModel(nn.Module):
    """Two heads over dropout, a BatchNorm, random noise of Python and NumPy, and a non-persistent counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))
        self.classes, self.value = nn.Linear(8, 3), nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.zeros(())
        if self.training:
            self.calls += 1
            # After the BatchNorm, which would remove an offset that all rows share.
            noise = noise + 0.1 * random.random() + 0.1 * np.random.random() + self.calls / 1000
        found = self.body(rows) + noise
        return self.classes(found), self.value(found)


class StopsOnOneRank(Callback):
    """Requests the end of the fit on one rank, early in the second epoch."""

    def on_step_end(self, context: FitContext) -> None:
        if (context.rank, context.epoch, context.step) == (1, 2, 2):
            context.stop()


class PearsonOfValues(PearsonCorrCoef):
    """Pearson correlation of the second head; its states have no reduction."""

    def update(self, outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> None:
        super().update(outputs["target"].reshape(-1).double(), labels["target"].reshape(-1).double())


def is_right(outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
    return outputs["y"].argmax(dim=1) == labels["y"]


noted_rows: defaultdict[int, list[list[float]]] = defaultdict(list)
"""The batches of this rank by epoch; each row is noted by its target, which is unique."""


def note_rows(outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> float:
    noted_rows[NotesEpoch.epoch].append(labels["target"].reshape(-1).tolist())
    return 0.0


class NotesEpoch(Callback):
    """Makes the number of the epoch available to metrics."""

    epoch = 0

    def on_epoch_start(self, context: FitContext) -> None:
        NotesEpoch.epoch = context.epoch


def jitter(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Change a row by random numbers of all three generators."""
    rows = arrays["x"].copy()
    rows[0] += np.float32(0.1 * (random.random() + np.random.random() + float(torch.rand(()))))
    return {**arrays, "x": rows}


def one_cycle(optimizer, num_steps):
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=num_steps)


def scheduled_spec(folder: Path | None, **changes: Any) -> TrainingSpec:
    """A spec with momentum, a schedule per step, warm-up, accumulation and clipping; a checkpoint after each update."""
    plan = None if folder is None else CheckpointPlan(url=str(folder), every_updates=1, num_kept=99)
    fields: dict[str, Any] = {
        "loss": LossThatEndsItsRank(0),
        "optimizer": partial(torch.optim.AdamW, lr=0.05),
        "scheduler": one_cycle,
        "scheduler_interval": "step",
        "warmup_steps": 3,
        "accumulated_batches": 2,
        "max_grad_norm": 1.0,
        "batch_size": 8,
        "checkpoints": plan,
    }
    return make_spec(**{**fields, **changes})


def interrupted_spec(
    dataset: ParquetDataset, folder: Path | None, *, ends_at: int = 0, **changes: Any
) -> TrainingSpec:
    """A spec with all state that a checkpoint restores; patience ends it after two epochs, and the first is the best.

    ``VALIDATION_ROWS`` of the rows are for validation.
    """
    validation = draw_rows(dataset.row_counts, VALIDATION_ROWS / dataset.num_rows, seed=3)
    worst = Goal(metric="val_loss", mode="max")
    fields: dict[str, Any] = {
        "model": RandomModel(),
        "heads": (
            Head(label=LabelColumn(name="y", dtype="int64"), loss=LossThatEndsItsRank(ends_at)),
            Head(label=LabelColumn(name="target"), loss=nn.MSELoss(), weight=0.1),
        ),
        "weight": "w",
        "augment": jitter,
        "metrics": {"right": is_right, "r": PearsonOfValues},
        "training_rows": validation.rest(),
        "validation_rows": validation,
        "epochs": 3,
        "best": worst,
        "watched": worst,
        "patience": Patience(epochs=1),
    }
    return scheduled_spec(folder, **{**fields, **changes})


def noisy_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """A train step that draws a random number and returns outputs for the metrics."""
    rows = batch["doubled"] + 0.1 * torch.randn(())
    classes, value = model(rows)
    return nn.functional.cross_entropy(classes, batch["y"]) + value.pow(2).mean(), classes


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return {"doubled": 2 * columns["x"]}


def first_is_largest(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(dim=1) == 0


def estimated_specs(dataset: ParquetDataset, folder: Path) -> list[TrainingSpec]:
    """Specs made by estimators: a user's train step on prepared features, and a ready-made network."""
    common: dict[str, Any] = {
        "featuresCol": "x",
        "labelCol": "y",
        "batchSize": 24,
        "epochs": 2,
        "numWorkers": 2,
        "validationFraction": 0.15,
        "bestMetric": "val_loss",
        "bestMode": "max",
    }
    estimators = [
        TorchEstimator(
            model=RandomModel(),
            trainStep=noisy_step,
            prepareFeatures=doubled,
            optimizer=partial(torch.optim.Adam, lr=0.01),
            metrics={"first": first_is_largest},
            **common,
        ),
        TorchClassifier(scheduler=one_cycle, schedulerInterval="step", dropout=0.5, **common),
    ]
    specs = []
    for estimator in estimators:
        params = estimator._params_of_fit()
        inputs = prepare_fit(params, dataset, estimator._learn(params, dataset, None))
        plan = CheckpointPlan(url=str(folder / type(estimator).__name__), every_updates=1, num_kept=99)
        specs.append(replace(inputs.spec, checkpoints=plan))
    return specs


def train_through_death(
    environment: RankEnvironment, spec: TrainingSpec, dataset: ParquetDataset, dying: int | None = None
) -> Outcome | None:
    """Train; the loss kills only the rank ``dying``, and the others fail because they lose a peer."""
    if environment.rank != dying:
        spec.heads[0].loss.at_call = 0
    try:
        return _train(environment, spec, dataset, "fit")
    except Exception:
        if dying is None:
            raise
        return None


def assert_same_fit(one: Outcome, other: Outcome) -> None:
    """Assert that weights, buffers, losses and metrics are equal to the bit."""
    assert_same_weights(one.weights, other.weights)
    assert one.model_epoch == other.model_epoch
    names = ("epoch", "loss", "rows", "learning_rate", "metrics")
    for mine, theirs in zip(one.history, other.history, strict=True):
        assert [getattr(mine, name) for name in names] == [getattr(theirs, name) for name in names]


def train_each(
    environment: RankEnvironment, specs: list[TrainingSpec], dataset: ParquetDataset
) -> list[Outcome]:
    """Train each spec on this rank."""
    return [_train(environment, spec, dataset, str(number)) for number, spec in enumerate(specs)]


def train_and_note(
    environment: RankEnvironment, specs: list[TrainingSpec], dataset: ParquetDataset
) -> list[tuple[Outcome, dict[int, list[list[float]]]]]:
    """Train each spec, whose metric is :func:`note_rows`, and return the rows noted on this rank."""
    outcomes = []
    for number, spec in enumerate(specs):
        noted_rows.clear()
        outcome = _train(environment, spec, dataset, str(number))
        outcomes.append((outcome, dict(noted_rows)))
    return outcomes


def place_of(folder: CheckpointFolder, name: str) -> tuple[int, int]:
    """Epoch and step of a checkpoint."""
    about = folder.open(name).manifest.about
    return about["epoch"], about["step"]


def train_from_every_checkpoint(
    environment: RankEnvironment, specs: list[TrainingSpec], dataset: ParquetDataset
) -> list[tuple[Outcome, dict[tuple[int, int], Outcome]]]:
    """Train each spec once, keeping every checkpoint; then from each checkpoint. Outcomes are by (epoch, step)."""
    outcomes = []
    for number, spec in enumerate(specs):
        plan, untrained = spec.checkpoints, copy.deepcopy(spec.model)
        whole = _train(environment, spec, dataset, f"{number}-whole")
        environment.meet(f"{number}-written")  # rank 0 gets here when the last checkpoint is written
        resumed = {}
        folder = fit_folder(plan.url)
        for name in folder.names():
            url = f"{plan.url}-{name}"
            if environment.rank == 0:
                shutil.copytree(f"{plan.url}/{name}", f"{url}/{name}")
            spec_again = replace(spec, model=copy.deepcopy(untrained), checkpoints=replace(plan, url=url))
            outcome = _train(environment, spec_again, dataset, f"{number}-{name}")
            resumed[place_of(folder, name)] = outcome
        outcomes.append((whole, resumed))
    return outcomes


def _train(environment: RankEnvironment, spec: TrainingSpec, dataset: ParquetDataset, name: str) -> Outcome:
    loss = spec.heads[0].loss if spec.heads else None
    if isinstance(loss, LossThatEndsItsRank):
        loss.seen.zero_()
    events: list[dict[str, Any]] = []
    with environment.open(name=name) as communicator:
        keep = methodcaller("whole_module")
        result = train(spec, communicator=communicator, dataset=dataset, report=events.append, keep=keep)
    tensors = {**result.module.state_dict(), **dict(result.module.named_buffers())}
    weights = {name: value.numpy().copy() for name, value in tensors.items()}
    return Outcome(weights, result.history, events, result.model_epoch)
