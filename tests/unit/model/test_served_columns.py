from __future__ import annotations

import math
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data import Column
from sparkdl.errors import DataError
from sparkdl.model.served_columns import to_column_dtype


def number(dtype, shape=()):
    return Column(name="x", dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([1.0, math.nan], "int64", "in 1 of 2 rows, the first of them row 1"),
        ([math.nan, 1.0, math.nan], "float64", "in 2 of 3 rows, the first of them row 0"),
        ([1.0, 1.0, None], "float32", "in 1 of 3 rows, the first of them row 2"),
        ([True, None], "bool", "in 1 of 2 rows, the first of them row 1"),
        ([Decimal("1.5"), Decimal("NaN")], "float64", "in 1 of 2 rows"),
        (pd.array([1, None], "Int64"), "int64", "in 1 of 2 rows"),
        (pd.array([1.5, None], "Float64"), "float64", "in 1 of 2 rows"),
        ([1.5, pd.NaT], "float64", "in 1 of 2 rows, the first of them row 1"),
    ],
)
def test_missing_values_are_counted_and_the_first_is_named(values, dtype, message):
    for allow_nan in [False, True] if dtype in ("int64", "bool") else [False]:
        with pytest.raises(DataError, match=f"'x' holds null or NaN {message}"):
            to_column_dtype(pd.Series(values), number(dtype), allow_nan=allow_nan)


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([1.0, 1.7], "int64", "Row 1 of column 'x' holds 1.7, .* trained on int64"),
        ([1, 300], "int8", "Row 1 of column 'x' holds 300, .* trained on int8"),
        ([1, 2**63], "int64", "Row 1 of column 'x' holds 9223372036854775808, and"),
        ([-1], "uint8", "Row 0 of column 'x' holds -1, and"),
        ([True, 2], "bool", "Row 1 of column 'x' holds 2, and"),
        (["7"], "int64", "not numbers, such as '7'"),
        ([Decimal("1.5"), "7"], "float64", "not numbers"),
    ],
)
def test_values_that_the_trained_dtype_cannot_hold_are_named(values, dtype, message):
    with pytest.raises(DataError, match=message):
        to_column_dtype(pd.Series(values), number(dtype))


def holds(dtype, value):
    if dtype.startswith("float"):
        with np.errstate(over="ignore"):
            number = np.dtype(dtype).type(value)
            return not np.isnan(number) and (math.isinf(value) or not np.isinf(number))
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return math.isfinite(value) and value == int(value) and low <= value <= high


