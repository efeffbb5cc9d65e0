"""Validation on several ranks uses each row once, agrees with validation on one rank, and does not affect training."""

from __future__ import annotations

import dataclasses
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from sparkdl.data import ParquetFeed
from sparkdl.data.dataset.row_choice import draw_rows
from sparkdl.estimators.fit.split import marked_rows
from sparkdl.parallel import Parallelism
from sparkdl.training.trainer import train
from tests.run_ranks import run_ranks
from tests.training.scenes.training_scenes import make_model, make_spec, train_all, write_dataset

NUM_ROWS = 75
FEW_ROWS = 2 / NUM_ROWS


class ModelThatNotes(nn.Module):
    """A model that checks its mode in training and validation, and draws a random number in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(make_model(norm=True), nn.Dropout(0.5), nn.Linear(3, 3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert torch.is_grad_enabled() == self.training
        assert all(part.training == self.training for part in self.modules())
        if not self.training:
            torch.rand(1)  # training must not be affected by this
        return self.inner(rows)


class LossThatCounts(nn.Module):
    """A loss that grows with the number of its calls, and draws random numbers in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert torch.is_grad_enabled() == self.training
        if not self.training:
            random.random(), np.random.random(), torch.rand(1)
        self.calls += 1
        noise = 0.01 * random.random() + 0.01 * np.random.random()
        return nn.functional.cross_entropy(outputs, labels) * (1 + self.calls / 10 + noise)


def is_right(outputs, labels):
    return outputs.argmax(dim=1) == labels


def first_score(outputs, labels):
    return outputs[:, 0].mean()


METRICS = {
    "right": is_right,
    "score": first_score,
    "accuracy": MulticlassAccuracy(3, average="micro"),
    "auroc": MulticlassAUROC(3),
}


def with_split(spec, dataset, share):
    if share is None:
        validation, training = marked_rows(dataset, "validates")
    else:
        validation = draw_rows(dataset.row_counts, share, seed=3)
        training = validation.rest()
    return dataclasses.replace(spec, training_rows=training, validation_rows=validation)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), NUM_ROWS)


CASES = {
    "drawn": (0.4, {}),
    "marked": (None, {}),
    "weighted": (0.4, {"weight": "w"}),
    "fewer rows than ranks": (FEW_ROWS, {}),
    "cached": (0.4, {"cache": "disk"}),
    "ignored labels": (0.4, {"loss": nn.CrossEntropyLoss(ignore_index=1)}),
}


@pytest.fixture(scope="module")
def outcomes(dataset):
    cases = [
        (with_split(make_spec(model=ModelThatNotes(), metrics=METRICS, **changes), dataset, share), dataset)
        for share, changes in CASES.values()
    ]
    ranks = run_ranks(3, train_all, cases)
    return {name: [outcomes[index] for outcomes in ranks] for index, name in enumerate(CASES)}


def plainly_validated(spec, dataset, weights):
    model = ModelThatNotes()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    model.eval()
    with ParquetFeed(
        dataset, columns=spec.columns(), batch_size=NUM_ROWS, shuffle=False, row_filter=spec.validation_rows
    ) as feed:
        (batch,) = feed.epoch(0)
    labels = torch.from_numpy(batch["y"])
    with torch.no_grad():
        outputs = model(torch.from_numpy(batch["x"]))
    loss = spec.heads[0].loss(outputs, labels)
    if spec.weight:
        each = nn.functional.cross_entropy(outputs, labels, reduction="none")
        loss = (each * torch.from_numpy(batch["w"])).sum() / batch["w"].sum()
    return {
        "val_loss": float(loss),
        "val_right": float(is_right(outputs, labels).double().mean()),
        "val_score": float(first_score(outputs, labels)),
        "val_accuracy": float(is_right(outputs, labels).double().mean()),
        "val_auroc": float(MulticlassAUROC(3)(outputs, labels)),
    }


@pytest.mark.parametrize("name", CASES)
def test_three_ranks_validate_the_final_weights_as_plain_torch_does(outcomes, dataset, name):
    share, changes = CASES[name]
    spec = with_split(make_spec(**changes), dataset, share)
    expected = plainly_validated(spec, dataset, outcomes[name][0].weights)
    for outcome in outcomes[name]:
        assert [list(record.metrics) for record in outcome.history] == [[*METRICS, *expected]] * 2
        found = {key: outcome.history[-1].metrics[key] for key in expected}
        assert found == pytest.approx(expected, abs=1e-5)
        assert outcome.history[-1].rows == NUM_ROWS - sum(spec.validation_rows.counts)
        assert outcome.history[-1].validation_s > 0
        assert len(outcome.history[-1].rank_seconds) == 3


def test_all_ranks_have_the_same_record(outcomes):
    for ranks in outcomes.values():
        assert ranks[0].history == ranks[1].history == ranks[2].history


