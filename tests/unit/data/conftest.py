"""Fixtures for the tests of the data floor: Parquet folders with known content, written by pyarrow alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetDataset, scan_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def numbered_table(start: int, stop: int) -> pa.Table:
    """Rows in which every column is computed from the row's number."""
    number = np.arange(start, stop)
    vector = np.stack([number, 2 * number, 3 * number], axis=1).astype(np.float32)
    grid = np.stack([number, number + 1, number + 2, number + 3], axis=1)
    return pa.table(
        {
            "id": pa.array(number),
            "twice": pa.array(2 * number),
            "half": pa.array(number / 2),
            "is_even": pa.array(number % 2 == 0),
            "vector": pa.array(vector.tolist(), pa.list_(pa.float32())),
            "grid": pa.array(grid.reshape(-1, 2, 2).tolist(), pa.list_(pa.list_(pa.int32()))),
        }
    )


@pytest.fixture
def write_dataset(tmp_path: Path) -> Callable[[Sequence[Sequence[int]]], ParquetDataset]:
    """Write rows numbered from 0 as files with row groups of the given sizes, and describe them."""

    def write(row_groups_of_files: Sequence[Sequence[int]]) -> ParquetDataset:
        folder = tmp_path / "dataset"
        folder.mkdir()
        start = 0
        for index, row_groups in enumerate(row_groups_of_files):
            with pq.ParquetWriter(
                folder / f"part-{index:05d}.parquet", numbered_table(0, 0).schema
            ) as writer:
                for num_rows in row_groups:
                    writer.write_table(numbered_table(start, start + num_rows))
                    start += num_rows
        return scan_dataset(str(folder))

    return write
