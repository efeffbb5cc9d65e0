from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetDataset, check_labels, scan_dataset
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


def test_row_groups_are_found_in_the_order_of_the_files(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10, 3], [], [20]])
    assert [(group.path, group.index, group.num_rows) for group in dataset.row_groups] == [
        ("part-00000.parquet", 0, 10),
        ("part-00000.parquet", 1, 3),
        ("part-00002.parquet", 0, 20),
    ]
    assert dataset.num_rows == 33


def test_range_of_integers_comes_from_the_footers(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10, 3], [20]])
    assert dataset.column("twice").value_range == (0, 64)
    assert dataset.column("half").value_range is None


def test_error_about_labels_out_of_range_says_what_to_do(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0, 3, 10], "score": [0.0, 1.0, 2.0]}), tmp_path / "a.parquet")
    dataset = scan_dataset(str(tmp_path))
    check_labels(dataset, "label", 11)
    with pytest.raises(DataError, match=r"\[0, 10\), but column 'label' holds 0 to 10.*11 outputs"):
        check_labels(dataset, "label", 10)
    with pytest.raises(DataError, match=r"'score' holds float64. Cast it"):
        check_labels(dataset, "score", 10)
