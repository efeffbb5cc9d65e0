"""A fit that goes on from a checkpoint ends with the weights, to the bit, of one that was never interrupted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparkdl.training.checkpoint_folder import CheckpointFolder
from tests.run_ranks import run_ranks
from tests.training.checkpoint_scenes import (
    VALIDATION_ROWS,
    NotesEpoch,
    StopsOnOneRank,
    assert_same_fit,
    estimated_specs,
    interrupted_spec,
    note_rows,
    scheduled_spec,
    train_and_note,
    train_each,
    train_from_every_checkpoint,
    train_through_death,
)
from tests.training.training_scenes import write_dataset

NUM_ROWS = 81  # to train on: 6 steps of 8 rows on each of 2 ranks, the last one of one row and none
CASES = {
    1: {"sync_batch_norm": True, "patience": None, "callbacks": (StopsOnOneRank(),)},
    2: {},
}
"""Fits by the number of steps of their updates."""
TOLERANCE = 2e-6  # float32, sums in another order


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), NUM_ROWS + VALIDATION_ROWS)


@pytest.fixture(scope="module")
def undisturbed(dataset):
    return run_ranks(2, train_through_death, interrupted_spec(dataset, None), dataset)


@pytest.mark.parametrize(("dying", "call"), [(1, 4), (0, 9)], ids=["rank 1", "rank 0"])
def test_a_rank_that_was_killed_changes_no_bit(dataset, undisturbed, tmp_path, dying, call):
    killed = interrupted_spec(dataset, tmp_path, ends_at=call)
    run_ranks(2, train_through_death, killed, dataset, dying, may_die=[dying])
    assert CheckpointFolder(str(tmp_path)).names()
    again = run_ranks(2, train_through_death, interrupted_spec(dataset, tmp_path), dataset)
    for one, other in zip(undisturbed, again, strict=True):
        assert_same_fit(one, other)
    assert again[0].events[0]["kind"] == "resumed"


def test_a_fit_can_go_on_from_any_of_its_updates(dataset, undisturbed, tmp_path):
    specs = [
        interrupted_spec(dataset, tmp_path / str(number), accumulated_batches=number, **changes)
        for number, changes in CASES.items()
    ]
    ranks = run_ranks(2, train_from_every_checkpoint, specs, dataset, timeout_s=150)
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


def test_fits_of_a_step_of_the_users_own_and_of_a_ready_made_network_can_go_on_from_any_update(
    dataset, tmp_path
):
    specs = estimated_specs(dataset, tmp_path)
    for outcomes in run_ranks(2, train_from_every_checkpoint, specs, dataset, timeout_s=150):
        for whole, resumed in outcomes:
            assert list(resumed) == [(1, 1), (1, 2), (2, 1), (2, 2)]
            for outcome in resumed.values():
                assert_same_fit(whole, outcome)
            assert whole.history[0].loss != whole.history[1].loss


def copies_of(folder: Path, epoch_and_step: tuple[int, int]) -> list[Path]:
    """Two folders that hold the checkpoint of that place alone."""
    source = CheckpointFolder(str(folder))
    (name,) = [
        name
        for name in source.names()
        if (source.manifest(name).epoch, source.manifest(name).step) == epoch_and_step
    ]
    copies = [folder.with_name(f"{folder.name}-{name}-{number}") for number in (1, 3)]
    for copy in copies:
        shutil.copytree(folder / name, copy / name)
    return copies


def test_other_numbers_of_ranks_go_on_with_the_same_updates(dataset, tmp_path):
    def full_batches(folder: Path):
        return scheduled_spec(
            folder,
            accumulated_batches=1,
            learning_rate_scaling="linear",
            batch_size=47,  # of all rows
            epochs=4,
        )

    (whole,) = run_ranks(2, train_each, [full_batches(tmp_path / "2")], dataset)[0]
    for world_size, copy in zip((1, 3), copies_of(tmp_path / "2", (2, 1)), strict=True):
        (resumed,) = run_ranks(world_size, train_each, [full_batches(copy)], dataset)[0]
        for name, value in whole.weights.items():
            np.testing.assert_allclose(resumed.weights[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
        for mine, theirs in zip(resumed.history, whole.history, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, abs=TOLERANCE)
            assert mine.learning_rate == theirs.learning_rate


def test_other_numbers_of_ranks_take_every_row_once_and_the_schedule_to_its_end(dataset, tmp_path):
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
    places = [(1, 3), (1, 5), (2, 2)]  # after the 5th step one row is left
    copies = [copies_of(tmp_path / "2", place) for place in places]
    for index, world_size in enumerate((1, 3)):
        specs = [
            replace(first, checkpoints=replace(first.checkpoints, url=str(both[index]))) for both in copies
        ]
        outcomes = run_ranks(world_size, train_and_note, specs, dataset)
        for number, (epoch, step) in enumerate(places):
            before = [row for noted in batches for batch in noted[epoch][:step] for row in batch]
            after = [row for rank in outcomes for batch in rank[number][1].get(epoch, ()) for row in batch]
            assert sorted(before + after) == every_row
            last = outcomes[0][number][0].history[-1]
            assert last.rows == NUM_ROWS
            assert last.learning_rate == pytest.approx(whole.history[-1].learning_rate, rel=1e-3)
            assert last.loss == pytest.approx(whole.history[-1].loss, rel=0.5)
