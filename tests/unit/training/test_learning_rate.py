from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparkdl.errors import ParamError, TrainingError
from sparkdl.estimators.learning_rate_search import judge
from sparkdl.training.history import EpochRecord
from sparkdl.training.learning_rate import LearningRate, RangeTest
from sparkdl.training.spec import Goal


class Passing(LRScheduler):
    """A scheduler of a library that passes a metric on to the scheduler that it holds."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def step(self, epoch=None, metrics=None):
        if metrics is not None:
            self.after.step(metrics)


class Dropping(Passing):
    def step(self, epoch=None):
        """Do nothing with the scheduler that it holds."""


def plateau(optimizer, mode):
    return ReduceLROnPlateau(optimizer, mode=mode, factor=0.1, patience=0, threshold=0.0)


def passing(optimizer, mode):
    return Passing(optimizer, plateau(optimizer, mode))


def dropping(optimizer, mode):
    return Dropping(optimizer, [plateau(optimizer, mode)])


ACCURACY = Goal(metric="val_accuracy", mode="max")


def make(form, mode, watched, interval="epoch"):
    """An optimizer, and its learning rate with a scheduler of one of the forms."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    return optimizer, LearningRate(
        optimizer,
        scheduler=lambda optimizer, _: form(optimizer, mode),
        interval=interval,
        num_epochs=4,
        updates_per_epoch=1,
        watched=watched,
    )


def record(epoch, loss, **metrics):
    return EpochRecord(
        epoch=epoch,
        loss=loss,
        rows=1,
        seconds=1.0,
        rows_per_s=1.0,
        data_wait_share=0.25,
        learning_rate=0.1,
        metrics=metrics,
        rank_seconds=(),
    )


@pytest.mark.parametrize("form", [plateau, passing])
@pytest.mark.parametrize(
    ("mode", "watched", "improving"),
    [
        ("max", ACCURACY, "val_accuracy"),
        ("max", Goal(metric="right", mode="max"), "right"),
        ("min", Goal(metric="val_mae"), "val_mae"),
        ("min", Goal(metric="loss"), "loss"),
        ("min", ACCURACY, "val_loss"),
        ("min", None, "val_loss"),
    ],
)
def test_plateau_is_stepped_with_the_metric_that_improves_in_its_direction(form, mode, watched, improving):
    sign = 1.0 if mode == "max" else -1.0
    optimizer, rate = make(form, mode, watched)
    for epoch in range(1, 6):  # only the one metric improves; all others become worse
        metrics = dict.fromkeys(("val_loss", "val_mae", "loss"), float(epoch))
        metrics |= dict.fromkeys(("val_accuracy", "right"), -float(epoch))
        metrics[improving] = sign * epoch
        rate.end_epoch(record(epoch, metrics.pop("loss"), **metrics))
    assert optimizer.param_groups[0]["lr"] == 1.0
    rate.end_epoch(record(6, 0.0, **dict.fromkeys(metrics, 0.0)))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_plateau_is_stepped_with_the_training_loss_without_validation():
    optimizer, rate = make(plateau, "min", None)
    for epoch, loss in enumerate((3.0, 2.0, float("nan"), 1.0), start=1):
        rate.end_epoch(record(epoch, loss))
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize(
    ("form", "mode", "watched", "message"),
    [
        (
            plateau,
            "max",
            Goal(metric="val_loss"),
            r"mode='max'\), and val_loss, which it follows, .* Set bestMetric .* bestMode",
        ),
        (plateau, "max", Goal(metric="val_mae"), r"mode='max'\), and val_mae, which it follows"),
        (plateau, "max", None, r"mode='max'\), and the loss, which it follows"),
        (passing, "max", None, r"mode='max'\), and the loss, which it follows"),
        (
            dropping,
            "min",
            None,
            "a Dropping that holds a ReduceLROnPlateau, and its step has no argument metrics",
        ),
    ],
)
def test_plateau_without_a_metric_of_its_direction_is_refused(form, mode, watched, message):
    with pytest.raises(ParamError, match=message):
        make(form, mode, watched)


def test_range_test_averages_rows_leaves_out_skipped_updates_and_ends_when_the_loss_explodes():
    test = RangeTest(SimpleNamespace(world_size=1))
    test.add(torch.tensor(1.0), 3.0)
    test.add(torch.tensor(5.0), 1.0)  # the two batches of an update
    assert not test.ends_before_update(0.1)
    (first,) = test.losses
    assert first == pytest.approx((0.1, 2.0))
    for _ in range(2):  # the second after an update that was skipped, which leaves the rate unchanged
        test.add(torch.tensor(2.0), 4.0)
        assert not test.ends_before_update(0.2)
    assert [rate for rate, _ in test.losses] == [0.1, 0.2]
    test.add(torch.tensor(2.0), 4.0)
    kept = list(test.losses)
    assert not test.ends_before_update(0.2)  # of an epoch that goes on after the last rate
    assert test.losses == kept
    test.add(torch.tensor(100.0), 4.0)
    assert test.ends_before_update(0.4)
    assert [rate for rate, _ in test.losses] == [0.1, 0.2]


def test_a_range_test_of_rows_without_weight_is_refused():
    test = RangeTest(SimpleNamespace(world_size=1))
    test.add(torch.tensor(1.0), 0.0)
    assert not test.ends_before_update(0.1)
    with pytest.raises(TrainingError, match="weights of all rows that it drew are 0"):
        judge(test.losses)
