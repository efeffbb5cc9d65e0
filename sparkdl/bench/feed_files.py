"""The Parquet files that ``sparkdl bench feed`` reads. Runs where the benchmark was called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM_FILES = 4


@dataclass(frozen=True, kw_only=True)
class Table:
    """A folder of files, of random numbers.

    Attributes:
        num_rows: rows of all files together.
        num_floats: columns of one float each; 0 for one column of lists.
        list_length: floats in each row's list, beside a label from 0 to 9.
        rows_per_group: rows of a row group.
    """

    num_rows: int
    num_floats: int = 0
    list_length: int = 0
    rows_per_group: int

    @property
    def width(self) -> int:
        """Floats of a row."""
        return self.num_floats or self.list_length


TABLES = {
    "28 floats": Table(num_rows=1_000_000, num_floats=28, rows_per_group=62_500),
    "list of 784 floats": Table(num_rows=100_000, list_length=784, rows_per_group=5_000),
    "digits": Table(num_rows=5_120, list_length=64, rows_per_group=1_280),
}
"""What is read, by name."""


def write_table(folder: Path, table: Table, scale: float) -> dict[str, Any]:
    """Write a table, or ``scale`` times as many rows, and return its settings for the readers in JSON's terms."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    random = np.random.default_rng(0)
    rows_of_file = max(1, round(table.num_rows * scale / NUM_FILES))
    rows_per_group = max(1, round(table.rows_per_group * scale))
    total = 0.0
    for number in range(NUM_FILES):
        values = random.random((rows_of_file, table.width), dtype=np.float32)
        total += float(values.sum(dtype=np.float64))
        columns: Mapping[str, Any]
        if table.num_floats:
            columns = {
                f"f{index}": np.ascontiguousarray(values[:, index]) for index in range(table.num_floats)
            }
        else:
            offsets = np.arange(rows_of_file + 1, dtype=np.int32) * table.list_length
            lists = pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))
            columns = {"x": lists, "label": random.integers(0, 10, rows_of_file)}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=rows_per_group)
    return {
        "folder": str(folder),
        "num_rows": rows_of_file * NUM_FILES,
        "num_floats": table.num_floats,
        "list_length": table.list_length,
        "sum": total,
    }
