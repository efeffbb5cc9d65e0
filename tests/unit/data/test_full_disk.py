"""A Store whose disk is full, for which a small file system is mounted."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data import Store
from sparkdl.data.materialization import _check_failures
from sparkdl.data.row_writer import WrittenFile, write_partition
from sparkdl.errors import StoreError, StoreFullError
from tests.small_disk import small_disk

__all__ = ["small_disk"]


def test_rows_that_do_not_fit_are_reported_and_no_file_stays(small_disk: Path) -> None:
    batch = pa.RecordBatch.from_pydict({"x": np.random.default_rng(0).random(1 << 18)})
    with Store(small_disk).stage_dataset("fit") as staged:
        (row,) = write_partition(iter([batch]), staged.url, ["x"], 1 << 16)
        file = WrittenFile.from_json(row.column(0)[0].as_py())
        assert "its disk is full" in file.failure
        assert "Store.cleanup()" in file.failure
        with pytest.raises(StoreFullError, match="cannot be written: its disk is full"):
            _check_failures(Store(small_disk), [file])
        assert not list(small_disk.glob("*/*.parquet"))
    assert list(small_disk.iterdir()) == []


def test_a_full_store_is_named_before_any_work(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (1 << 20))
    with pytest.raises(StoreFullError, match=r"disk cannot be written: its disk is full"):
        Store(small_disk).check_writable()
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_full_disk_is_an_error_of_its_own_wherever_a_file_system_says_so() -> None:
    full = Store("/store").cannot_be_written(OSError(errno.ENOSPC, "No space left on device"))
    assert type(full) is StoreFullError
    other = Store("/store").cannot_be_written(OSError(errno.EIO, "Input/output error"))
    assert type(other) is StoreError
