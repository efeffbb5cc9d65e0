"""Trainings that are interrupted: a model in which everything random or remembered has a part, and ranks that die."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from sparkdl.training.checkpoint import MANIFEST, manifest_from_json
from sparkdl.training.checkpoint_folder import CheckpointFolder
from sparkdl.training.loop import train
from sparkdl.training.spec import CheckpointPlan
from tests.training.training_scenes import Outcome, make_spec

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset
    from sparkdl.training.spec import TrainingSpec
    from tests.run_ranks import RankEnvironment


class LossThatEndsItsRank(nn.Module):
    """Cross entropy that ends its process in one of its calls, as the kernel does; its count is a buffer."""

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
        return nn.functional.cross_entropy(outputs, labels) * (1 + self.seen / 1000)


def one_cycle(optimizer, num_steps):
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=num_steps)


def make_random_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def interrupted_spec(folder: Path | None, *, ends_at: int = 0, **changes: Any) -> TrainingSpec:
    """Dropout, BatchNorm, momentum, a schedule per step, warm-up and accumulation; a checkpoint after each update."""
    plan = None if folder is None else CheckpointPlan(url=str(folder), every_updates=1, num_kept=99)
    fields: dict[str, Any] = {
        "model": make_random_model(),
        "loss": LossThatEndsItsRank(ends_at),
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


def train_through_death(
    environment: RankEnvironment, spec: TrainingSpec, dataset: ParquetDataset, dying: int | None = None
) -> Outcome | None:
    """Train, and let only one rank be ended by the loss; the others fail as their peer is lost."""
    if environment.rank != dying:
        spec.heads[0].loss.at_call = 0
    try:
        return _train(environment, spec, dataset, "fit")
    except Exception:
        if dying is None:
            raise
        return None


def assert_same_fit(one: Outcome, other: Outcome) -> None:
    """Weights, buffers and losses are equal to the bit."""
    for name, value in one.weights.items():
        np.testing.assert_array_equal(value, other.weights[name], err_msg=name)
    for mine, theirs in zip(one.history, other.history, strict=True):
        assert (mine.epoch, mine.loss, mine.rows, mine.learning_rate) == (
            theirs.epoch,
            theirs.loss,
            theirs.rows,
            theirs.learning_rate,
        )


def train_each(
    environment: RankEnvironment, specs: list[TrainingSpec], dataset: ParquetDataset
) -> list[Outcome]:
    """Train each spec on this rank."""
    return [_train(environment, spec, dataset, str(number)) for number, spec in enumerate(specs)]


def train_from_every_checkpoint(
    environment: RankEnvironment, specs: list[TrainingSpec], dataset: ParquetDataset
) -> list[tuple[Outcome, dict[tuple[int, int], Outcome]]]:
    """Train each spec once, keeping every checkpoint; then from each of them, by the place that it resumed from."""
    outcomes = []
    for number, spec in enumerate(specs):
        plan = spec.checkpoints
        whole = _train(environment, spec, dataset, f"{number}-whole")
        with environment.open(name=f"{number}-written") as communicator:
            communicator.barrier()  # rank 0 comes here when the last checkpoint is written
        resumed = {}
        for name in CheckpointFolder(plan.url).names():
            url = f"{plan.url}-{name}"
            if environment.rank == 0:
                shutil.copytree(f"{plan.url}/{name}", f"{url}/{name}")
            spec_again = replace(spec, model=make_random_model(), checkpoints=replace(plan, url=url))
            outcome = _train(environment, spec_again, dataset, f"{number}-{name}")
            place = manifest_from_json(Path(plan.url, name, MANIFEST).read_text(), url)
            resumed[place.epoch, place.step] = outcome
        outcomes.append((whole, resumed))
    return outcomes


def _train(environment: RankEnvironment, spec: TrainingSpec, dataset: ParquetDataset, name: str) -> Outcome:
    loss = spec.heads[0].loss
    if isinstance(loss, LossThatEndsItsRank):
        loss.seen.zero_()
    events: list[dict[str, Any]] = []
    with environment.open(name=name) as communicator:
        result = train(spec, communicator=communicator, dataset=dataset, report=events.append)
    weights = {name: value.numpy().copy() for name, value in result.module.state_dict().items()}
    return Outcome(weights, result.history, events)
