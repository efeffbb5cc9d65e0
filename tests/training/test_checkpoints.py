"""A fit that resumes from a checkpoint ends with the same weights, to the bit, as an uninterrupted one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkdl.data.dataset.row_choice import draw_rows
from sparkdl.training.checkpoint.fit_manifest import fit_folder
from tests.run_ranks import run_ranks
from tests.training.scenes.checkpoint_scenes import (
    VALIDATION_ROWS,
    NotesEpoch,
    StopsOnOneRank,
    assert_same_fit,
    estimated_specs,
    interrupted_spec,
    note_rows,
    place_of,
    scheduled_spec,
    train_and_note,
    train_each,
    train_from_every_checkpoint,
    train_through_death,
)
from tests.training.scenes.training_scenes import Outcome, assert_same_weights, make_model, write_dataset

if TYPE_CHECKING:
    from sparkdl.training.spec import TrainingSpec

NUM_ROWS = 81  # to train on: 6 steps of 8 rows on each of 2 ranks; the last one of one row and none
CASES = {
    1: {"sync_batch_norm": True, "precision": "float16", "patience": None, "callbacks": (StopsOnOneRank(),)},
    2: {},
}
"""Changes of the spec by the number of steps per update."""
TOLERANCE = 2e-6  # float32, other order of sums


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), NUM_ROWS + VALIDATION_ROWS)


@pytest.fixture(scope="module")
def undisturbed(dataset):
    return run_ranks(2, train_through_death, interrupted_spec(dataset, None), dataset)


@pytest.mark.parametrize(
    ("dying", "call"),
    [pytest.param(1, 4, id="rank 1"), pytest.param(0, 9, id="rank 0", marks=pytest.mark.slow)],
)
def test_fit_resumed_after_a_killed_rank_ends_with_the_same_bits(dataset, undisturbed, tmp_path, dying, call):
    killed = interrupted_spec(dataset, tmp_path, ends_at=call)
    run_ranks(2, train_through_death, killed, dataset, dying, may_die=[dying])
    assert fit_folder(str(tmp_path)).names()
    again = run_ranks(2, train_through_death, interrupted_spec(dataset, tmp_path), dataset)
    for one, other in zip(undisturbed, again, strict=True):
        assert_same_fit(one, other)
    assert again[0].events[0]["kind"] == "resumed"


@pytest.mark.slow  # on one and three ranks, fits are resumed from several updates daily
def test_fit_can_be_resumed_from_any_update(dataset, undisturbed, tmp_path):
    specs = [
        interrupted_spec(dataset, tmp_path / str(number), accumulated_batches=number, **changes)
        for number, changes in CASES.items()
    ]
    ranks = run_ranks(2, train_from_every_checkpoint, specs, dataset)
    for rank, outcomes in enumerate(ranks):
        for accumulated, (whole, resumed) in zip(CASES, outcomes, strict=True):
            assert list(resumed) == [
                (epoch, step) for epoch in (1, 2) for step in range(accumulated, 7, accumulated)
            ]
            for place, outcome in resumed.items():
                assert_same_fit(whole, outcome)
                if rank == 0 and place != (2, 6):
                    assert outcome.events[0]["kind"] == "resumed"
                    assert (outcome.events[0]["epoch"], outcome.events[0]["step"]) in (place, (2, 0))
        assert_same_fit(undisturbed[rank], outcomes[1][0])


def test_fits_with_a_train_step_and_of_a_ready_made_network_can_be_resumed(dataset, tmp_path):
    specs = estimated_specs(dataset, tmp_path)
    for outcomes in run_ranks(2, train_from_every_checkpoint, specs, dataset):
        for whole, resumed in outcomes:
            assert list(resumed) == [(1, 1), (1, 2), (2, 1), (2, 2)]
            for outcome in resumed.values():
                assert_same_fit(whole, outcome)
            assert whole.history[0].loss != whole.history[1].loss


def copy_of(folder: Path, place: tuple[int, int], name: str) -> Path:
    """Copy only the checkpoint of an epoch and step to a folder of this name."""
    source = fit_folder(str(folder))
    (checkpoint,) = [name for name in source.names() if place_of(source, name) == place]
    shutil.copytree(folder / checkpoint, folder.with_name(name) / checkpoint)
    return folder.with_name(name)


def small_batches(dataset, folder: Path, *, num_rows: int = 276, **changes: Any) -> TrainingSpec:
    """A spec of 18 steps of 16 of 276 rows, the last of 4 rows, and of updates of two steps; nothing else is random."""
    validation = draw_rows(dataset.row_counts, 1 - num_rows / dataset.num_rows, seed=3)
    fields: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "weight": "w",
        "metrics": {"accuracy": is_right_class},
        "training_rows": validation.rest(),
        "validation_rows": validation,
        "learning_rate_scaling": "linear",
        "epochs": 3,
    }
    return scheduled_spec(folder, **{**fields, **changes})


def is_right_class(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(dim=1) == labels


CASES_OF_RANKS: dict[str, dict[str, Any]] = {
    "weighted": {},
    # Adam would amplify the rounding of gradients that are 0, such as those of biases before a BatchNorm.
    "normalized": {
        "model": make_model(norm=True),
        "sync_batch_norm": True,
        "weight": None,
        "epochs": 2,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "scheduler": None,
    },
    # On 3 ranks one rank never has a row.
    "single rows": {"batch_size": 1, "num_rows": 31, "accumulated_batches": 3, "validation_rows": None},
}


@pytest.fixture(scope="module")
def more_rows(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("more"), 301, rows_per_group=11)


@pytest.fixture(scope="module")
def on_two_ranks(more_rows, tmp_path_factory):
    """The folder of the checkpoints of uninterrupted fits on 2 ranks, and their outcomes."""
    folder = tmp_path_factory.mktemp("two")
    specs = [small_batches(more_rows, folder / name, **case) for name, case in CASES_OF_RANKS.items()]
    return folder, run_ranks(2, train_each, specs, more_rows)[0]


def assert_same_updates(resumed: Outcome, whole: Outcome) -> None:
    """Assert that every update used the same rows as in the whole fit: only the order of sums may differ."""
    assert_same_weights(resumed.weights, whole.weights, atol=TOLERANCE)
    for mine, theirs in zip(resumed.history, whole.history, strict=True):
        assert (mine.rows, mine.learning_rate) == (theirs.rows, theirs.learning_rate)
        assert mine.loss == pytest.approx(theirs.loss, abs=TOLERANCE)
        assert mine.metrics == pytest.approx(theirs.metrics, abs=TOLERANCE)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_other_numbers_of_ranks_take_the_same_rows_in_each_update(more_rows, on_two_ranks, world_size):
    folder, outcomes = on_two_ranks
    specs = [
        small_batches(more_rows, copy_of(folder / name, (2, 6), f"{name} on {world_size}"), **case)
        for name, case in CASES_OF_RANKS.items()
    ]
    for resumed, whole in zip(run_ranks(world_size, train_each, specs, more_rows)[0], outcomes, strict=True):
        assert resumed.events[0]["kind"] == "resumed"
        assert_same_updates(resumed, whole)


@pytest.mark.slow
def test_several_restarts_keep_the_plan_of_the_first_ranks(more_rows, on_two_ranks):
    folder, (whole, *_) = on_two_ranks
    at = copy_of(folder / "weighted", (1, 8), "from 2")
    for world_size, next_place in [(1, (1, 16)), (3, (2, 10)), (2, (3, 12)), (1, (3, 18))]:
        (resumed,) = run_ranks(world_size, train_each, [small_batches(more_rows, at)], more_rows)[0]
        assert_same_updates(resumed, whole)
        at = copy_of(at, next_place, f"{at.name}, {world_size}")


@pytest.mark.slow
def test_interruption_of_a_fit_that_changed_its_ranks_changes_no_bit(dataset, tmp_path):
    run_ranks(2, train_each, [interrupted_spec(dataset, tmp_path / "2")], dataset)
    for world_size in (1, 3):
        folder = copy_of(tmp_path / "2", (1, 4), f"on {world_size}")
        specs = [interrupted_spec(dataset, folder)]
        for ((whole, resumed),) in run_ranks(world_size, train_from_every_checkpoint, specs, dataset):
            assert list(resumed) == [(1, 4), (1, 6), (2, 2), (2, 4), (2, 6)]
            for outcome in resumed.values():
                assert_same_fit(whole, outcome)


def test_fit_planned_for_two_ranks_makes_the_same_updates_when_it_starts_on_one(
    more_rows, on_two_ranks, tmp_path
):
    spec = small_batches(more_rows, tmp_path)
    spec = replace(spec, checkpoints=replace(spec.checkpoints, num_ranks=2))
    ((begun,),) = run_ranks(1, train_each, [spec], more_rows)
    assert_same_updates(begun, on_two_ranks[1][0])


def test_fit_resumed_on_other_ranks_takes_every_row_once_and_completes_the_schedule(dataset, tmp_path):
    first = interrupted_spec(
        dataset,
        tmp_path / "2",
        accumulated_batches=1,
        epochs=2,
        validation_rows=None,
        best=None,
        patience=None,
        metrics={"noted": note_rows},
        callbacks=(NotesEpoch(),),
    )
    ranks = run_ranks(2, train_and_note, [first], dataset)
    whole = ranks[0][0][0]
    batches = [noted for ((_, noted),) in ranks]
    every_row = sorted(row for noted in batches for batch in noted[1] for row in batch)
    assert len(set(every_row)) == NUM_ROWS
    places = [(1, 3), (1, 5), (2, 2)]  # after the 5th step one row remains
    for world_size in (1, 3):
        specs = [
            replace(first, checkpoints=replace(first.checkpoints, url=str(copy)))
            for copy in (copy_of(tmp_path / "2", place, f"{world_size} from {place}") for place in places)
        ]
        outcomes = run_ranks(world_size, train_and_note, specs, dataset)
        for number, (epoch, step) in enumerate(places):
            before = [row for noted in batches for batch in noted[epoch][:step] for row in batch]
            after = [row for rank in outcomes for batch in rank[number][1].get(epoch, ()) for row in batch]
            assert sorted(before + after) == every_row
            last = outcomes[0][number][0].history[-1]
            assert last.rows == NUM_ROWS
            assert last.learning_rate == whole.history[-1].learning_rate
            assert last.loss == pytest.approx(whole.history[-1].loss, rel=0.5)