@given(
    values=st.lists(st.integers(-(2**70), 2**70) | st.floats() | st.booleans(), min_size=1, max_size=4),
    dtype=st.sampled_from(["bool", "int8", "uint8", "int32", "int64", "float32", "float64"]),
)
def test_numbers_are_converted_exactly_or_refused(values, dtype):
    rows = pd.Series(values, dtype=object)
    if not all(holds(dtype, value) for value in values):
        with pytest.raises(DataError):
            to_column_dtype(rows, number(dtype))
        return
    found = to_column_dtype(rows, number(dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, [np.dtype(dtype).type(value) for value in values])


@pytest.mark.parametrize(
    ("shape", "given"),
    [((2, 3), [1, 2, 3, 4, 5, 6]), ((2, 3), [[1, 2, 3], [4, 5, 6]]), ((1, 2, 3), [[1, 2, 3], [4, 5, 6]])],
)
def test_rows_have_the_shape_of_training_or_are_flat(shape, given):
    for rows in ([given, given], np.array([given, given], np.float32)):
        np.testing.assert_array_equal(
            to_column_dtype(rows, number("float32", shape))[1], np.arange(1, 7).reshape(shape)
        )
    turned = np.transpose(np.reshape(given, (2, 3))).tolist()
    for rows in ([given, turned], np.array([turned], np.float32)):
        with pytest.raises(DataError, match=r"has the shape \(3, 2\), and"):
            to_column_dtype(rows, number("float32", shape))


def ragged(*lengths, element=("number", "float32")):
    return Column(name="x", dtype="object", kind="ragged", lengths=lengths, element=element)


def test_arrays_of_arrays_are_matrices():
    """In this form Arrow gives nested lists to pandas 3."""
    row = np.empty(2, object)
    row[:] = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    (matrix,) = to_column_dtype([row], number("float64", (2, 2)))
    np.testing.assert_array_equal(matrix, [[1.0, 2.0], [3.0, 4.0]])
    row[1] = np.array([3.0])
    with pytest.raises(DataError, match="Row 0 of column 'x' has lists that differ in length"):
        to_column_dtype([row], number("float64", (2, 2)))


def test_ragged_rows_are_nested_as_in_training():
    pairs = to_column_dtype([[[1, 2], [3, 4], [5, 6]], []], ragged(None, 2))
    assert [row.shape for row in pairs] == [(3, 2), (0, 2)]
    (uneven,) = to_column_dtype([[[1, 2], [3]]], ragged(None, None))
    assert [inner.tolist() for inner in uneven] == [[1.0, 2.0], [3.0]]
    (words,) = to_column_dtype([["a", "b"]], ragged(None, element=("string", "object")))
    assert words.tolist() == ["a", "b"]
    for rows, column, message in (
        ([[1, 2], [1, None]], ragged(None), "'x' holds null or NaN in 1 of 2 rows, .* row 1"),
        ([[1.0], None, [math.nan]], ragged(None), "'x' holds null or NaN in 2 of 3 rows, .* row 1"),
        ([[[1.0], None]], ragged(None, None), "'x' holds null or NaN in 1 of 1 rows"),
        ([["a", None]], ragged(None, element=("string", "object")), "'x' holds null or NaN in 1 of 1 rows"),
        ([3], ragged(None, None), "Row 0 of column 'x' holds 3 .* lists of lists"),
        ([[0.5]], ragged(None, element=("number", "int64")), "Row 0 of column 'x' holds 0.5, and"),
        ([[[1, 2], [3]]], ragged(None, 2), "Row 0 of column 'x' has lists that differ in length"),
        ([[[1, 2, 3]]], ragged(None, 2), "Row 0 of column 'x' has the shape .1, 3., .* lists of 2"),
    ):
        with pytest.raises(DataError, match=message):
            to_column_dtype(rows, column)


INSTANTS = Column(name="t", dtype="datetime64[us]", kind="timestamp", is_utc=True)
CLOCK_TIMES = Column(name="t", dtype="datetime64[us]", kind="timestamp")
EAST = timezone(timedelta(hours=5, minutes=45))


@given(
    micros=st.integers(-(6 * 10**16), 10**17), offset=st.sampled_from(["+05:45", "+0545", "-11", "+00:00"])
)
def test_every_form_of_an_instant_is_the_same_one(micros, offset):
    instant = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=micros)
    hours, minutes = int(offset[:3]), int(offset[-2:]) if len(offset) > 3 else 0
    there = instant.astimezone(timezone(timedelta(hours=hours, minutes=minutes))).replace(tzinfo=None)
    utc = instant.replace(tzinfo=None).isoformat(sep=" ")
    forms = [
        micros,
        np.int64(micros),
        instant,
        instant.astimezone(EAST),
        f"{utc}Z",
        there.isoformat() + offset,
    ]
    if abs(micros) < 9 * 10**15:
        forms += [float(micros), pd.Timestamp(instant)]
        frame = pd.Series(pd.to_datetime([micros], unit="us", utc=True)).dt.tz_convert("Africa/Monrovia")
        assert to_column_dtype(frame, INSTANTS).astype(np.int64).tolist() == [micros]
    found = to_column_dtype(pd.Series(forms, dtype=object), INSTANTS)
    assert found.dtype == "datetime64[us]"
    assert found.astype(np.int64).tolist() == [micros] * len(forms)
    for form in forms:
        if isinstance(form, int | float | np.integer):
            assert to_column_dtype(pd.Series([form]), CLOCK_TIMES).astype(np.int64).tolist() == [micros]
            continue
        with pytest.raises(DataError, match="'t' holds the instant .* trained on clock times"):
            to_column_dtype(pd.Series([form], dtype=object), CLOCK_TIMES)


NAIVE = [
    datetime(2026, 1, 31, 12),
    pd.Timestamp(2026, 1, 31, 12),
    np.datetime64("2026-01-31T12:00", "ns"),
    "2026-01-31T12:00:00",
    "2026-01-31 12:00:00.000000",
    date(2026, 1, 31),
    "2026-01-31",
]


