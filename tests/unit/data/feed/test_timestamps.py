"""Timestamps of every unit that files may have, as microseconds."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetFeed
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


def read_back(folder: Path, num_epochs: int = 1) -> list[np.datetime64]:
    rows: list[np.datetime64] = []
    with ParquetFeed(str(folder), batch_size=8, shuffle=False) as feed:
        for epoch in range(num_epochs):
            rows += [value for batch in feed.epoch(epoch) for value in batch["t"]]
    return rows


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_nanoseconds_are_rounded_down(tmp_path: Path, zone: str | None) -> None:
    times = pa.array([1_001, 1_999, -1, 0], pa.timestamp("ns", zone))
    pq.write_table(pa.table({"t": times}), tmp_path / "a.parquet", version="2.6")
    assert read_back(tmp_path) == [np.datetime64(micros, "us") for micros in (1, 1, -1, 0)]


def test_int96_keeps_every_year_in_every_epoch(tmp_path: Path) -> None:
    times = [datetime.datetime(9999, 12, 31), datetime.datetime(1, 1, 1), datetime.datetime(2020, 1, 1)]
    table = pa.table({"t": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert read_back(tmp_path, num_epochs=2) == [np.datetime64(time, "us") for time in times] * 2


def test_time_beyond_the_range_of_microseconds_is_an_error_with_its_column(tmp_path: Path) -> None:
    times = pa.array([1 << 62], pa.timestamp("ms"))
    pq.write_table(pa.table({"t": times}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row group 0 .*'t' of the type timestamp\[ms\]"):
        read_back(tmp_path)
