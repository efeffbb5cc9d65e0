"""Early stopping, best weights and callbacks on one rank; tests/training/test_callbacks.py uses several ranks."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparkdl.errors import TrainingError
from sparkdl.training.callbacks import BestWeights, Callback, EarlyStopping, FitControl, Patience
from sparkdl.training.history import EpochRecord
from sparkdl.training.spec import Goal

ALONE = SimpleNamespace(world_size=1, rank=0)
VALUES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.nan]), min_size=1, max_size=12)


def record_of(epoch, value, metric="val_f1"):
    metrics = {} if metric == "loss" else {metric: value}
    loss = value if metric == "loss" else 1.0
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


def first_best(values, mode):
    """The first epoch with the best value, counted from 1; None if no value is a number."""
    numbers = [value for value in values if not math.isnan(value)]
    return values.index({"min": min, "max": max}[mode](numbers)) + 1 if numbers else None


@given(values=VALUES, mode=st.sampled_from(["min", "max"]), is_keeper=st.booleans())
def test_best_weights_are_those_of_the_first_best_epoch(values, mode, is_keeper):
    module = nn.BatchNorm1d(2)
    module.register_buffer("average", torch.zeros(()), persistent=False)
    best = BestWeights(Goal(metric="val_f1", mode=mode), module, is_keeper=is_keeper)
    for epoch, value in enumerate(values, start=1):
        module.weight.data.fill_(epoch)
        module.num_batches_tracked.fill_(epoch)
        module.average.fill_(epoch)
        best.offer(record_of(epoch, value))
        again = BestWeights(Goal(metric="val_f1", mode=mode), module, is_keeper=is_keeper)
        again.load_state_dict(best.state_dict())
        for name, tensor in best.tensors().items():  # as a checkpoint does
            again.tensors()[name].copy_(tensor)
        best = again
    expected = first_best(values, mode)
    assert best.restore() == expected
    kept = len(values) if expected is None or not is_keeper else expected
    assert module.weight.tolist() == [kept, kept]
    assert int(module.num_batches_tracked) == int(module.average) == kept


def test_missing_best_epoch_is_a_warning(caplog):
    best = BestWeights(Goal(metric="loss"), nn.Linear(1, 1), is_keeper=True)
    best.offer(record_of(1, math.nan, "loss"))
    assert best.restore() is None
    assert "loss was NaN in every epoch" in caplog.text


@given(
    values=VALUES,
    epochs=st.integers(1, 3),
    min_delta=st.sampled_from([0.0, 0.6]),
    goal=st.sampled_from([Goal(metric="loss"), Goal(metric="val_f1", mode="max")]),
)
def test_patience_ends_the_fit_after_that_many_epochs_without_improvement(values, epochs, min_delta, goal):
    patience, sign = Patience(epochs=epochs, min_delta=min_delta), -1 if goal.mode == "max" else 1
    stopping = EarlyStopping(goal, patience)
    best, waited = math.inf, 0
    for epoch, value in enumerate(values, start=1):
        stopping.observe(record_of(epoch, value, goal.metric))
        best, waited = (sign * value, 0) if sign * value < best - min_delta else (best, waited + 1)
        assert stopping.is_over == (waited >= epochs)
        again = EarlyStopping(goal, patience)
        again.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
        stopping = again


class Diary(Callback):
    def __init__(self, stop_in=None, fail_in=None):
        self.pages = []
        self.stop_in, self.fail_in = stop_in, fail_in

    def _note(self, name, context):
        if name == self.fail_in:
            raise ValueError("no more pages")
        self.pages.append((name, context.epoch, context.step, context.record and context.record.loss))
        if (name, context.epoch) == self.stop_in:
            context.stop()

    def on_fit_start(self, context):
        self._note("fit_start", context)

    def on_epoch_start(self, context):
        self._note("epoch_start", context)

    def on_step_end(self, context):
        assert float(context.loss) == 0.5
        self._note("step_end", context)

    def on_epoch_end(self, context):
        self._note("epoch_end", context)

    def on_fit_end(self, context):
        self._note(f"fit_end with {context.model_epoch}", context)

    def state_dict(self):
        return {"pages": len(self.pages)}

    def load_state_dict(self, state):
        self.pages = ["torn out"] * state["pages"]


def make_course(*callbacks, best=None, patience=None):
    module = nn.Linear(1, 1)
    watched = {"best": best, "patience": patience, "watched": Goal(metric="loss")}
    spec = SimpleNamespace(callbacks=callbacks, epochs=3, **watched)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return FitControl(
        spec, communicator=ALONE, module=module, optimizer=optimizer, steps_per_epoch=1, keeps_best=True
    )


def run(course, losses):
    course.begin()
    for epoch, loss in enumerate(losses, start=1):
        course.call("on_epoch_start", epoch=epoch)
        course.call("on_step_end", epoch=epoch, step=1, loss=torch.tensor(0.5))
        course.end_epoch(record_of(epoch, loss, "loss"))
        course.agree_to_stop()
        if course.has_ended:
            break
    return epoch, course.end()


def test_callbacks_are_called_in_the_documented_order():
    diary, other = Diary(), Diary()
    assert run(make_course(diary, other, best=Goal(metric="loss")), [1.0, 2.0]) == (2, 1)
    assert diary.pages == [
        ("fit_start", 0, 0, None),
        ("epoch_start", 1, 0, None),
        ("step_end", 1, 1, None),
        ("epoch_end", 1, 0, 1.0),
        ("epoch_start", 2, 0, None),
        ("step_end", 2, 1, None),
        ("epoch_end", 2, 0, 2.0),
        ("fit_end with 1", 2, 0, 2.0),
    ]
    assert other.pages == diary.pages


@pytest.mark.parametrize("where", ["step_end", "epoch_end"])
def test_a_callback_ends_the_fit_after_its_epoch(where):
    assert run(make_course(Diary(stop_in=(where, 2))), [1.0, 2.0, 3.0]) == (2, 2)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("fit_start", "Callback Diary failed in on_fit_start on rank 0: ValueError: no more pages"),
        ("step_end", "failed in on_step_end, epoch 1, step 1 on rank 0"),
        ("epoch_end", "failed in on_epoch_end, epoch 1 on rank 0"),
    ],
)
def test_a_callback_that_fails_is_named(where, message):
    with pytest.raises(TrainingError, match=message):
        run(make_course(Diary(fail_in=where)), [1.0])


def test_fit_control_continues_from_its_state():
    settings = {"best": Goal(metric="loss"), "patience": Patience(epochs=2)}
    first = make_course(Diary(), **settings)
    first.begin()
    first.end_epoch(record_of(1, 1.0, "loss"))
    first.agree_to_stop()
    first.end_epoch(record_of(2, 2.0, "loss"))
    first.agree_to_stop()
    assert not first.has_ended
    diary = Diary()
    second = make_course(diary, **settings)
    second.load_state_dict(first.state_dict())
    assert diary.pages == ["torn out"] * 3
    second.end_epoch(record_of(3, 3.0, "loss"))
    second.agree_to_stop()
    assert second.has_ended
    assert second.end() == 1
