"""The events of a fit that reach MLflow's run and the progress line."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest

from sparkdl.errors import CheckpointsInUseError
from sparkdl.estimators.fit.progress import FitListener, FitProgress, StepSampler
from sparkdl.tracking import FitRun
from sparkdl.tracking.start import Switches
from sparkdl.training.history import EpochRecord, ProgressReporter


class NotedRun(FitRun):
    """A run that keeps what is logged to it."""

    def __init__(self):
        self.epochs, self.switches = [], Switches()

    def log_metrics(self, epoch, metrics):
        self.epochs.append((epoch, dict(metrics)))


LOGGED = {
    "seconds": 2.0,
    "rows_per_s": 4.5,
    "data_wait_share": 0.5,
    "learning_rate": 0.1,
    "validation_s": 0.125,
}


def record(epoch, **metrics):
    metrics = {"val_loss": 0.25, **metrics}
    return EpochRecord(epoch=epoch, loss=1 / epoch, rows=9, metrics=metrics, rank_seconds=(), **LOGGED)


def told(epoch):
    rates = {f"system/epoch/{name}": value for name, value in LOGGED.items() if name != "learning_rate"}
    return epoch, {"loss": 1 / epoch, "val_loss": 0.25, "learning_rate": 0.1, **rates}


def listening(run, stream=None):
    return FitListener(run, FitProgress(stream or io.StringIO()), list)


def reporting(listener):
    return ProgressReporter(lambda event: listener.handle_event(0, event), epochs=4, steps_per_epoch=2)


def test_the_run_has_each_epoch_once_whether_restored_or_trained():
    run, stream = NotedRun(), io.StringIO()
    listener = listening(run, stream)
    first = reporting(listener)
    first.resume(epoch=2, steps=1, history=[record(1)])
    assert run.epochs == [told(1)]
    first.epoch(record(2))
    again = reporting(listener)
    again.resume(epoch=3, steps=0, history=[record(1), record(2)])
    again.epoch(record(3))
    assert run.epochs == [told(1), told(2), told(3)]
    shown = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in shown] == [
        "continuing from a checkpoint: epoch 2/4 after step 1",
        "epoch 2/4",
        "continuing from a checkpoint: epoch 3/4",
        "epoch 3/4",
    ]


def test_repeated_epochs_after_a_checkpoint_are_reported_only_where_they_differ():
    run = NotedRun()
    listener = listening(run)
    first = reporting(listener)
    for epoch in (1, 2, 3):
        first.epoch(record(epoch, nothing=math.nan))
    assert len(run.epochs) == 3
    again = reporting(listener)
    again.resume(epoch=2, steps=0, history=[record(1, nothing=math.nan)])
    again.epoch(replace(record(2, nothing=math.nan), seconds=7.0))
    changed = replace(record(3, nothing=math.nan, val_loss=0.125), loss=0.5)
    again.epoch(changed)
    assert run.epochs[3:] == [(3, {"loss": 0.5, "val_loss": 0.125})]
    again.epoch(changed)
    assert len(run.epochs) == 4


def test_an_event_ends_a_fit_that_no_longer_holds_its_folder():
    def check():
        raise CheckpointsInUseError("taken")

    reporter = reporting(FitListener(NotedRun(), FitProgress(io.StringIO()), check))
    with pytest.raises(CheckpointsInUseError, match="taken"):
        reporter.epoch(record(1))


def test_steps_are_numbered_within_the_fit_and_system_metrics_by_host():
    run = NotedRun()
    listener = listening(run)
    step = {"kind": "step", "epoch": 3, "epochs": 4, "step": 2, "steps": 5, "loss": 0.5, "rows_per_s": 9.0}
    listener.handle_event(0, {**step, "eta_s": None})
    for sample, host in ((0, "here"), (0, "there"), (1, "here"), (0, "here")):  # the last after a restart
        listener.handle_event(1, {"kind": "system", "sample": sample, "metrics": {f"system/{host}/cpu": 1.0}})
    assert run.epochs == [
        (12, {"step_loss": 0.5, "system/step/rows_per_s": 9.0}),
        (1, {"system/here/cpu": 1.0}),
        (1, {"system/there/cpu": 1.0}),
        (2, {"system/here/cpu": 1.0}),
        (3, {"system/here/cpu": 1.0}),
    ]


def test_every_n_iter_leaves_epochs_out():
    run = NotedRun()
    run.switches = Switches(every_n_iter=2)
    reporter = reporting(listening(run))
    for epoch in (1, 2, 3, 4):
        reporter.epoch(record(epoch))
    assert run.epochs == [told(2), told(4)]


def test_steps_are_sampled_each_second_in_a_short_fit_and_some_thousand_times_in_a_week():
    sampler = StepSampler()
    assert [number / 4 for number in range(21) if sampler.is_due(100 + number / 4)] == [0, 1, 2, 3, 4, 5]
    sampler, now, count = StepSampler(), 0.0, 0
    while now < 7 * 86_400:
        count += sampler.is_due(now)
        now += max(0.25, now / 10_000)  # as steps come, but fewer of them to keep the test short
    assert 1_000 < count < 4_000
