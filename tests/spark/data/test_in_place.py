"""Plain reads of Parquet are trained on in place; everything else is copied."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyspark.sql import functions as F
from torch import nn

from sparkdl.data import ParquetFeed, Store, materialize
from sparkdl.data.dataset.footers import urls_for_spark
from sparkdl.data.store.housekeeping import remove_unless_used
from sparkdl.errors import DataError
from sparkdl.estimators import TorchModel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


ENCODED = pa.struct({"bytes": pa.binary(), "path": pa.string()})
SWAPPED = pa.struct({"path": pa.string(), "bytes": pa.binary()})


@pytest.fixture(scope="module")
def folder(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in place") / "rows with space"
    columns = ["id as x", "cast(id as float) / 2 as y", "array(id, id + 1) as pair", "id % 3 = 0 as flag"]
    df = spark.range(0, 300, 1, 3).selectExpr(*columns, "date_add(date'2020-01-01', cast(id as int)) as day")
    df.write.parquet(str(folder))
    df.write.partitionBy("flag").parquet(str(folder.parent / "partitioned"))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.slow_elsewhere
def test_a_plain_read_is_not_copied(spark: SparkSession, folder: Path, store: Store) -> None:
    for df in (spark.read.parquet(str(folder)), spark.read.parquet(str(folder)).select("pair", "x", "day")):
        dataset = materialize(df, ["x", "pair", "day"], store)
        assert Path(dataset.url.removeprefix("file:")).resolve() == folder
        assert dataset.column("pair").shape == (2,)
        with ParquetFeed(dataset, columns=["x", "pair"], rank=0, world_size=1, batch_size=300) as feed:
            (batch,) = feed.epoch(0)
        np.testing.assert_array_equal(np.sort(batch["x"]), np.arange(300))
        np.testing.assert_array_equal(batch["pair"][:, 1], batch["x"] + 1)
    assert not Path(store.url).exists()
    assert not remove_unless_used(dataset.url), "files of somebody else stay"


@pytest.mark.any_spark_will_do
def test_only_the_files_that_spark_reads_are_read(spark: SparkSession, folder: Path, store: Store) -> None:
    some = sorted(str(path) for path in folder.glob("*.parquet"))[:2]
    assert materialize(spark.read.parquet(*some), ["x"], store).num_rows == 200


@pytest.mark.any_spark_will_do
def test_dataframe_that_is_more_than_a_choice_of_columns_is_copied(
    spark: SparkSession, folder: Path, store: Store
) -> None:
    df = spark.read.parquet(str(folder))
    cached = df.select("x", "y").cache()
    for case in (df.selectExpr("y as x"), df.where("x > 5"), df.union(df), cached):
        dataset = materialize(case, ["x"], store)
        assert dataset.url.startswith(store.url)
        assert dataset.num_rows == case.count()
    cached.unpersist()
    partitioned = spark.read.parquet(str(folder.parent / "partitioned"))
    assert materialize(partitioned, ["x", "flag"], store).url.startswith(store.url)
    # Spark's optimizer reduces struct(x).x to x.
    simplified = df.selectExpr("struct(x).x as x", "y")
    assert not materialize(simplified, ["x"], store).url.startswith(store.url)


@pytest.mark.any_spark_will_do
def test_files_that_spark_reads_twice_are_copied_with_all_rows(
    spark: SparkSession, folder: Path, store: Store
) -> None:
    file = next(folder.glob("*.parquet"))
    for paths, num_rows in (((folder, folder), 600), ((folder, file), 400)):
        dataset = materialize(spark.read.parquet(*map(str, paths)), ["x"], store)
        assert (dataset.num_rows, dataset.url.startswith(store.url)) == (num_rows, True)


@pytest.mark.any_spark_will_do
def test_partition_column_that_is_also_in_the_files_has_the_values_that_spark_gives(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "rows" / "x=7").mkdir(parents=True)
    pq.write_table(pa.table({"x": pa.array([1, 2], pa.int32())}), tmp_path / "rows" / "x=7" / "a.parquet")
    dataset = materialize(spark.read.parquet(str(tmp_path / "rows")), ["x"], store)
    with ParquetFeed(dataset, batch_size=2) as feed:
        assert [batch["x"].tolist() for batch in feed] == [[7, 7]]


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_further_dataframes_that_are_more_than_a_choice_of_columns_are_copied(
    spark: SparkSession, folder: Path, store: Store
) -> None:
    df = spark.read.parquet(str(folder))
    computed = [df.selectExpr(expression) for expression in ("cast(x as int) as x", "x + 1 as x")]
    wider = spark.read.schema("x bigint, missing double").parquet(str(folder)).fillna(0.0)
    for case in (*computed, df.limit(10), df.sample(0.5, seed=1), wider):
        dataset = materialize(case, ["x"], store)
        assert dataset.url.startswith(store.url)
        assert dataset.num_rows == case.count()


@pytest.mark.any_spark_will_do
def test_nulls_and_lengths_are_checked_in_place_as_well(
    spark: SparkSession, folder: Path, tmp_path: Path, store: Store
) -> None:
    df = spark.read.parquet(str(folder))
    df.selectExpr("if(x < 4, null, x) as x", "if(x < 4, array(x), pair) as pair").write.parquet(
        str(tmp_path / "bad")
    )
    bad = spark.read.parquet(str(tmp_path / "bad"))
    with pytest.raises(DataError, match="'x' is null in 4 of 300 rows"):
        materialize(bad, ["x"], store)
    with pytest.raises(DataError, match="'pair' has arrays of 1 to 2 elements"):
        materialize(bad, ["pair"], store, allow_ragged=False)


@pytest.mark.any_spark_will_do
def test_images_of_hugging_faces_files_are_their_bytes_in_place_and_copied(
    spark: SparkSession, tmp_path: Path, store: Store
) -> None:
    rows = [{"bytes": bytes([number]), "path": "a.png" if number else None} for number in range(4)]
    for name, images in (("whole", rows), ("lacking", [*rows, {"bytes": None, "path": "b.png"}])):
        (tmp_path / name).mkdir()
        pq.write_table(
            pa.table(
                {
                    "image": pa.array(images, ENCODED),
                    "swapped": pa.array(images, SWAPPED),
                    "sounds": pa.array([images], pa.list_(ENCODED)).take([0] * len(images)),
                }
            ),
            tmp_path / name / "rows.parquet",
        )
    whole, lacking = (spark.read.parquet(str(tmp_path / name)) for name in ("whole", "lacking"))
    for df in (whole, whole.limit(10)):
        dataset = materialize(df, ["image", "swapped", "sounds"], store)
        assert (dataset.url.startswith(store.url), dataset.column("image").kind) == (
            df is not whole,
            "binary",
        )
        with ParquetFeed(dataset, rank=0, world_size=1, batch_size=4, shuffle=False) as feed:
            (batch,) = feed.epoch(0)
        expected = [row["bytes"] for row in rows]
        assert sorted(batch["image"].tolist()) == sorted(batch["swapped"].tolist()) == expected
        assert batch["sounds"][0].tolist() == expected
    for df in (lacking, lacking.limit(10)):
        for name in ("image", "swapped"):
            with pytest.raises(DataError, match=f"'{name}' is null in 1 of 5 rows"):
                materialize(df, [name], store)


@pytest.mark.any_spark_will_do
def test_in_place_read_accepts_empty_arrays_and_refuses_null_elements(
    spark: SparkSession, tmp_path: Path, store: Store
) -> None:
    text = "array('[null]', '1,null,2')"
    columns = {
        "x": "slice(array(id, id + 1), 1, cast(id % 3 as int))",
        "words": f"if(id = 2, slice({text}, 1, 0), {text})",
        "deep": "if(id = 1, array(), array(slice(array(id), 1, cast(id % 2 as int)), array(1L)))",
    }
    spark.range(6).selectExpr(
        *[f"{expression} as {name}" for name, expression in columns.items()]
    ).write.parquet(f"{tmp_path}/ragged")
    dataset = materialize(spark.read.parquet(f"{tmp_path}/ragged"), list(columns), store)
    assert not dataset.url.startswith(store.url)
    with ParquetFeed(dataset, columns=["x"], rank=0, world_size=1, batch_size=6) as feed:
        (batch,) = feed.epoch(0)
    assert sorted(value.tolist() for value in batch["x"]) == [[], [], [1], [2, 3], [4], [5, 6]]
    spark.range(6).selectExpr(
        "array(array(), array(if(id < 2, null, id))) as inner", "array(if(id < 3, null, array(id))) as outer"
    ).write.parquet(f"{tmp_path}/nulls")
    for name, count in (("inner", 2), ("outer", 3)):
        with pytest.raises(DataError, match=f"'{name}' has arrays with null elements in {count} of 6 rows"):
            materialize(spark.read.parquet(f"{tmp_path}/nulls"), [name], store)


@pytest.fixture
def delta(tmp_path: Path) -> str:
    """The folder of a Delta table, with a file that its newest version has removed."""
    folder = str(tmp_path / "a table")
    write_deltalake(folder, pa.table({"x": [1.0, 2.0], "y": [1, 2]}))
    write_deltalake(folder, pa.table({"x": [3.0], "y": [3]}), mode="overwrite")
    return folder


REMOVED = (
    r"is a Delta table.* 1 of the 2 files .* not of its newest version, such as .*parquet; fit_on_parquet"
)


@pytest.mark.slow_on("cluster")
def test_no_plan_gives_the_rows_that_a_delta_table_has_removed(
    spark: SparkSession, delta: str, store: Store
) -> None:
    df = spark.read.parquet(delta)
    cached = df.select("x").cache()
    cached.count()
    spark.sql(f"create or replace temporary view removed_rows as select x from parquet.`{delta}`")
    for case in (
        df,
        df.where("x > 0"),
        df.selectExpr("cast(x as float) as x"),
        df.union(df),
        df.join(spark.range(1, 9), df.y == F.col("id")),
        cached,
        spark.sql(f"select x + 1 as x from parquet.`{delta}`"),
        spark.table("removed_rows"),
        spark.read.parquet(f"{delta}/*.parquet"),
    ):
        with pytest.raises(DataError, match=REMOVED):
            materialize(case, ["x"], store)
    cached.unpersist()
    model = TorchModel.from_module(
        nn.Identity(), example=spark.range(2).selectExpr("array(id * 1.0D) as features")
    )
    rows = df.selectExpr("array(x) as features", "x as label")
    for measure in (model.evaluate, model.featureImportances):
        with pytest.raises(DataError, match=REMOVED):
            measure(rows)
    newest = spark.read.parquet(*urls_for_spark(delta))
    assert not materialize(newest, ["x"], store).url.startswith(store.url)
    for case in (newest, newest.where("x > 0")):
        assert materialize(case, ["x"], store).num_rows == 1


@pytest.mark.any_spark_will_do
def test_no_other_reader_of_parquet_gives_the_rows_that_a_table_has_removed(
    spark: SparkSession, delta: str, tmp_path: Path, store: Store
) -> None:
    spark.sql(f"create table rows_of_delta using parquet location '{delta}'")
    readers = spark.conf.get("spark.sql.sources.useV1SourceList")
    try:
        rows = spark.range(3).selectExpr("cast(id as double) as z")
        joined = rows.where(f"z in (select x from parquet.`{delta}`)").selectExpr("z as x")
        for case in (spark.table("rows_of_delta"), joined):
            with pytest.raises(DataError, match=REMOVED):
                materialize(case, ["x"], store)
        spark.conf.set("spark.sql.sources.useV1SourceList", "")
        with pytest.raises(DataError, match=REMOVED):
            materialize(spark.read.parquet(delta), ["x"], store)
    finally:
        spark.conf.set("spark.sql.sources.useV1SourceList", readers)
        spark.sql("drop table rows_of_delta")
    iceberg = tmp_path / "iceberg"
    spark.range(3).write.parquet(str(iceberg / "data"))
    (iceberg / "metadata").mkdir()
    (iceberg / "metadata" / "v1.metadata.json").write_text("{}")
    with pytest.raises(DataError, match="is an Iceberg table"):
        materialize(spark.read.parquet(str(iceberg / "data")).where("id > 0"), ["id"], store)


@pytest.mark.any_spark_will_do
def test_a_part_of_what_a_stream_wrote_is_read_as_spark_reads_it(
    spark: SparkSession, tmp_path: Path, store: Store
) -> None:
    written = tmp_path / "of a stream"
    spark.range(3).write.parquet(str(written / "day=1"))
    (written / "_spark_metadata").mkdir()
    (written / "_spark_metadata" / "0").write_text("v1")
    rows = spark.read.parquet(str(written / "day=1"))
    assert materialize(rows.where("id >= 0"), ["id"], store).num_rows == 3


@pytest.mark.any_spark_will_do
def test_a_dataframe_keeps_to_the_files_of_a_delta_table_while_they_are_valid(
    spark: SparkSession, tmp_path: Path, store: Store
) -> None:
    folder = str(tmp_path / "table")
    write_deltalake(folder, pa.table({"x": [1.0, 2.0], "day": [1, 2]}), partition_by=["day"])
    df = spark.read.parquet(folder)
    assert materialize(df, ["x", "day"], store).num_rows == 2
    write_deltalake(folder, pa.table({"x": [3.0], "day": [3]}), mode="append")
    assert materialize(df, ["x"], store).num_rows == 2
    assert materialize(spark.read.parquet(folder), ["x"], store).num_rows == 3
    write_deltalake(folder, pa.table({"x": [4.0], "day": [4]}), mode="overwrite")
    with pytest.raises(DataError, match="2 of the 2 files"):
        materialize(df, ["x"], store)
