"""Accumulated, clipped, scheduled and scaled updates on two ranks equal those of one process in plain torch."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from sparkdl.errors import RankError
from tests.run_ranks import run_ranks
from tests.training.scenes.training_scenes import (
    assert_same_weights,
    joined_epochs,
    joined_loss,
    make_model,
    make_spec,
    train_all,
    write_dataset,
)

TOLERANCE = 2e-6
NUM_ROWS = 75  # 5 steps of 8 rows on each of 2 ranks, the last one smaller
WORLD_SIZE = 2


def one_cycle(optimizer, num_steps):
    return OneCycleLR(optimizer, max_lr=0.3, total_steps=num_steps)


def halve(optimizer, num_steps):
    return StepLR(optimizer, step_size=1, gamma=0.5)


def wait_for_plateau(optimizer, num_steps):
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0, threshold_mode="abs")


def fade(optimizer, num_steps):
    return LambdaLR(optimizer, lambda step: 1 - step / num_steps)


def no_scheduler(optimizer, num_steps):
    return optimizer


def two_groups(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.3}, {"params": others}], lr=0.05, momentum=0.9)


def with_decay(parameters):
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)


CASES = {
    "accumulated": {"accumulated_batches": 2},
    "accumulated and weighted": {"accumulated_batches": 3, "weight": "w"},
    "accumulated by a loss that sums": {
        "accumulated_batches": 2,
        "loss": nn.CrossEntropyLoss(reduction="sum"),
        "optimizer": partial(torch.optim.SGD, lr=0.005),
    },
    "clipped": {"max_grad_norm": 0.1},
    "accumulated and clipped": {"accumulated_batches": 2, "max_grad_norm": 0.1},
    "a schedule per step": {"scheduler": one_cycle, "scheduler_interval": "step"},
    "a schedule per accumulated step": {
        "scheduler": fade,
        "scheduler_interval": "step",
        "accumulated_batches": 2,
    },
    "scaled linearly with a schedule that sets the rate": {
        "learning_rate_scaling": "linear",
        "scheduler": one_cycle,
        "scheduler_interval": "step",
    },
    "two groups of parameters": {"optimizer": two_groups, "warmup_steps": 4, "learning_rate_scaling": "sqrt"},
    "a schedule per epoch": {"scheduler": halve},
    "a schedule that waits for a plateau": {"scheduler": wait_for_plateau, "epochs": 3},
    "scaled linearly and warmed up": {"learning_rate_scaling": "linear", "warmup_steps": 4},
    "scaled by the root, warmed up and scheduled": {
        "learning_rate_scaling": "sqrt",
        "warmup_steps": 3,
        "scheduler": fade,
        "scheduler_interval": "step",
    },
}

WEIGHTLESS = {"weight": "nothing", "optimizer": with_decay, "scheduler": wait_for_plateau}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), NUM_ROWS)


@pytest.fixture(scope="module")
def outcomes(dataset):
    cases = {**CASES, "rows that weigh nothing": WEIGHTLESS}
    specs = [(make_spec(**changes), dataset) for changes in cases.values()]
    return dict(zip(cases, zip(*run_ranks(WORLD_SIZE, train_all, specs), strict=True), strict=True))


def plainly_trained(spec, dataset):
    """The weights and the learning rates of the updates of a plain training loop."""
    factor = {"none": 1.0, "linear": WORLD_SIZE, "sqrt": WORLD_SIZE**0.5}[spec.learning_rate_scaling]
    model = spec.model.train()
    optimizer = spec.optimizer(model.parameters())
    per_epoch = -(-5 // spec.accumulated_batches)
    num_steps = spec.epochs * (per_epoch if spec.scheduler_interval == "step" else 1)
    scheduler = spec.scheduler(optimizer, num_steps) if spec.scheduler else None
    rates = []
    for steps in joined_epochs(spec, dataset, WORLD_SIZE):
        losses = []
        for first in range(0, len(steps), spec.accumulated_batches):
            window = steps[first : first + spec.accumulated_batches]
            joined = {name: np.concatenate([step[name] for step in window]) for name in spec.columns()}
            loss = joined_loss(
                spec, model(torch.from_numpy(joined["x"])), torch.from_numpy(joined["y"]), joined
            )
            losses.append((float(loss.detach()), len(joined["y"])))
            optimizer.zero_grad()
            loss.backward()
            if spec.max_grad_norm:
                nn.utils.clip_grad_norm_(model.parameters(), spec.max_grad_norm)
            part = min(1.0, (len(rates) + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
            scheduled = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= part * factor
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, scheduled, strict=True):
                group["lr"] = rate
            if scheduler and spec.scheduler_interval == "step":
                scheduler.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(sum(loss * rows for loss, rows in losses) / NUM_ROWS)
        elif scheduler and spec.scheduler_interval == "epoch":
            scheduler.step()
    return model.state_dict(), rates[per_epoch - 1 :: per_epoch]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_update_as_one_process_does(outcomes, dataset, name):
    expected, rates = plainly_trained(make_spec(**CASES[name]), dataset)
    for outcome in outcomes[name]:
        assert_same_weights(outcome.weights, expected, atol=TOLERANCE)
        assert [record.learning_rate for record in outcome.history] == pytest.approx(rates)
    plain = {key: CASES[name][key] for key in ("loss", "optimizer", "epochs", "weight") if key in CASES[name]}
    unchanged, _ = plainly_trained(make_spec(**plain), dataset)
    assert any(not torch.allclose(expected[key], unchanged[key], atol=1e-4) for key in expected)


LOWER = {
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "float16 with weighted rows": {"precision": "float16", "weight": "w"},
    "float16 with heavy rows": {"precision": "float16", "weight": "heavy"},
    "float16 with weighted classes": {
        "precision": "float16",
        "loss": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])),
    },
    "float16 with a loss that sums": {
        "precision": "float16",
        "loss": nn.CrossEntropyLoss(reduction="sum"),
        "optimizer": partial(torch.optim.SGD, lr=0.005),
    },
}


@pytest.fixture(scope="module")
def lower(dataset):
    ranks = run_ranks(WORLD_SIZE, train_and_watch, list(LOWER.values()), dataset)
    return dict(zip(LOWER, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("name", LOWER)
def test_a_lower_precision_learns_the_same_but_for_its_rounding(lower, dataset, name):
    precision = LOWER[name]["precision"]
    exact, _ = plainly_trained(make_spec(**{**LOWER[name], "precision": "float32"}), dataset)
    for outcome, dtypes, num_steps in lower[name]:
        assert dtypes == {getattr(torch, precision)}
        # The scale of float16 is found by trial; at most the first update is skipped.
        assert num_steps >= 9
        assert {value.dtype for value in outcome.weights.values()} == {np.dtype(np.float32)}
        if num_steps == 10:
            assert_same_weights(outcome.weights, exact, atol=0.02)
        assert any(not np.array_equal(value, exact[key].numpy()) for key, value in outcome.weights.items())


def train_and_watch(environment, cases, dataset):
    """Train; return the dtypes of the layers' outputs and the number of the optimizer's steps."""
    return [_watched(environment, number, changes, dataset) for number, changes in enumerate(cases)]


def _watched(environment, number, changes, dataset):
    model, dtypes, steps = make_model(), set(), []
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda layer, inputs, outputs: dtypes.add(outputs.dtype))
    spec = make_spec(**{**changes, "model": model})
    made = spec.optimizer

    def optimizer(parameters):
        watched = made(parameters)
        watched.register_step_post_hook(lambda *_: steps.append(1))
        return watched

    case = [(dataclasses.replace(spec, optimizer=optimizer), dataset)]
    (outcome,) = train_all(environment, case, name=f"watched-{number}")
    return outcome, dtypes, len(steps)


class OverflowingOnce(nn.Module):
    """A loss whose gradients exceed float16 in its first call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, outputs, labels):
        self.calls += 1
        return nn.functional.cross_entropy(outputs, labels) * (1e6 if self.calls == 1 else 1.0)