@pytest.fixture(scope="module")
def on_two_ranks(dataset):
    split = with_split(
        make_spec(model=ModelThatNotes(), loss=LossThatCounts(), metrics=METRICS), dataset, 0.4
    )
    heads = (dataclasses.replace(split.heads[0], loss=LossThatCounts()),)
    unnormalized = make_spec(model=ModelWithoutRunningStatistics(), sync_batch_norm=True, epochs=1)
    specs = {
        "standing still": standing_still_spec(),
        "validated": split,
        "alone": dataclasses.replace(
            split, model=ModelThatNotes(), heads=heads, validation_rows=None, metrics={}
        ),
        "one validation row": with_split(unnormalized, dataset, 1 / NUM_ROWS),
    }
    ranks = run_ranks(2, train_all, [(spec, dataset) for spec in specs.values()])
    return [dict(zip(specs, outcomes, strict=True)) for outcomes in ranks]


def standing_still_spec():
    """With a learning rate of 0 the weights are the same in each pass."""
    return make_spec(metrics={**METRICS, "r": PearsonOfScores}, optimizer=partial(torch.optim.SGD, lr=0.0))


def test_training_metrics_are_computed_on_the_training_rows(dataset, on_two_ranks):
    one = run_ranks(1, train_all, [(standing_still_spec(), dataset)])[0][0]
    for outcomes in on_two_ranks:
        found = outcomes["standing still"].history[0].metrics
        assert found == pytest.approx(one.history[0].metrics, abs=1e-5)
    with ParquetFeed(dataset, columns=["x", "y"], batch_size=NUM_ROWS, shuffle=False) as feed:
        (batch,) = feed.epoch(0)
    outputs, labels = make_model()(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"])
    assert one.history[0].metrics["right"] == pytest.approx(float(is_right(outputs, labels).double().mean()))
    assert one.history[0].metrics["auroc"] == pytest.approx(float(MulticlassAUROC(3)(outputs, labels)))


class PearsonOfScores(PearsonCorrCoef):
    """Correlation of a score and the label; its states have no reduction, and it merges those of ranks itself."""

    def update(self, outputs, labels):
        super().update(outputs[:, 0].double(), labels.double())


def test_validation_does_not_affect_training(on_two_ranks):
    """The same rows are trained on with and without validation, by a model and a loss with state and random numbers."""
    parameters = [name for name, _ in ModelThatNotes().named_parameters()]
    for rank, outcomes in enumerate(on_two_ranks):
        validated, alone = outcomes["validated"], outcomes["alone"]
        assert [record.loss for record in validated.history] == [record.loss for record in alone.history]
        for name in parameters if rank else alone.weights:  # the other ranks get the buffers of rank 0
            np.testing.assert_array_equal(validated.weights[name], alone.weights[name])


class MaskedEncoder(nn.Module):
    """An encoder that is given a padding mask, for which torch makes nested tensors in validation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        positions = rows.unsqueeze(1).repeat(1, 3, 1)
        is_padding = torch.zeros(len(rows), 3, dtype=torch.bool)
        is_padding[:, 2] = True
        return self.head(self.encoder(positions, src_key_padding_mask=is_padding)[:, :2].mean(1))


def halve_each_epoch(optimizer, num_steps):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def warned_of(environment, cases):
    """The warnings that are shown while the cases are trained."""
    with warnings.catch_warnings(record=True) as shown:
        train_all(environment, cases, name="quiet")
    return [str(warning.message) for warning in shown]


def test_no_warnings_of_torch_come_between_epochs(dataset):
    specs = (
        make_spec(model=MaskedEncoder(), scheduler=halve_each_epoch),
        make_spec(scheduler=halve_each_epoch, scheduler_interval="step", warmup_steps=3, precision="float16"),
        make_spec(parallelism=Parallelism(shard=2), accumulated_batches=2, max_grad_norm=1.0),
        make_spec(precision="bfloat16", metrics=METRICS),
    )
    cases = [(with_split(spec, dataset, 0.3), dataset) for spec in specs]
    assert run_ranks(2, warned_of, cases) == [[], []]


class ModelWithoutRunningStatistics(nn.Module):
    """A model that normalizes each batch by its own statistics, also in ``eval()`` mode."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(2, track_running_stats=False)
        self.inner = nn.Sequential(
            nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Linear(8, 3)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows)


def test_ranks_with_unlike_numbers_of_validation_batches_do_not_wait_for_each_other(on_two_ranks):
    """One rank has the only validation row, which a synchronized BatchNorm normalizes without the other rank."""
    for outcomes in on_two_ranks:
        assert np.isfinite(outcomes["one validation row"].history[0].metrics["val_loss"])


def count_collectives(environment, cases):
    """Train on this rank; return the number of collective operations of each case."""
    counts = []
    for number, (spec, dataset) in enumerate(cases):
        with environment.open(name=f"counted-{number}") as communicator:
            train(spec, communicator=communicator, dataset=dataset, keep=id, report=lambda _: None)
            counts.append(sum(row.count for row in communicator.report().operations))
    return counts


def test_metrics_and_validation_need_no_collective_per_step(dataset):
    cases = []
    for batch_size in (2, 16):
        split = with_split(make_spec(metrics=METRICS, batch_size=batch_size), dataset, 0.4)
        cases += [split, dataclasses.replace(split, metrics={}, validation_rows=None)]
    for counts in run_ranks(2, count_collectives, [(spec, dataset) for spec in cases]):
        of_many_steps, without, of_few_steps, without_either = counts
        assert without > without_either  # gradients are averaged in each step
        assert of_many_steps - without == of_few_steps - without_either
