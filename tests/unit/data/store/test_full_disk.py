"""A Store or cache on a full disk; the tests mount a small file system."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetFeed, Store
from sparkdl.data.feed.cache import BlockCache
from sparkdl.data.spark.writing import WrittenFile, write_partition
from sparkdl.errors import StoreError, StoreFullError
from tests.small_disk import small_disk
from tests.unit.data.row_batches import structs_of

__all__ = ["small_disk"]


def test_rows_that_do_not_fit_are_reported_and_no_file_stays(small_disk: Path) -> None:
    batch = pa.RecordBatch.from_pydict({"x": np.random.default_rng(0).random(1 << 18)})
    with Store(small_disk).stage_dataset("fit") as staged:
        (row,) = write_partition(iter([structs_of(batch)]), staged.url, ["x"], 1 << 16)
        file = WrittenFile.from_json(row.column(0)[0].as_py())
        assert "its disk is full" in file.failure
        assert "Store.cleanup()" in file.failure
        assert file.is_store_full
        assert not list(small_disk.glob("*/*.parquet"))
    assert list(small_disk.iterdir()) == []


def test_a_full_store_is_named_before_any_work(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (1 << 20))
    with pytest.raises(StoreFullError, match=r"disk cannot be written: its disk is full"):
        Store(small_disk).check_writable()
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_only_a_full_disk_is_a_store_full_error() -> None:
    full = Store("/store").cannot_be_written(OSError(errno.ENOSPC, "No space left on device"))
    assert type(full) is StoreFullError
    other = Store("/store").cannot_be_written(OSError(errno.EIO, "Input/output error"))
    assert type(other) is StoreError


@pytest.mark.parametrize("num_free", [0, 100, 4096, 300_000, 599_000, 602_000])
def test_row_group_that_does_not_fit_on_the_disk_of_the_cache_leaves_no_files(
    small_disk: Path, num_free: int
) -> None:
    block = [np.full(37_500, 1.0), np.full((37_500, 2), 2.0, np.float32)]  # of 300,000 bytes each
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * (1 << 18))
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - num_free)
    cache = BlockCache("disk", 1 << 30, str(small_disk))
    for _ in range(2):  # twice, because the warning appears once
        given = cache.get(7, lambda: block)
        np.testing.assert_array_equal(given[1], block[1])
    (folder,) = small_disk.glob("sparkdl-feed-*")
    assert list(folder.iterdir()) == []
    assert cache.num_bytes == 0
    filler.unlink()
    cache.get(7, lambda: block)
    assert sorted(path.name for path in folder.iterdir()) == ["7-0", "7-1"]
    cache.close()
    assert list(small_disk.iterdir()) == []


def test_feed_whose_cache_disk_is_full_gives_all_rows_and_warns_once(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"id": np.arange(1 << 18)})  # 2 MiB
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1 << 15)
    with (
        caplog.at_level(logging.WARNING, "sparkdl.data"),
        ParquetFeed(
            tmp_path / "a.parquet", batch_size=1 << 12, cache="disk", cache_folder=str(small_disk)
        ) as feed,
    ):
        for _ in range(2):
            rows = np.concatenate([batch["id"] for batch in feed])
            np.testing.assert_array_equal(np.sort(rows), np.arange(1 << 18))
        files = [path for path in small_disk.glob("*/*") if path.stat().st_size < 1 << 18]
        assert files == []
    (said,) = [record.getMessage() for record in caplog.records if "cache" in record.getMessage()]
    assert "cannot be written" in said
    assert "row groups are read again instead" in said
    assert list(small_disk.iterdir()) == []
