"""Materialization with a real Spark session, classic or Connect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sparkdl.data import (
    Column,
    ParquetFeed,
    Store,
    make_spark_converter,
    materialize,
    open_dataset,
    use_materialized,
)
from sparkdl.data.spark.columns import check_types
from sparkdl.data.store.housekeeping import remove_unless_used
from sparkdl.errors import DataError, ParamError, StoreError
from tests.small_disk import small_disk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


__all__ = ["small_disk"]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import types as T

    def row(number: int) -> tuple[object, ...]:
        dense = Vectors.dense([float(number), 2.0])
        sparse = Vectors.sparse(2, [0], [float(number)])
        grid = [[number, 1, 2], [3, 4, 5]]
        return (
            number,
            dense if number % 2 else sparse,
            [number / 2] * 3,
            grid,
            number % 3 == 0,
            f"n{number}",
            0.5 if number % 5 else float("nan"),
        )

    schema = T.StructType(
        [
            T.StructField("id", T.LongType()),
            T.StructField("vector", VectorUDT()),
            T.StructField("array", T.ArrayType(T.FloatType())),
            T.StructField("grid", T.ArrayType(T.ArrayType(T.ShortType()))),
            T.StructField("flag", T.BooleanType()),
            T.StructField("name", T.StringType()),
            T.StructField("with.dot", T.DoubleType()),
        ]
    )
    return spark.createDataFrame([row(number) for number in range(200)], schema).repartition(3).cache()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "a store")  # Spark and Python must encode the space alike


def files_of(store: Store) -> list[str]:
    folder = Path(store.url)
    return [path.name for path in folder.iterdir()] if folder.exists() else []


@pytest.mark.slow_elsewhere
def test_columns_arrive_with_their_values_types_and_shapes(df: DataFrame, store: Store) -> None:
    names = ["vector", "array", "grid", "flag", "with.dot", "id"]
    dataset = materialize(df, names, store)
    assert dataset.columns == (
        Column(name="vector", dtype="float64", shape=(2,)),
        Column(name="array", dtype="float32", shape=(3,)),
        Column(name="grid", dtype="int16", shape=(2, 3)),
        Column(name="flag", dtype="bool"),
        Column(name="with.dot", dtype="float64"),
        Column(name="id", dtype="int64"),
    )
    assert open_dataset(dataset.url) == dataset
    ids = []
    for rank in range(2):
        with ParquetFeed(dataset, columns=names, rank=rank, world_size=2, batch_size=16, seed=1) as feed:
            for batch in feed.epoch(0):
                number = batch["id"]
                np.testing.assert_array_equal(batch["vector"], np.stack([number, 2 * (number % 2)], axis=1))
                np.testing.assert_array_equal(batch["array"], np.repeat(number / 2, 3).reshape(-1, 3))
                np.testing.assert_array_equal(batch["grid"][:, 0, 0], number)
                np.testing.assert_array_equal(batch["flag"], number % 3 == 0)
                np.testing.assert_array_equal(batch["with.dot"], np.where(number % 5, 0.5, np.nan))
                ids.append(number)
    np.testing.assert_array_equal(np.sort(np.concatenate(ids)), np.arange(200))
    assert remove_unless_used(dataset.url)
    assert files_of(store) == []


@pytest.mark.any_spark_will_do
def test_vectors_can_be_stored_in_single_precision(df: DataFrame, store: Store) -> None:
    dataset = materialize(df, ["vector"], store, vector_dtype="float32")
    assert dataset.columns == (Column(name="vector", dtype="float32", shape=(2,)),)


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["id", "nope"], "no column 'nope'. The columns are: id, vector, array, grid, flag, name, with.dot"),
        ([], "No columns were given"),
    ],
)
def test_missing_columns_and_an_empty_choice_are_refused(
    df: DataFrame, columns: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_types(df.schema, columns, numbers_only=True)


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    ("name", "expression", "message"),
    [
        ("id", "if(id < 4, null, id)", r"is null in 4 of 200 rows, first in \(id=None.*dropna"),
        pytest.param(
            "vector", "if(id < 4, null, vector)", "is null in 4 of 200 rows", marks=pytest.mark.slow
        ),
        pytest.param("array", "if(id < 4, null, array)", "is null in 4 of 200 rows", marks=pytest.mark.slow),
        ("array", "if(id < 4, array(1f, null, 2f), array)", "has arrays with null elements in 4 of 200 rows"),
        ("array", "if(id < 4, array(1f), array)", "has arrays of 1 to 3 elements"),
        ("array", "cast(array() as array<float>)", "arrays in column 'array' are empty"),
        pytest.param(
            "grid",
            "if(id < 4, array(array(1S, 2S, 3S)), grid)",
            "has arrays of 1 to 2 elements",
            marks=pytest.mark.slow,
        ),
        ("grid", "if(id < 4, array(array(1S, 2S), array(3S, 4S)), grid)", "has arrays of 2 to 3 elements"),
    ],
)
def test_values_that_cannot_be_trained_on_are_named_and_leave_no_files(
    df: DataFrame, store: Store, name: str, expression: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        materialize(
            df.selectExpr(f"{expression} as {name}", "flag"), [name, "flag"], store, allow_ragged=False
        )
    assert repr(name) in str(caught.value)
    assert files_of(store) == []


@pytest.mark.any_spark_will_do
def test_an_empty_dataframe_is_an_error(df: DataFrame, store: Store) -> None:
    for empty in (df.where("id < 0"), df.limit(0)):
        with pytest.raises(DataError, match="has no rows"):
            materialize(empty, ["id", "array"], store)
    assert files_of(store) == []


WRITERS = {
    "materialize": lambda df, store: materialize(df, ["value"], store),
    "use_materialized": lambda df, store: use_materialized(df, ["value"], store).__enter__(),
    "make_spark_converter": lambda df, store: make_spark_converter(df, store.url),
}


@pytest.mark.no_cluster_needed
@pytest.mark.parametrize("name", WRITERS)
def test_streams_and_objects_that_are_no_dataframe_are_refused_before_any_job_runs(
    spark: SparkSession, store: Store, name: str
) -> None:
    stream = spark.readStream.format("rate").load()
    with pytest.raises(DataError, match=f"^{name} takes .* call {name} on each"):
        WRITERS[name](stream, store)
    with pytest.raises(DataError, match=f"^{name} takes a Spark DataFrame, got builtins.dict"):
        WRITERS[name]({"value": [1.0]}, store)
    assert not Path(store.url).exists()


@pytest.mark.any_spark_will_do
def test_columns_as_one_text_are_refused_and_a_store_may_be_a_path(df: DataFrame, store: Store) -> None:
    with pytest.raises(ParamError, match=r"got the text 'id'\. Write \['id'\]"):
        materialize(df, "id", store)
    assert materialize(df, ["id"], store.url).url.startswith(store.url)
    with use_materialized(df, ["id"], Path(store.url)) as dataset:
        assert dataset.url.startswith(store.url)
    with pytest.raises(ParamError, match="got int"):
        materialize(df, ["id"], 5)


@pytest.mark.any_spark_will_do
def test_on_write_is_called_only_when_rows_are_written(df: DataFrame, store: Store, tmp_path: Path) -> None:
    told: list[str] = []
    for name in ("first", "second"):
        with use_materialized(df, ["id"], store, on_write=lambda name=name: told.append(name)):
            pass
    df.select("id").write.parquet(str(tmp_path / "in place"))
    plain = df.sparkSession.read.parquet(str(tmp_path / "in place"))
    with use_materialized(plain, ["id"], store, on_write=lambda: told.append("in place")):
        pass
    assert told == ["first"]


@pytest.mark.any_spark_will_do
def test_label_range_is_known_after_writing(df: DataFrame, store: Store) -> None:
    dataset = materialize(df, ["id"], store)
    assert dataset.column("id").value_range == (0, 199)


@pytest.mark.slow_elsewhere
def test_a_failing_write_leaves_no_files(df: DataFrame, store: Store) -> None:
    with pytest.raises(Exception, match="no such luck"):
        materialize(df.selectExpr("if(id = 150, raise_error('no such luck'), id) as id"), ["id"], store)
    assert files_of(store) == []


@pytest.mark.any_spark_will_do
def test_a_store_that_cannot_be_written_is_known_before_spark_starts(df: DataFrame, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        materialize(df, ["id"], Store(tmp_path / "file" / "store"))


@pytest.mark.any_spark_will_do
def test_full_disk_is_named_and_leaves_no_partial_dataset(spark: SparkSession, small_disk: Path) -> None:
    with pytest.raises(StoreError, match=rf"{small_disk} cannot be written: its disk is full.*cleanup"):
        materialize(spark.range(0, 1 << 20, 1, 2).selectExpr("hash(id) * id as x"), ["x"], Store(small_disk))
    assert list(small_disk.iterdir()) == []
