"""When Arrow's allocator is asked to release memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pytest

from sparkdl.data import ParquetDataset, ParquetFeed
from sparkdl.data.files import threads
from sparkdl.data.files.threads import ArrowRelease


@dataclass
class Pool:
    backend_name: str
    num_releases: int = 0

    def release_unused(self) -> None:
        self.num_releases += 1


@pytest.mark.parametrize(
    ("allocator", "expected"), [("mimalloc", [0, 0, 1, 1, 2, 3]), ("jemalloc", [0] * 6), ("system", [0] * 6)]
)
def test_only_mimalloc_releases_memory_and_only_after_enough_bytes(
    allocator: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, release = Pool(allocator), ArrowRelease()
    monkeypatch.setattr(threads, "EVERY_BYTES", 100)
    monkeypatch.setattr(pa, "default_memory_pool", lambda: pool)
    found = []
    for num_bytes in (60, 39, 1, 99, 1, 250):
        release.add(num_bytes)
        found.append(pool.num_releases)
    assert found == expected


def test_readers_count_every_decoded_row_group_for_the_release_of_memory(
    write_dataset: Callable[[Sequence[Sequence[int]]], ParquetDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write_dataset([[100, 100], [100]])
    pool = Pool("mimalloc")
    monkeypatch.setattr(threads, "ARROW_RELEASE", ArrowRelease())
    monkeypatch.setattr(threads, "EVERY_BYTES", 1600)
    monkeypatch.setattr(pa, "default_memory_pool", lambda: pool)
    with ParquetFeed(dataset, columns=["id"], batch_size=10) as feed:
        for epoch, releases in enumerate([1, 3]):  # of 800 bytes: after the second, fourth and sixth
            list(feed.epoch(epoch))
            assert pool.num_releases == releases
