"""Which rows the ranks of a training have: they count them together, and divide them equally or by their speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import scan_dataset
from sparkdl.training.spec import CheckpointPlan
from tests.run_ranks import run_ranks
from tests.training.scenes.feed_scenes import fail_to_count, read_filtered
from tests.training.scenes.training_scenes import (
    assert_same_weights,
    make_spec,
    train_all,
    write_dataset,
)
from tests.training.scenes.unequal_ranks import SlowModel, fit_with_equal_rows_and_by_speed, share_reached

SECONDS_PER_ROW = (0.002, 0.004)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    pq.write_table(pa.table({"id": np.arange(100)}), tmp_path / "a.parquet", row_group_size=10)
    return str(tmp_path)


def test_ranks_count_filtered_rows_together_and_share_them_exactly(folder: str) -> None:
    found = run_ranks(3, read_filtered, folder)
    assert [counted for _, counted in found] == [4, 3, 3]
    assert [len(rows) for rows, _ in found] == [11, 11, 12]
    assert sorted(row for rows, _ in found for row in rows) == list(range(0, 100, 3))


@pytest.mark.parametrize(
    ("fails", "kind", "words"),
    [
        ("filter", "DataError", "part-1.parquet, row group 0 failed: the row filter failed: ValueError"),
        ("damage", "CorruptFileError", "part-1.parquet, row group 0, column 'id' failed"),
        ("expired", "StoreAccessError", "part-1.parquet, row group 0 failed: the credentials have expired"),
        ("silent", "DataError", "part-1.parquet, row group 0 took longer than 3 s"),
    ],
)
def test_every_rank_reports_why_one_could_not_count_in_time(
    tmp_path: Path, fails: str, kind: str, words: str
) -> None:
    for number in range(2):  # one row group for each rank
        path = tmp_path / f"part-{number}.parquet"
        pq.write_table(pa.table({"id": np.arange(100)}), path)
    if fails == "damage":
        content = path.read_bytes()
        path.write_bytes(b"PAR1" + b"\xff" * 200 + content[204:])
    dataset = scan_dataset(str(tmp_path))
    if fails in ("silent", "expired"):
        dataset = replace(dataset, url=f"faulty://{tmp_path}")
    (waiting, told), (counting, said) = run_ranks(2, fail_to_count, dataset, fails)
    assert (waiting, counting) == (kind, kind)
    assert words in said
    assert told.endswith(f"could not be counted on rank 1: {said}")


def test_rows_follow_the_speed_of_the_ranks_and_the_weights_are_those_of_equal_rows(tmp_path: Path) -> None:
    """The slower one of two ranks is left a third of the rows; row weights do not depend on who has a row."""
    dataset = write_dataset(tmp_path / "data", 1000, rows_per_group=50)
    spec = make_spec(batch_size=24, epochs=3, weight="w", accumulated_batches=2)
    slow = replace(spec, model=SlowModel(SECONDS_PER_ROW), balance="speed")
    checkpoints = replace(
        slow, checkpoints=CheckpointPlan(url=str(tmp_path / "fit"), every_updates=5, num_kept=99)
    )
    outcomes = run_ranks(2, train_all, [(checkpoints, dataset), (spec, dataset)])
    (balanced, equal), (of_other, _) = outcomes
    assert [record.rows for record in balanced.history] == [1000] * 3
    assert [record.rank_rows for record in equal.history] == [()] * 3
    for record in balanced.history:
        assert sum(record.rank_rows) == 48
    assert 28 <= balanced.history[-1].rank_rows[0] <= 36, "32 in proportion to the speeds"
    assert of_other.history == balanced.history
    named = {name.removeprefix("body."): value for name, value in balanced.weights.items()}
    assert_same_weights(named, equal.weights, atol=1e-5)
    for one, other in zip(balanced.history, equal.history, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-5)


@pytest.mark.slow
def test_two_ranks_of_which_one_has_half_the_speed_reach_nine_tenths_of_what_they_can(tmp_path: Path) -> None:
    """With equal rows the faster one waits, and they reach two thirds."""
    equal, by_speed = fit_with_equal_rows_and_by_speed(tmp_path / "data", "speed")
    assert share_reached(equal) < 0.7
    assert share_reached(by_speed) > 0.9
