"""When Arrow's allocator is asked to release memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pytest

from sparkdl.data import ParquetDataset, ParquetFeed
from sparkdl.data.feed import epoch_reader


@dataclass
class Pool:
    backend_name: str
    num_releases: int = 0

    def release_unused(self) -> None:
        self.num_releases += 1


@pytest.mark.parametrize(
    ("allocator", "expected"), [("mimalloc", [1, 3]), ("jemalloc", [0, 0]), ("system", [0, 0])]
)
def test_only_mimalloc_releases_memory_and_only_after_enough_bytes(
    write_dataset: Callable[[Sequence[Sequence[int]]], ParquetDataset],
    allocator: str,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = write_dataset([[100, 100], [100]])
    pool = Pool(allocator)
    monkeypatch.setattr(epoch_reader, "RELEASE_BYTES", 1600)
    monkeypatch.setattr(epoch_reader.EpochReader, "_decoded_bytes", 0)
    monkeypatch.setattr(pa, "default_memory_pool", lambda: pool)
    with ParquetFeed(dataset, columns=["id"], batch_size=10, num_threads=1) as feed:
        for epoch, releases in enumerate(expected):  # of 800 bytes: after the second, fourth and sixth
            list(feed.epoch(epoch))
            assert pool.num_releases == releases
