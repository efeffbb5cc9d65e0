"""Reads one column of the training rows again, for checks that the footers cannot answer. Runs on the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data.filesystems import open_location

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparkdl.data import ParquetDataset


def stored_values(dataset: ParquetDataset, name: str) -> Iterator[np.ndarray]:
    """Yield the numbers of a column file by file, those of arrays one after the other."""
    location = open_location(dataset.url)
    for path in dict.fromkeys(row_group.path for row_group in dataset.row_groups):
        with location.open_file(f"{location.path}/{path}") as file:
            table = pq.ParquetFile(file).read(columns=[name])
        array = table.column(name).combine_chunks()
        while isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
            array = array.flatten()
        yield np.asarray(array.to_numpy(zero_copy_only=False))
