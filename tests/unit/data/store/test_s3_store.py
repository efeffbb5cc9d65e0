"""A Store on a real S3 server, moto's on loopback: written as executors write, and read as ranks read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
import s3fs

from sparkdl.data import ParquetDataset, ParquetFeed, Store, open_dataset, scan_dataset
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.spark.writing import WrittenFile, write_partition
from sparkdl.data.store.housekeeping import remove_unless_used
from sparkdl.data.store.store import reopen_dataset
from sparkdl.errors import StoreError
from tests.servers.s3_server import s3, s3_endpoint
from tests.unit.data.row_batches import structs_of

if TYPE_CHECKING:
    from sparkdl.data.store.store import StagedDataset
    from tests.servers.s3_server import S3

__all__ = ["s3", "s3_endpoint"]

pytestmark = pytest.mark.usefixtures("s3")


@pytest.fixture
def store(s3: S3) -> Store:
    return Store(f"s3://{s3.make_bucket()}/my store")


def write_rows(staged: StagedDataset, start: int, stop: int) -> ParquetDataset:
    batch = pa.RecordBatch.from_pydict(
        {"x": np.arange(start, stop), "y": [[float(number)] * 4 for number in range(start, stop)]}
    )
    (row,) = write_partition(iter([structs_of(batch)]), staged.url, ["x", "y"], 1 << 12)
    file = WrittenFile.from_json(row.column(0)[0].as_py())
    assert not file.failure
    assert file.num_rows == stop - start
    return scan_dataset(staged.url)


def commit_rows(store: Store) -> ParquetDataset:
    with store.stage_dataset("fit") as staged:
        return staged.commit(write_rows(staged, 0, 1000))


def test_rows_are_written_scanned_and_fed_to_ranks(store: Store) -> None:
    dataset = commit_rows(store)
    assert open_dataset(dataset.url) == dataset
    assert len(dataset.row_groups) > 4
    rows = []
    for rank in range(2):
        with ParquetFeed(dataset, columns=["x", "y"], rank=rank, world_size=2, batch_size=64) as feed:
            for batch in feed.epoch(0):
                np.testing.assert_array_equal(batch["y"], np.repeat(batch["x"], 4).reshape(-1, 4))
                rows += batch["x"].tolist()
    assert sorted(rows) == list(range(1000))
    assert remove_unless_used(dataset.url)
    assert store.location.filesystem.find(store.location.path) == []


def test_dataset_is_reopened_and_kept_by_cleanup_while_it_is_read(store: Store) -> None:
    dataset = commit_rows(store)
    reopened = reopen_dataset(dataset.url)
    assert reopened is not None
    assert reopened[0] == dataset
    assert store.cleanup(timedelta(0)) == []
    reopened[1].close()
    assert store.cleanup() == []
    assert store.cleanup(timedelta(0)) == [dataset.url]
    assert store.location.filesystem.find(store.location.path) == []


def test_sets_committed_at_once_are_each_complete(store: Store) -> None:
    barrier = threading.Barrier(3)

    def commit(_: int) -> ParquetDataset:
        with store.stage_dataset("fit") as staged:
            dataset = write_rows(staged, 0, 1000)
            barrier.wait(60)
            return staged.commit(dataset)

    with ThreadPoolExecutor(max_workers=3) as pool:
        committed = list(pool.map(commit, range(3)))
    assert all(open_dataset(dataset.url).num_rows == 1000 for dataset in committed)


def test_dataset_that_was_not_committed_is_removed(store: Store) -> None:
    with pytest.raises(RuntimeError, match="gave up"), store.stage_dataset("fit") as staged:
        write_rows(staged, 0, 10)
        assert reopen_dataset(staged.url) is None
        assert store.cleanup(timedelta(0)) == []
        raise RuntimeError("the executors gave up")
    assert store.location.filesystem.find(store.location.path) == []


def test_missing_bucket_is_named_and_not_created() -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket-here/x.*there is no such bucket.*fix the URL"):
        Store("s3://no-such-bucket-here/x").check_writable()
    assert not s3fs.S3FileSystem().exists("no-such-bucket-here")


def test_missing_credentials_are_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
        Store(store.url).check_writable()
    batch = pa.RecordBatch.from_pydict({"x": np.arange(10)})
    (row,) = write_partition(iter([structs_of(batch)]), f"{store.url}/fit", ["x"], 1 << 12)
    assert "no credentials" in WrittenFile.from_json(row.column(0)[0].as_py()).failure
    assert open_location(store.url).path.endswith("my store")
