"""Every column type of a DataFrame is kept in the Store, and is read by the feed as documented."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sparkdl.data import Column, ParquetFeed, Store, materialize, open_dataset
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

EXPRESSIONS = {
    "flag": "id % 2 = 0",
    "small": "cast(id as smallint)",
    "text": "concat('n', id, 'ü')",
    "raw": "cast(concat('b', id) as binary)",
    "price": "cast(id as decimal(20, 3)) / 2",
    "day": "date_add(date'1969-12-30', cast(id as int))",
    "instant": "timestamp_micros(id * 1000001)",
    "words": "array(concat('a', id), 'b')",
    "days": "array(date'2020-01-01', date_add(date'2020-01-01', cast(id as int)))",
    "tokens": "sequence(1, cast(id % 4 as int))",
    "points": "transform(sequence(0, cast(id % 3 as int)), i -> array(float(i), float(id)))",
    "jagged": "transform(sequence(0, 1), i -> sequence(i, cast(id % 3 as int) + 1))",
    "sentences": "transform(sequence(0, cast(id % 2 as int)), i -> concat('s', i))",
    "image": "named_struct('origin', 'o', 'height', 2, 'width', 1, 'nChannels', 3, 'mode', 16, "
    "'data', cast(concat('abcde', id) as binary))",
}


def python_row(number: int) -> dict[str, Any]:
    seconds, micros = divmod(number * 1000001, 1_000_000)
    epoch = datetime.datetime(1970, 1, 1)
    return {
        "flag": number % 2 == 0,
        "small": number,
        "text": f"n{number}ü",
        "raw": f"b{number}".encode(),
        "price": Decimal(number) / 2,
        "day": np.datetime64("1969-12-30") + number,
        "instant": np.datetime64(epoch + datetime.timedelta(seconds=seconds, microseconds=micros)),
        "words": [f"a{number}", "b"],
        "days": [np.datetime64("2020-01-01"), np.datetime64("2020-01-01") + number],
        # Spark's sequence(1, 0) counts down.
        "tokens": list(range(1, number % 4 + 1)) or [1, 0],
        "points": [[float(index), float(number)] for index in range(number % 3 + 1)],
        "jagged": [list(range(index, number % 3 + 2)) for index in range(2)],
        "sentences": [f"s{index}" for index in range(number % 2 + 1)],
        "image": np.frombuffer(f"abcde{number}".encode(), np.uint8).reshape(2, 1, 3),
    }


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    expressions = [f"{expression} as {name}" for name, expression in EXPRESSIONS.items()]
    return spark.range(0, 10, 1, 3).selectExpr("id", *expressions)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def check_rows(dataset: Any, names: list[str], *, shuffle: bool) -> None:
    seen = []
    with ParquetFeed(
        dataset, columns=["id", *names], rank=0, world_size=1, batch_size=4, shuffle=shuffle
    ) as feed:
        for batch in feed.epoch(0):
            for index, number in enumerate(batch["id"].tolist()):
                seen.append(number)
                expected = python_row(number)
                for name in names:
                    value = batch[name][index]
                    if name == "jagged":
                        assert [array.tolist() for array in value] == expected[name]
                    else:
                        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("shuffle", [False, pytest.param(True, marks=pytest.mark.any_spark_will_do)])
def test_every_type_is_unchanged_after_writing_and_feeding(
    df: DataFrame, store: Store, shuffle: bool
) -> None:
    names = list(EXPRESSIONS)
    dataset = materialize(df, ["id", *names], store)
    assert dataset.url.startswith(store.url)
    assert open_dataset(dataset.url) == dataset
    check_rows(dataset, names, shuffle=shuffle)


@pytest.mark.any_spark_will_do
def test_columns_of_a_dataset_describe_types_and_shapes(df: DataFrame, store: Store) -> None:
    dataset = materialize(df, list(EXPRESSIONS), store)

    def ragged(name: str, lengths: tuple[int | None, ...], element: tuple[str, str]) -> Column:
        return Column(name=name, dtype="object", kind="ragged", lengths=lengths, element=element)

    assert dataset.columns == (
        Column(name="flag", dtype="bool"),
        Column(name="small", dtype="int16"),
        Column(name="text", dtype="object", kind="string"),
        Column(name="raw", dtype="object", kind="binary"),
        Column(name="price", dtype="object", kind="decimal"),
        Column(name="day", dtype="datetime64[D]", kind="date"),
        Column(name="instant", dtype="datetime64[us]", kind="timestamp"),
        Column(name="words", dtype="object", kind="string", shape=(2,)),
        Column(name="days", dtype="datetime64[D]", kind="date", shape=(2,)),
        ragged("tokens", (None,), ("number", "int32")),
        ragged("points", (None, 2), ("number", "float32")),
        ragged("jagged", (2, None), ("number", "int32")),
        ragged("sentences", (None,), ("string", "object")),
        Column(name="image", dtype="object", kind="image"),
    )
    assert all(column.row_bytes > 0 for column in dataset.columns)


@pytest.mark.any_spark_will_do
def test_every_type_is_read_in_place(
    spark: SparkSession, df: DataFrame, store: Store, tmp_path: Path
) -> None:
    df.write.parquet(str(tmp_path / "rows"))
    names = list(EXPRESSIONS)
    dataset = materialize(spark.read.parquet(str(tmp_path / "rows")), ["id", *names], store)
    assert not dataset.url.startswith(store.url)
    check_rows(dataset, names, shuffle=False)


@pytest.mark.any_spark_will_do
def test_empty_arrays_are_ragged(spark: SparkSession, store: Store) -> None:
    df = spark.range(4).selectExpr("slice(array(1, 2), 1, cast(id % 2 as int)) as x", "array() as nothing")
    dataset = materialize(df.selectExpr("x", "cast(nothing as array<int>) as y"), ["x", "y"], store)
    with ParquetFeed(dataset, columns=["x", "y"], rank=0, world_size=1, batch_size=4, shuffle=False) as feed:
        (batch,) = feed.epoch(0)
    assert [value.tolist() for value in batch["x"]] == [[], [1], [], [1]]
    assert [value.tolist() for value in batch["y"]] == [[]] * 4


@pytest.mark.any_spark_will_do
def test_nulls_of_every_kind_are_refused_with_the_row(df: DataFrame, store: Store) -> None:
    for name in ("text", "price", "instant", "tokens", "image"):
        nulls = df.selectExpr("id", f"if(id = 5, null, {name}) as {name}")
        with pytest.raises(DataError, match=rf"'{name}' is null in 1 of 10 rows, first in \(id=5"):
            materialize(nulls, ["id", name], store)


@pytest.mark.any_spark_will_do
def test_a_type_without_a_form_is_refused_by_name(df: DataFrame, store: Store) -> None:
    with pytest.raises(DataError, match="'m' holds map<string,int>, which the feed has no form for"):
        materialize(df.selectExpr("map('a', 1) as m"), ["m"], store)


@pytest.mark.parametrize(
    ("num_rows", "target", "partitions"),
    [
        pytest.param(40_000, 1 << 16, 1, marks=pytest.mark.slow),
        (40_000, 1 << 16, 3),
        pytest.param(40_000, 1 << 16, 40, marks=pytest.mark.slow_elsewhere),
        # More than the driver joins itself.
        pytest.param(9_000_000, 1 << 24, 40, marks=pytest.mark.any_spark_will_do),
    ],
)
def test_row_groups_have_their_size_whatever_the_number_of_partitions(
    spark: SparkSession, store: Store, num_rows: int, target: int, partitions: int
) -> None:
    df = spark.range(0, num_rows, 1, partitions).selectExpr("id * 1 as x")
    dataset = materialize(df, ["x"], store, row_group_bytes=target)
    sizes = [8 * rows for rows in dataset.row_counts]
    assert max(sizes) <= target
    assert len(sizes) <= 2 * num_rows * 8 / target
    with ParquetFeed(
        dataset, columns=["x"], rank=0, world_size=1, batch_size=num_rows, shuffle=False
    ) as feed:
        (batch,) = feed.epoch(0)
    np.testing.assert_array_equal(batch["x"], np.arange(num_rows))
