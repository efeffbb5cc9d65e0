from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import scan_dataset
from tests.run_ranks import run_ranks
from tests.training.scenes.feed_scenes import fail_to_count, read_filtered


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
