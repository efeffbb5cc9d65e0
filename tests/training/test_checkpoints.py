"""A fit that goes on from a checkpoint ends with the weights, to the bit, of one that was never interrupted."""

from __future__ import annotations

import pytest

from sparkdl.training.checkpoint_folder import CheckpointFolder
from tests.run_ranks import run_ranks
from tests.training.checkpoint_scenes import (
    assert_same_fit,
    interrupted_spec,
    train_from_every_checkpoint,
    train_through_death,
)
from tests.training.training_scenes import write_dataset

NUM_ROWS = 81  # 6 steps of 8 rows on each of 2 ranks: the last one of one row and none
ACCUMULATED = (1, 2)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), NUM_ROWS)


@pytest.fixture(scope="module")
def undisturbed(dataset):
    return run_ranks(2, train_through_death, interrupted_spec(None), dataset)


@pytest.mark.parametrize(("dying", "call"), [(1, 4), (0, 9)], ids=["rank 1", "rank 0"])
def test_a_rank_that_was_killed_changes_no_bit(dataset, undisturbed, tmp_path, dying, call):
    killed = interrupted_spec(tmp_path, ends_at=call)
    run_ranks(2, train_through_death, killed, dataset, dying, may_die=[dying])
    assert CheckpointFolder(str(tmp_path)).names()
    again = run_ranks(2, train_through_death, interrupted_spec(tmp_path), dataset)
    for one, other in zip(undisturbed, again, strict=True):
        assert_same_fit(one, other)
    assert again[0].events[0]["kind"] == "resumed"


def test_a_fit_can_go_on_from_any_of_its_updates(dataset, undisturbed, tmp_path):
    specs = [interrupted_spec(tmp_path / str(number), accumulated_batches=number) for number in ACCUMULATED]
    ranks = run_ranks(2, train_from_every_checkpoint, specs, dataset, timeout_s=150)
    for rank, outcomes in enumerate(ranks):
        for accumulated, (whole, resumed) in zip(ACCUMULATED, outcomes, strict=True):
            assert list(resumed) == [
                (epoch, step) for epoch in (1, 2) for step in range(accumulated, 7, accumulated)
            ]
            for place, outcome in resumed.items():
                assert_same_fit(whole, outcome)
                if rank == 0 and place != (2, 6):
                    assert outcome.events[0]["kind"] == "resumed"
                    assert (outcome.events[0]["epoch"], outcome.events[0]["step"]) in (place, (2, 0))
        assert_same_fit(undisturbed[rank], outcomes[1][0])
