from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from sparkdl.data import PlannedFeed
from sparkdl.errors import CheckpointError, TrainingError
from sparkdl.training.callbacks import Callback, FitContext
from sparkdl.training.spec import CheckpointPlan
from sparkdl.training.trainer import train
from tests.training.scenes.training_scenes import make_spec, write_dataset

ALONE = SimpleNamespace(
    world_size=1, rank=0, timeout_s=60.0, topology=SimpleNamespace(local_size=1), abort=lambda reason: None
)


def test_a_failing_step_ends_the_epoch_and_its_threads_while_its_traceback_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    read = PlannedFeed.epoch

    def noted(self: PlannedFeed, epoch: int) -> Generator[dict[str, np.ndarray], None, None]:
        try:
            yield from read(self, epoch)
        finally:
            ended.append(epoch)

    def fail(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        raise ValueError(f"{len(labels)} rows")

    monkeypatch.setattr(PlannedFeed, "epoch", noted)
    dataset = write_dataset(tmp_path, 200, rows_per_group=10)
    with pytest.raises(TrainingError, match="ValueError: 8 rows") as raised:
        train(make_spec(loss=fail, batch_size=8), communicator=ALONE, dataset=dataset, keep=id)
    assert raised.value.position == "epoch 1, step 1"
    assert raised.value.__cause__.__traceback__ is not None
    assert ended == [0]
    assert not any(thread.name == "sparkdl-shuffler" for thread in threading.enumerate())


class AddsLayer(Callback):
    def on_epoch_start(self, context: FitContext) -> None:
        if context.epoch == 2:
            context.module[0].added = torch.nn.Linear(1, 1)


def test_a_checkpoint_of_a_model_that_got_a_layer_while_it_was_trained_is_refused(tmp_path: Path) -> None:
    """The identity of the fit is that of the model before, so that the tensors of the checkpoint are compared, too."""
    dataset = write_dataset(tmp_path, 16)
    settings = {"callbacks": (AddsLayer(),), "checkpoints": CheckpointPlan(url=str(tmp_path / "checkpoints"))}
    train(make_spec(epochs=2, **settings), communicator=ALONE, dataset=dataset, keep=id)
    with pytest.raises(CheckpointError, match=r"it has 0\.added\.bias, 0\.added\.weight, which the model"):
        train(make_spec(epochs=3, **settings), communicator=ALONE, dataset=dataset, keep=id)


def doubling(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda update: 2.0**update)


def test_range_test_ends_before_the_update_by_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    factors = itertools.chain([1.0, 1.0, 1.0, math.inf], itertools.repeat(1.0))

    def compute(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, labels) * next(factors)

    spec = make_spec(
        loss=compute, is_range_test=True, scheduler=doubling, scheduler_interval="step", batch_size=8
    )
    dataset = write_dataset(tmp_path, 200, rows_per_group=10)
    outcome = train(spec, communicator=ALONE, dataset=dataset, keep=lambda distribution: distribution.module)
    assert [rate for rate, _ in outcome.losses] == pytest.approx([0.1, 0.2, 0.4])
    assert all(math.isfinite(loss) for _, loss in outcome.losses)
    assert all(bool(weight.isfinite().all()) for weight in outcome.module.parameters())
    assert len(outcome.history) == 1


def test_range_test_whose_first_loss_is_not_finite_is_an_error(tmp_path: Path) -> None:
    def compute(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, labels) * math.nan

    with pytest.raises(TrainingError, match="loss of the first rows is nan, before any update"):
        train(
            make_spec(loss=compute, is_range_test=True),
            communicator=ALONE,
            dataset=write_dataset(tmp_path, 20),
            keep=id,
        )
