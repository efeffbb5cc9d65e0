"""Values that a feed puts in place of nulls."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetFeed
from sparkdl.errors import DataError, ParamError

DAY, TIME = date(2024, 2, 29), datetime(2024, 2, 29, 12, 30)
ROWS = {
    "double": pa.array([1.5, None, 3.0]),
    "int": pa.array([1, None, -3], pa.int32()),
    "flag": pa.array([True, None, False]),
    "text": pa.array(["a", None, ""]),
    "bytes": pa.array([b"a", None, b""]),
    "day": pa.array([DAY, None, DAY]),
    "time": pa.array([TIME, None, TIME]),
    "instant": pa.array([TIME, None, TIME], pa.timestamp("ns", "UTC")),
    "decimal": pa.array([Decimal("1.5"), None, Decimal(2)]),
    "pair": pa.array([[1.0, 2.0], None, [None, 4.0]]),
    "ints": pa.array([[1, 2], None, [None, 4]]),
    "ragged": pa.array([[1.0], None, []]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nulls")
    pq.write_table(pa.table(ROWS), folder / "part-0.parquet")
    return str(folder)


def fed(folder, nulls, **options):
    with ParquetFeed(
        folder, columns=list(nulls), batch_size=3, shuffle=False, nulls=nulls, **options
    ) as feed:
        (batch,) = feed.epoch(0)
    return batch


VALUES = {
    "double": (0.25, [1.5, 0.25, 3.0], "float64"),
    "int": (7, [1, 7, -3], "int32"),
    "flag": (0, [True, False, False], "bool"),
    "text": ("none", ["a", "none", ""], "object"),
    "bytes": (b"-", [b"a", b"-", b""], "object"),
    "day": (DAY, [DAY] * 3, "datetime64[D]"),
    "time": (TIME, [TIME] * 3, "datetime64[us]"),
    "decimal": (Decimal(0), [Decimal("1.5"), Decimal(0), Decimal(2)], "object"),
    "pair": (0.0, [[1, 2], [0, 0], [0, 4]], "float64"),
}


def test_nulls_become_the_given_values(folder):
    batch = fed(folder, {name: value for name, (value, _, _) in VALUES.items()})
    for name, (_, values, dtype) in VALUES.items():
        assert batch[name].tolist() == values, name
        assert batch[name].dtype == dtype, name


MISSING = {
    "double": [1.5, np.nan, 3.0],
    "int": [1, np.nan, -3],
    "flag": [1, np.nan, 0],
    "text": ["a", None, ""],
    "bytes": [b"a", None, b""],
    "day": np.array([DAY, "NaT", DAY], "datetime64[D]"),
    "time": np.array([TIME, "NaT", TIME], "datetime64[us]"),
    "instant": np.array([TIME, "NaT", TIME], "datetime64[us]"),
    "pair": [[1, 2], [np.nan, np.nan], [np.nan, 4]],
    "ints": [[1, 2], [np.nan, np.nan], [np.nan, 4]],
}


@pytest.mark.parametrize("options", [{}, {"cache": "memory"}])
def test_nulls_without_a_value_become_what_is_missing_in_their_dtype(folder, options):
    batch = fed(folder, dict.fromkeys(MISSING), **options)
    for name, values in MISSING.items():
        np.testing.assert_array_equal(batch[name], np.array(values, batch[name].dtype), err_msg=name)
    assert {batch[name].dtype for name in ("int", "flag", "ints")} == {np.dtype(np.float64)}


@pytest.mark.parametrize(
    ("nulls", "error", "message"),
    [
        ({"int": 0.5}, ParamError, "'int' holds int32 values, and the value for nulls, 0.5, is not"),
        ({"int": 2**40}, ParamError, "'int' holds int32"),
        ({"flag": 2}, ParamError, "'flag' holds bool"),
        ({"text": 0}, ParamError, "'text' holds string values"),
        ({"ragged": 0.0}, DataError, "'ragged' holds arrays that differ in length"),
        ({"nothing": 0.0}, DataError, "There is no column 'nothing'"),
    ],
)
def test_values_that_a_column_cannot_hold_are_refused(folder, nulls, error, message):
    with pytest.raises(error, match=message):
        ParquetFeed(folder, batch_size=3, shapes={"ragged": (None,)}, nulls=nulls)


def test_nulls_of_other_columns_are_an_error(folder):
    with (
        ParquetFeed(folder, columns=["double", "int"], batch_size=3, nulls={"int": 0}) as feed,
        pytest.raises(DataError, match="Column 'double' has 1 nulls"),
    ):
        next(feed.epoch(0))


def test_integers_that_would_become_equal_as_floats_are_an_error(tmp_path):
    start = 1_700_000_000_000_000_000  # nanoseconds since 1970
    pq.write_table(
        pa.table({"time": [start, start + 1], "large": [2**53, -(2**53)]}), tmp_path / "part-0.parquet"
    )
    assert fed(str(tmp_path), {"large": None})["large"].tolist() == [2.0**53, -(2.0**53)]
    with pytest.raises(DataError, match=r"'time' may hold nulls, .* up to 2\*\*53 .* Subtract a constant"):
        fed(str(tmp_path), {"time": None})


def test_width_of_arrays_is_that_of_the_first_that_is_not_null(tmp_path):
    lists = [None] * 300 + [[[1, 2], None, [3, 4]], [None, [5, 6], None]]
    pq.write_table(pa.table({"x": pa.array(lists)}), tmp_path / "part-0.parquet")
    with ParquetFeed(tmp_path, batch_size=400, shuffle=False, nulls={"x": 0}) as feed:
        (batch,) = feed
    assert batch["x"].shape == (302, 3, 2)
    assert batch["x"][300:].tolist() == [[[1, 2], [0, 0], [3, 4]], [[0, 0], [5, 6], [0, 0]]]
