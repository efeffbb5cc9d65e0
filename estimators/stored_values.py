"""Reads one column of the training rows again, for checks that the footers cannot answer. Runs on the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.data import ParquetFeed

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from sparkdl.data import ParquetDataset

_ROWS_AT_ONCE = 1 << 16


def stored_values(dataset: ParquetDataset, name: str) -> Iterator[np.ndarray]:
    """Yield the numbers of a column part by part, those of arrays one after the other.

    Raises:
        DataError: if a file cannot be read; it names file, row group and column.
    """
    with ParquetFeed(dataset, columns=[name], batch_size=_ROWS_AT_ONCE, shuffle=False) as feed:
        for batch in feed.epoch(0):
            yield batch[name].reshape(-1)
