"""The training loop on real ranks: N ranks compute what one process computes on the joined batches."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from sparkdl.collective.error_origin import is_consequence
from sparkdl.errors import RankError, SparkdlError
from sparkdl.training.callbacks import Callback
from sparkdl.training.device_batches import single_rows_allowed
from tests.run_ranks import run_ranks
from tests.training.scenes.training_scenes import (
    assert_same_weights,
    make_model,
    make_spec,
    train_all,
    train_beside_gpus,
    train_in_one_process,
    write_dataset,
)
from tests.training.test_validation import with_split

TOLERANCE = 2e-6  # float32, other order of sums

CASES = {
    "mean over unequal last batches": (37, {}),
    "a rank without rows in the last step": (33, {}),
    "one row per rank": (2, {}),
    "a loss that sums": (37, {"loss": nn.CrossEntropyLoss(reduction="sum"), "lr": 0.01}),
    "a loss per row": (37, {"loss": nn.CrossEntropyLoss(reduction="none")}),
    "weighted classes": (37, {"loss": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))}),
    "an ignored class": (37, {"loss": nn.CrossEntropyLoss(ignore_index=1)}),
    "cached rows": (33, {"cache": "disk"}),
    "weighted rows": (33, {"weight": "w"}),
    "regression": (37, {"loss": nn.MSELoss(), "label": "target", "label_dtype": "float32"}),
}


@pytest.mark.parametrize(("world_size", "numbers_of_rows"), [(1, [17]), (2, [33, 37]), (3, [50])])
def test_synchronized_batch_norms_take_the_statistics_of_all_rows(tmp_path, world_size, numbers_of_rows):
    """Also if one of three ranks has no row in the last step, or all together have one row, which has no variance.

    The layers of the returned model keep their classes.
    """
    cases = [
        (
            make_spec(model=make_model(norm=True), sync_batch_norm=True, epochs=3),
            write_dataset(tmp_path / str(num_rows), num_rows),
        )
        for num_rows in numbers_of_rows
    ]
    ranks = run_ranks(world_size, train_all, cases)
    for (spec, dataset), outcomes in zip(cases, zip(*ranks, strict=True), strict=True):
        with single_rows_allowed(spec.model):
            expected = train_in_one_process(spec, dataset, world_size=world_size)
        for outcome in outcomes:
            # The two rows of the last step hardly vary; dividing by their deviation magnifies rounding errors.
            assert_same_weights(outcome.weights, expected, atol=5e-5)


def make_case(tmp_path, name):
    num_rows, changes = CASES[name]
    changes = dict(changes)
    lr = changes.pop("lr", 0.1)
    outputs = 1 if changes.get("label") == "target" else 3
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    spec = make_spec(model=make_model(outputs), optimizer=optimizer, **changes)
    return spec, write_dataset(tmp_path / str(num_rows), num_rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The outcomes of all cases in two worlds of two ranks."""
    cases = [make_case(tmp_path_factory.mktemp("data"), name) for name in CASES]
    return cases, [run_ranks(2, train_all, cases) for _ in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_on_the_joined_batches(trained, name):
    cases, runs = trained
    index = list(CASES).index(name)
    spec, dataset = cases[index]
    expected = train_in_one_process(spec, dataset, world_size=2)
    for outcomes in runs[0]:
        assert_same_weights(outcomes[index].weights, expected, atol=TOLERANCE)


def test_a_seed_repeats_to_the_bit(trained):
    _, (first, second) = trained
    for one, other in zip(first[0], second[0], strict=True):
        assert [record.loss for record in one.history] == [record.loss for record in other.history]
        assert_same_weights(one.weights, other.weights)


DRAWN = []


class DrawsNumbers(Callback):
    """Notes random numbers of each generator on its rank at the start of a fit."""

    def on_fit_start(self, context):
        DRAWN.append((random.random(), np.random.random(), float(torch.rand(()))))


def draw_in_fits(environment, cases):
    train_all(environment, cases)
    return DRAWN


def test_random_numbers_differ_between_ranks_and_repeat_for_the_same_seed(tmp_path):
    dataset = write_dataset(tmp_path, 9)
    cases = [(make_spec(callbacks=(DrawsNumbers(),), seed=seed), dataset) for seed in (7, 7, 8)]
    ranks = run_ranks(2, draw_in_fits, cases)
    for first, again, of_other_seed in ranks:
        assert first == again
        assert not set(first) & set(of_other_seed)
    assert not set(ranks[0][0]) & set(ranks[1][0])


def test_history_counts_every_row_once_and_is_the_same_on_all_ranks(trained):
    cases, (run, _) = trained
    for index, (_, dataset) in enumerate(cases):
        first, second = run[0][index].history, run[1][index].history
        assert first == second
        assert [record.rows for record in first] == [dataset.num_rows] * 2
        assert [record.epoch for record in first] == [1, 2]
        assert all(math.isfinite(record.loss) and record.rows_per_s > 0 for record in first)
        assert all(0 < record.data_wait_share < 1 for record in first)


def test_only_rank_0_reports_and_names_every_epoch(trained):
    _, (run, _) = trained
    events = run[0][0].events
    assert run[1][0].events == []
    assert [event["epoch"] for event in events if event["kind"] == "epoch"] == [1, 2]
    step = next(event for event in events if event["kind"] == "step")
    assert {"epoch", "epochs", "step", "steps", "loss", "rows_per_s", "eta_s"} <= set(step)
    assert step["steps"] == 3


def test_one_rank_equals_plain_torch(tmp_path):
    dataset = write_dataset(tmp_path, 21)
    (outcomes,) = run_ranks(1, train_all, [(make_spec(), dataset)])
    expected = train_in_one_process(make_spec(), dataset, world_size=1)
    assert_same_weights(outcomes[0].weights, expected, atol=TOLERANCE)


class UsesSomeLayers(nn.Module):
    """A model with a layer for some rows only; it counts the batches in which no row uses the layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.extra = nn.Linear(4, 3), nn.Linear(4, 3)
        self.num_without = 0

    def forward(self, x):
        outputs, has_extra = self.base(x), x[:, :1] > 0
        if has_extra.any():
            return outputs + self.extra(x) * has_extra
        self.num_without += 1
        return outputs


def test_batch_that_a_rank_without_rows_repeats_gives_its_layers_no_gradient(tmp_path):
    """A gradient of zero in place of None would let AdamW's weight decay change their weights."""
    optimizer = partial(torch.optim.AdamW, lr=0.1, eps=1e-3, weight_decay=1.0)
    spec = make_spec(model=UsesSomeLayers(), optimizer=optimizer, epochs=4)
    dataset = write_dataset(tmp_path, 33)  # the third step of an epoch has one row
    outcomes = run_ranks(2, train_all, [(spec, dataset)])
    expected = train_in_one_process(spec, dataset, world_size=2)
    assert 0 < spec.model.num_without < 4, "some of the single rows use the layer, and some do not"
    for (outcome,) in outcomes:
        assert_same_weights(outcome.weights, expected, atol=TOLERANCE)


class StepThatSeesRowsOnce:
    """A user's step that refuses rows that it has seen."""

    def __init__(self):
        self.seen = set()

    def __call__(self, model, batch):
        rows = {tuple(row) for row in batch["x"].tolist()} if torch.is_grad_enabled() else set()
        assert not rows & self.seen, "each row once"
        self.seen |= rows
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def step_with_a_collective(model, batch):
    everywhere = torch.tensor(1.0)
    torch.distributed.all_reduce(everywhere)
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"]) * everywhere / 2


def test_a_users_step_sees_each_row_once_and_ranks_without_rows_join_its_collectives(tmp_path):
    dataset = write_dataset(tmp_path, 33)  # in the third step one rank has no row
    specs = [make_spec(epochs=1) for _ in range(3)]
    for index, step in enumerate((StepThatSeesRowsOnce(), step_with_a_collective), start=1):
        heads = tuple(replace(head, loss=None) for head in specs[index].heads)
        specs[index] = replace(specs[index], heads=heads, user_step=step)
    for plain_outcome, *outcomes in run_ranks(2, train_all, [(spec, dataset) for spec in specs]):
        for outcome in outcomes:
            assert_same_weights(outcome.weights, plain_outcome.weights, atol=TOLERANCE)


def test_fit_on_cpu_does_not_use_gpus(tmp_path):
    for (outcome,) in run_ranks(2, train_beside_gpus, make_spec(epochs=1), write_dataset(tmp_path, 20)):
        assert outcome.history[0].rows == 20


def test_a_batch_norm_takes_one_row_and_no_rows(tmp_path):
    dataset = write_dataset(
        tmp_path, 33
    )  # 16 and 17 rows: in the third step rank 0 has none and rank 1 has one
    spec = make_spec(model=make_model(norm=True), epochs=1)
    outcomes = run_ranks(2, train_all, [(spec, dataset)])
    for (outcome,) in outcomes:
        assert outcome.weights["1.num_batches_tracked"] == 2
        assert np.isfinite(outcome.weights["1.running_var"]).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_no_longer_finite_is_named_with_epoch_and_step(tmp_path, world_size):
    dataset = write_dataset(tmp_path, 40)
    spec = make_spec(
        model=make_model(1),
        loss=nn.MSELoss(),
        label="target",
        label_dtype="float32",
        optimizer=partial(torch.optim.SGD, lr=1e20, momentum=0.9),
        epochs=3,
    )
    with pytest.raises(RankError, match=r"TrainingError: The loss became (inf|nan) in epoch 1, step [23]"):
        run_ranks(world_size, train_all, [(spec, dataset)])


class FailsOnOneRank(nn.Module):
    """A loss that fails in the third batch of rank 1 while rank 0 waits for its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs, labels):
        self.calls += 1
        if torch.distributed.get_rank() == 1 and self.calls == 3:
            raise RuntimeError("not these rows")
        return nn.functional.cross_entropy(outputs, labels)


def fail_on_one_rank(environment, spec, dataset):
    with pytest.raises(SparkdlError) as caught:
        train_all(environment, [(spec, dataset)])
    return str(caught.value), is_consequence(caught.value)


def test_loss_that_fails_on_one_rank_is_reported_there_and_as_the_cause_elsewhere(tmp_path):
    spec = make_spec(loss=FailsOnOneRank(), batch_size=4)
    (other, own) = run_ranks(2, fail_on_one_rank, spec, write_dataset(tmp_path, 40))
    assert own[0].startswith("In epoch 1, step 3 on rank 1 ")
    assert "RuntimeError: not these rows" in own[0]
    assert not own[1]
    assert other[1]
    assert own[0].rstrip(".") in other[0], "why rank 1 has aborted"


class FailsInValidation(nn.Module):
    def forward(self, outputs, labels):
        if not torch.is_grad_enabled():
            raise IndexError("not these rows")
        return nn.functional.cross_entropy(outputs, labels)


def fail_to_augment(arrays):
    raise KeyError("nowhere")


class FailsInCompute(MeanMetric):
    def update(self, outputs, labels):
        super().update(outputs)

    def compute(self):
        raise KeyError("nowhere")


def failing_scheduler(optimizer, num_steps):
    """Make a scheduler that fails after the second update or epoch."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5][step])


SCHEDULER_FAILED = "Param scheduler: LambdaLR failed when it continued: IndexError"
FAILING = {
    "the loss in validation": (
        {"loss": FailsInValidation(), "share": 0.3},
        "epoch 1, step 1 of the validation",
        "evaluating the batch failed: IndexError: not these rows",
    ),
    "augment": (
        {"augment": fail_to_augment},
        "epoch 1, step 1",
        "preparing the batch failed: KeyError: 'nowhere'",
    ),
    "a metric at the end of an epoch": (
        {"metrics": {"m": FailsInCompute()}},
        "epoch 1",
        "Metric 'm' failed: KeyError: 'nowhere'",
    ),
    "a scheduler per step": (
        {"scheduler": failing_scheduler, "scheduler_interval": "step"},
        "epoch 1, step 2",
        SCHEDULER_FAILED,
    ),
    "a scheduler per epoch": (
        {"scheduler": failing_scheduler, "batch_size": 40},
        "epoch 2",
        SCHEDULER_FAILED,
    ),
}


def fail_in_each(environment, cases):
    """Return the position and the message of each training's error."""
    told = []
    for name, case in cases.items():
        with pytest.raises(SparkdlError) as caught:
            train_all(environment, [case], name=name)
        told.append((caught.value.position, str(caught.value)))
    return told


def test_failures_in_a_fit_are_reported_with_their_position(tmp_path):
    dataset = write_dataset(tmp_path, 40)
    cases = {}
    for name, (changes, _, _) in FAILING.items():
        spec = make_spec(**{key: value for key, value in changes.items() if key != "share"})
        cases[name] = (with_split(spec, dataset, changes["share"]) if "share" in changes else spec, dataset)
    (told,) = run_ranks(1, fail_in_each, cases)
    for (position, message), (_, where, what) in zip(told, FAILING.values(), strict=True):
        assert position == where
        assert message.startswith(f"In {where} on rank 0")
        assert what in message


def loss_in_any_order(outputs, labels):
    """A nondeterministic loss: the order of writes decides which of several values remains."""
    torch.zeros(3).put_(labels.clamp(max=1), torch.arange(float(len(labels))))
    return nn.functional.cross_entropy(outputs, labels)


def test_deterministic_fit_refuses_nondeterministic_operations(tmp_path):
    dataset = write_dataset(tmp_path, 9)
    cases = [(make_spec(loss=loss_in_any_order, deterministic=refused), dataset) for refused in (False, True)]
    with pytest.raises(RankError, match="put_ does not have a deterministic implementation"):
        run_ranks(1, train_all, cases)
    assert len(run_ranks(1, train_all, cases[:1])[0]) == 1


class RefusesToRun(nn.Module):
    """A module that only runs compiled, or only not compiled."""

    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        self.inner = make_model()
        self.compiled = compiled

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() != self.compiled:
            raise AssertionError
        return self.inner(rows)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_compiled_model_is_trained_to_the_same_weights(tmp_path):
    dataset = write_dataset(tmp_path, 37)
    cases = [
        (make_spec(model=RefusesToRun(compiled=compiled), compile=compiled), dataset)
        for compiled in (False, True)
    ]
    ((plain, fast), _) = run_ranks(2, train_all, cases, timeout_s=300)
    assert_same_weights(fast.weights, plain.weights, atol=1e-5)