@pytest.mark.parametrize("value", NAIVE, ids=str)
def test_clock_times_are_taken_only_where_the_training_had_them(value):
    micros = to_column_dtype(pd.Series([value], dtype=object), CLOCK_TIMES).astype(np.int64).tolist()
    assert micros in ([1769860800000000], [1769817600000000])
    nested = np.empty(1, object)
    nested[0] = np.array([value, value]) if isinstance(value, np.datetime64) else [value, value]
    arrays = {
        "kind": "ragged",
        "dtype": "object",
        "lengths": (None,),
        "element": ("timestamp", "datetime64[us]"),
    }
    found = to_column_dtype(nested, Column(name="t", **arrays))
    assert found[0].astype(np.int64).tolist() == micros * 2
    for rows, column in (
        (pd.Series([value]), INSTANTS),
        (nested, Column(name="t", dtype="datetime64[us]", kind="timestamp", shape=(2,), is_utc=True)),
        (nested, Column(name="t", is_utc=True, **arrays)),
    ):
        with pytest.raises(DataError, match="'t' holds the clock time 2026-01-31.*unix_micros"):
            to_column_dtype(rows, column)


def test_nanoseconds_are_rounded_down_as_in_training():
    stamps = pd.to_datetime(pd.Series([-1, 1999], dtype="int64"), unit="ns")
    assert to_column_dtype(stamps, CLOCK_TIMES).astype(np.int64).tolist() == [-1, 1]
    assert to_column_dtype(stamps.dt.tz_localize("UTC"), INSTANTS).astype(np.int64).tolist() == [-1, 1]


NO_TIMES = [
    "noon",
    "now",
    "NaT",
    "",
    "2026",
    "20260131",
    0.5,
    True,
    b"2026",
    "2026-13-01T00:00:00Z",
    math.inf,
    2**63,
]


@pytest.mark.parametrize("column", [INSTANTS, CLOCK_TIMES], ids=["instants", "clock times"])
@pytest.mark.parametrize("value", NO_TIMES)
def test_what_is_no_timestamp_is_an_error(value, column):
    with pytest.raises(DataError, match="'t' holds .* is not a timestamp"):
        to_column_dtype(pd.Series([value], dtype=object), column)


DATES = Column(name="d", dtype="datetime64[D]", kind="date")
DAY = np.datetime64("2026-01-31")


@pytest.mark.parametrize(
    "value",
    [
        date(2026, 1, 31),
        datetime(2026, 1, 31),
        pd.Timestamp(2026, 1, 31),
        DAY,
        "2026-01-31",
        "2026-01-31T00:00:00",
    ],
    ids=repr,
)
def test_every_form_of_a_date_is_the_same_day(value):
    found = to_column_dtype(pd.Series([value]), DATES)
    assert found.dtype == "datetime64[D]"
    assert found[0] == DAY
    (days,) = to_column_dtype([[value, value]], ragged(None, element=("date", "datetime64[D]")))
    assert days.tolist() == [date(2026, 1, 31)] * 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, "is not a date") for value in [*NO_TIMES[:-3], 20484, np.int64(20484), 1769817600000]),
        ("2026-01-31T00:00:00Z", "holds the instant .* or dates, which have no time zone"),
        (datetime(2026, 1, 31, tzinfo=EAST), "holds the instant"),
        (pd.Timestamp("2026-01-31", tz="Asia/Tokyo"), "holds the instant"),
        (datetime(2026, 1, 31, 18), "trained on dates: give that without the time"),
    ],
    ids=repr,
)
def test_what_may_be_another_day_is_no_date(value, message):
    with pytest.raises(DataError, match=message):
        to_column_dtype(pd.Series([value]), DATES)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_bytes_may_be_a_bytearray(make):
    column = Column(name="b", dtype="object", kind="binary")
    assert to_column_dtype(pd.Series([make(b"PNG"), make(b"x")]), column).tolist() == [b"PNG", b"x"]
    with pytest.raises(DataError, match="1 values"):
        to_column_dtype([make(b"\1\2")], number("float32", (2,)))
