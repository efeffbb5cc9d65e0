"""Accumulated, clipped, scheduled and scaled updates on two ranks are those of one process in plain torch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from sparkdl.data import ParquetFeed
from sparkdl.errors import RankError
from tests.run_ranks import run_ranks
from tests.training.training_scenes import joined_loss, make_model, make_spec, train_all, write_dataset

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


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), NUM_ROWS)


@pytest.fixture(scope="module")
def outcomes(dataset):
    cases = [(make_spec(**changes), dataset) for changes in CASES.values()]
    first, second = run_ranks(WORLD_SIZE, train_all, cases, timeout_s=120)
    return {name: (first[index], second[index]) for index, name in enumerate(CASES)}


def plainly_trained(spec, dataset):
    """The weights and the learning rates of the updates, by a loop as one would write it."""
    factor = {"none": 1.0, "linear": WORLD_SIZE, "sqrt": WORLD_SIZE**0.5}[spec.learning_rate_scaling]
    model = spec.model.train()
    optimizer = spec.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= factor
    per_epoch = -(-5 // spec.accumulated_batches)
    num_steps = spec.epochs * (per_epoch if spec.scheduler_interval == "step" else 1)
    scheduler = spec.scheduler(optimizer, num_steps) if spec.scheduler else None
    feeds = [
        ParquetFeed(
            dataset,
            columns=spec.columns(),
            rank=rank,
            world_size=WORLD_SIZE,
            batch_size=spec.batch_size,
            seed=spec.seed,
        )
        for rank in range(WORLD_SIZE)
    ]
    rates = []
    for epoch in range(spec.epochs):
        steps = [
            {name: np.concatenate([part[name] for part in parts]) for name in spec.columns()}
            for parts in zip(*(feed.epoch(epoch) for feed in feeds), strict=True)
        ]
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
            scheduled = optimizer.param_groups[0]["lr"]
            part = min(1.0, (len(rates) + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
            optimizer.param_groups[0]["lr"] = scheduled * part
            rates.append(scheduled * part)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = scheduled
            if scheduler and spec.scheduler_interval == "step":
                scheduler.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(sum(loss * rows for loss, rows in losses) / NUM_ROWS)
        elif scheduler and spec.scheduler_interval == "epoch":
            scheduler.step()
    for feed in feeds:
        feed.close()
    return model.state_dict(), rates[per_epoch - 1 :: per_epoch]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_update_as_one_process_does(outcomes, dataset, name):
    expected, rates = plainly_trained(make_spec(**CASES[name]), dataset)
    for outcome in outcomes[name]:
        for key, value in outcome.weights.items():
            np.testing.assert_allclose(value, expected[key].numpy(), rtol=0, atol=TOLERANCE)
        assert [record.learning_rate for record in outcome.history] == pytest.approx(rates)


@pytest.mark.parametrize("name", CASES)
def test_each_setting_changes_what_is_learned(dataset, name):
    settings = {
        key: value
        for key, value in CASES[name].items()
        if key not in ("loss", "optimizer", "epochs", "weight")
    }
    plain = {key: value for key, value in CASES[name].items() if key not in settings}
    changed, _ = plainly_trained(make_spec(**CASES[name]), dataset)
    unchanged, _ = plainly_trained(make_spec(**plain), dataset)
    assert any(not torch.allclose(changed[key], unchanged[key], atol=1e-4) for key in changed)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_lower_precision_learns_the_same_but_for_its_rounding(dataset, precision):
    seen = run_ranks(WORLD_SIZE, dtypes_inside, precision, dataset)
    exact, _ = plainly_trained(make_spec(), dataset)
    for dtypes, outcome in seen:
        assert dtypes == {getattr(torch, precision)}
        for key, value in outcome.weights.items():
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, exact[key].numpy(), rtol=0, atol=0.02)
        assert any(not np.array_equal(value, exact[key].numpy()) for key, value in outcome.weights.items())


def dtypes_inside(environment, precision, dataset):
    """Train, and note the dtypes that the layers give."""
    model = make_model()
    dtypes = set()
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda layer, inputs, outputs: dtypes.add(outputs.dtype))
    (outcome,) = train_all(environment, [(make_spec(model=model, precision=precision), dataset)])
    return dtypes, outcome


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
