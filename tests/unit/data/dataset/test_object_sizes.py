"""Describing a folder reads few rows if they are large."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import scan_dataset
from sparkdl.data.dataset.arrow import NUM_SAMPLED, SAMPLED_BYTES

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[pa.RecordBatch]:
    """The rows that scans have read since the beginning of the test."""
    batches = []
    iter_batches = pq.ParquetFile.iter_batches

    def recorded(*arguments, **options):
        for batch in iter_batches(*arguments, **options):
            batches.append(batch)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", recorded)
    return batches


def written(folder: Path, values: list[bytes] | list[str], **options) -> int:
    """Write a column of one row group; return the size of a value that scanning finds."""
    pq.write_table(pa.table({"x": values}), folder / "a.parquet", **options)
    (column,) = scan_dataset(str(folder)).columns
    return column.object_bytes


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_large_values_in_a_large_chunk_are_sized_without_reading_any(
    tmp_path: Path, read: list[pa.RecordBatch], use_dictionary: bool
) -> None:
    values = [np.random.default_rng(row).bytes(MIB) for row in range(32)]
    assert MIB <= written(tmp_path, values, use_dictionary=use_dictionary) <= 1.01 * MIB
    assert not read


def test_few_large_values_out_of_a_dictionary_are_read(tmp_path: Path, read: list[pa.RecordBatch]) -> None:
    values = [np.random.default_rng(0).bytes(MIB)] * 64
    assert MIB <= written(tmp_path, values) <= 1.01 * MIB
    assert 1 <= sum(map(len, read)) <= 16


def test_many_small_values_are_sampled_within_the_byte_limit(
    tmp_path: Path, read: list[pa.RecordBatch]
) -> None:
    assert 1024 <= written(tmp_path, [f"{row:01024}" for row in range(1000)]) <= 1200
    assert sum(map(len, read)) == NUM_SAMPLED
    assert sum(batch.nbytes for batch in read) <= SAMPLED_BYTES


def test_fewer_rows_are_sampled_when_rows_are_larger(tmp_path: Path, read: list[pa.RecordBatch]) -> None:
    columns = {f"x{index}": [b"%0*d" % (20_000, row * 8 + index) for row in range(300)] for index in range(8)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", use_dictionary=False)
    scan_dataset(str(tmp_path))
    assert sum(batch.nbytes for batch in read) <= SAMPLED_BYTES * 4 // 3
    assert 16 <= sum(map(len, read)) <= 64
