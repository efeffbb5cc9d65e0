from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.run_ranks import run_ranks
from tests.training.feed_scenes import fail_to_count_on_one_rank, read_filtered


@pytest.fixture
def folder(tmp_path: Path) -> str:
    pq.write_table(pa.table({"id": np.arange(100)}), tmp_path / "a.parquet", row_group_size=10)
    return str(tmp_path)


def test_ranks_count_filtered_rows_together_and_share_them_exactly(folder: str) -> None:
    found = run_ranks(3, read_filtered, folder)
    assert [counted for _, counted in found] == [4, 3, 3]
    assert [len(rows) for rows, _ in found] == [11, 11, 12]
    assert sorted(row for rows, _ in found for row in rows) == list(range(0, 100, 3))


def test_a_filter_that_fails_on_one_rank_is_an_error_on_all(folder: str) -> None:
    first, second = run_ranks(2, fail_to_count_on_one_rank, folder)
    assert "could not be counted on rank 1; its error says why" in first
    assert "row group 1 failed: the row filter failed: ValueError: no such luck" in second