def test_overflowing_update_is_skipped_and_not_counted_by_the_scheduler(dataset, capfd):
    spec = make_spec(
        loss=OverflowingOnce(),
        precision="float16",
        scheduler=fade,
        scheduler_interval="step",
        epochs=1,
    )
    for (outcome,) in run_ranks(WORLD_SIZE, train_all, [(spec, dataset)]):
        # Of five updates the first one is skipped: 0.1, reduced by a fifth after each of three updates.
        assert outcome.history[0].learning_rate == pytest.approx(0.1 * (1 - 3 / 5))
    assert capfd.readouterr().err.count("1 of 5 updates of epoch 1 were left out") == WORLD_SIZE


def test_rows_that_weigh_nothing_update_nothing(outcomes):
    for outcome in outcomes["rows that weigh nothing"]:
        assert_same_weights(outcome.weights, make_model().state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": no_scheduler}, "Param scheduler must be a function .* it returned SGD"),
        ({"scheduler": OneCycleLR}, "Param scheduler failed when called with the optimizer and 2 steps"),
        (
            {"scheduler": wait_for_plateau, "scheduler_interval": "step"},
            "ReduceLROnPlateau, which looks at the loss of an epoch. Set schedulerInterval to 'epoch'",
        ),
    ],
)
def test_schedulers_that_cannot_work_are_refused(dataset, changes, message):
    with pytest.raises(RankError, match=message):
        run_ranks(1, train_all, [(make_spec(**changes), dataset)])
