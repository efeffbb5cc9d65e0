"""Equal rows are written once, and different rows are never shared: which fits share a dataset and which must not."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetFeed, Store, materialize, use_materialized
from sparkdl.data.spark.rows_key import lasting_key, shared_key
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.data import ParquetDataset


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def write_numbers(folder: Path, start: int) -> None:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"x": np.arange(start, start + 100)}), folder / "part-0.parquet")


def values(dataset: ParquetDataset, name: str = "x") -> list[float]:
    with ParquetFeed(
        dataset, columns=[name], rank=0, world_size=1, batch_size=1 << 16, shuffle=False
    ) as feed:
        return sorted(float(value) for batch in feed.epoch(0) for value in batch[name])


def sets_of(store: Store) -> list[str]:
    return sorted(path.name for path in Path(store.url).iterdir())


def doubled(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.read.parquet(str(folder)).selectExpr("x * 2 as x")


def test_the_same_dataframe_is_written_once(spark: SparkSession, tmp_path: Path, store: Store) -> None:
    write_numbers(tmp_path / "a b", 0)
    df = doubled(spark, tmp_path / "a b")
    first = materialize(df, ["x"], store)
    assert materialize(df, ["x"], store) == first
    assert values(first) == [2.0 * number for number in range(100)]
    assert len(sets_of(store)) == 1


@pytest.mark.any_spark_will_do
def test_rewritten_files_give_a_new_dataset(spark: SparkSession, tmp_path: Path, store: Store) -> None:
    write_numbers(tmp_path / "in", 0)
    df = doubled(spark, tmp_path / "in")
    first = materialize(df, ["x"], store)
    write_numbers(tmp_path / "in", 1000)  # same name, size and number of rows
    second = materialize(df, ["x"], store)
    assert second.url != first.url
    assert values(second) == [2.0 * number for number in range(1000, 1100)]


@pytest.mark.any_spark_will_do
def test_columns_and_options_are_part_of_the_key(spark: SparkSession, store: Store) -> None:
    df = spark.range(100).selectExpr("id as x", "id * 2 as y")
    urls = [
        materialize(df, ["x"], store).url,
        materialize(df, ["y"], store).url,
        materialize(df, ["x", "y"], store).url,
        materialize(df, ["x"], store, row_group_bytes=128).url,
        materialize(df, ["x"], store, vector_dtype="float32").url,
    ]
    assert len(set(urls)) == len(urls)


@pytest.mark.slow_elsewhere
def test_random_rows_are_written_for_each_fit_and_the_log_says_why(
    spark: SparkSession, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    df = spark.range(50).selectExpr("rand() as x")
    with caplog.at_level(logging.INFO, "sparkdl.data"):
        assert materialize(df, ["x"], store).url != materialize(df, ["x"], store).url
    assert "The rows are written for this fit alone: " in caplog.text


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    "expression",
    [
        "rand(7) as x",
        "cast(unix_micros(current_timestamp()) as bigint) as x",
        "cast(hash(uuid()) as bigint) as x",
        "monotonically_increasing_id() as x",
        "reflect('java.lang.System', 'nanoTime') as x",
    ],
)
def test_nondeterministic_plan_has_no_key(spark: SparkSession, expression: str) -> None:
    assert shared_key(spark.range(50).selectExpr(expression), {}) is None
    assert shared_key(spark.range(50).selectExpr("id as x"), {}) is not None


@pytest.mark.any_spark_will_do
def test_nondeterministic_column_among_hundreds_is_detected(spark: SparkSession) -> None:
    columns = [f"id + {index} as c{index}" for index in range(200)]
    assert shared_key(spark.range(5).selectExpr(*columns), {}) is not None
    df = spark.range(5).selectExpr(*columns[:100], "rand() as x", *columns[100:])
    assert shared_key(df, {}) is None


def test_python_functions_have_no_key(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    df = spark.range(50).select(F.udf(lambda number: number + 1, "bigint")("id").alias("x"))
    assert shared_key(df, {}) is None
    assert shared_key(spark.range(50).mapInPandas(lambda frames: frames, "id bigint"), {}) is None


@pytest.mark.slow_elsewhere
def test_rows_in_memory_are_shared_only_if_they_are_equal(spark: SparkSession, store: Store) -> None:
    df = spark.createDataFrame([(1,), (2,)], "x bigint")
    other = spark.createDataFrame([(1,), (3,)], "x bigint")
    first = materialize(df, ["x"], store)
    assert materialize(df, ["x"], store) == first
    assert values(materialize(other, ["x"], store)) == [1.0, 3.0]
    df.cache()
    assert materialize(df, ["x"], store) == first
    df.unpersist()


@pytest.mark.any_spark_will_do
def test_the_features_of_an_ml_pipeline_are_shared(spark: SparkSession, store: Store) -> None:
    from pyspark.ml.feature import VectorAssembler

    df = VectorAssembler(inputCols=["id"], outputCol="x").transform(spark.range(50))
    first, second = (materialize(df, ["x"], store) for _ in range(2))
    assert first == second
    assert shared_key(df.selectExpr("x", "rand() as y"), {}) is None


@pytest.mark.any_spark_will_do
def test_split_is_shared_and_not_confused_with_other_splits(spark: SparkSession, store: Store) -> None:
    train, test = spark.range(100).randomSplit([0.5, 0.5], seed=1)
    other = spark.range(100).randomSplit([0.5, 0.5], seed=2)[0]
    first = materialize(train, ["id"], store)
    assert materialize(train, ["id"], store) == first
    assert not set(values(first, "id")) & set(values(materialize(test, ["id"], store), "id"))
    assert values(materialize(other, ["id"], store), "id") != values(first, "id")


@pytest.mark.any_spark_will_do
def test_a_cached_dataframe_whose_files_changed_is_read_from_the_cache_and_not_shared(
    spark: SparkSession, tmp_path: Path, store: Store
) -> None:
    write_numbers(tmp_path / "in", 0)
    df = doubled(spark, tmp_path / "in").cache()
    df.count()
    write_numbers(tmp_path / "in", 1000)
    assert values(materialize(df, ["x"], store))[0] == 0.0
    df.unpersist()
    assert values(materialize(doubled(spark, tmp_path / "in"), ["x"], store))[0] == 2000.0


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with numbers from 0 and from 50 on."""
    for name, start in (("a", 0), ("b", 50)):
        write_numbers(tmp_path / name, start)
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    "condition",
    [
        "x < (select avg(x) from parquet.`{other}`)",
        "x in (select x from parquet.`{other}`)",
        "exists (select 1 from parquet.`{other}` as o where o.x = t.x)",
    ],
)
def test_rows_that_depend_on_files_in_a_subquery_have_no_key(
    spark: SparkSession, folders: tuple[Path, Path], condition: str
) -> None:
    rows, other = folders
    spark.read.parquet(str(rows)).createOrReplaceTempView("t")
    assert shared_key(spark.sql("select x from t where x < 50"), {}) is not None
    assert shared_key(spark.sql(f"select x from t where {condition.format(other=other)}"), {}) is None


@pytest.mark.any_spark_will_do
def test_a_cached_dataframe_joined_with_files_has_no_key(
    spark: SparkSession, folders: tuple[Path, Path]
) -> None:
    cached, other = (spark.read.parquet(str(folder)) for folder in folders)
    cached.cache()
    try:
        assert shared_key(cached.join(other, "x"), {}) is None
    finally:
        cached.unpersist()


@pytest.mark.any_spark_will_do
def test_the_logs_of_all_delta_tables_are_in_the_key(spark: SparkSession, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name / "_delta_log").mkdir(parents=True)
        write_numbers(tmp_path / name, 0)
    df = spark.read.parquet(str(tmp_path / "a")).union(spark.read.parquet(str(tmp_path / "b")))
    before = shared_key(df, {})
    assert before is not None
    (tmp_path / "b" / "_delta_log" / "1.json").write_text("{}")  # as a deletion vector is recorded
    assert shared_key(df, {}) not in (None, before)


@pytest.mark.any_spark_will_do
def test_rows_of_an_rdd_over_files_have_no_key(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("1\n2\n")
    lines = spark.sparkContext.textFile(str(tmp_path / "in.txt")).map(lambda line: (int(line),))
    assert shared_key(spark.createDataFrame(lines, "x int"), {}) is None
    write_numbers(tmp_path / "a", 0)
    df = spark.read.parquet(str(tmp_path / "a"))
    assert shared_key(spark.createDataFrame(df.rdd, df.schema), {}) is None
    clock = spark.sparkContext.parallelize([1, 2]).map(lambda number: (time.time(),))
    assert shared_key(spark.createDataFrame(clock, "x double"), {}) is None
    once = spark.createDataFrame([(1,), (2,)], "x int")
    assert shared_key(once, {}) is not None
    assert (
        shared_key(once.mapInPandas(lambda frames: frames, "x int").localCheckpoint(eager=False), {}) is None
    )


@pytest.mark.slow_elsewhere
def test_fits_at_once_write_the_rows_once(spark: SparkSession, store: Store) -> None:
    df = spark.range(0, 1000, 1, 4).selectExpr("id as x")
    found = in_threads(4, lambda: materialize(df, ["x"], store))
    assert len({dataset.url for dataset in found}) == 1
    assert len(sets_of(store)) == 1
    assert values(found[0]) == [float(number) for number in range(1000)]


def in_threads(count: int, call: Callable[[], ParquetDataset]) -> list[ParquetDataset]:
    results: list[ParquetDataset] = []
    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == count
    return results


@pytest.mark.any_spark_will_do
def test_a_half_written_set_of_the_same_rows_is_not_read(spark: SparkSession, store: Store) -> None:
    df = spark.range(0, 1000, 1, 4).selectExpr("id as x")
    first = materialize(df, ["x"], store)
    # Files without a manifest, as a driver leaves them that was killed before it committed.
    half = f"{store.url}/fit-half"
    shutil.copytree(first.url, half)
    (Path(half) / "_sparkdl_dataset.json").unlink()
    assert materialize(df, ["x"], store) == first
    assert not Path(half).exists()


@pytest.mark.any_spark_will_do
def test_dataset_is_protected_until_its_block_ends_and_kept_only_if_it_can_be_shared(
    spark: SparkSession, store: Store
) -> None:
    df = spark.range(100).selectExpr("id as x")
    with use_materialized(df, ["x"], store) as dataset:
        assert store.cleanup(timedelta(0)) == []
    assert materialize(df, ["x"], store) == dataset
    with use_materialized(df.selectExpr("x + rand() as x"), ["x"], store) as private:
        assert store.cleanup(timedelta(0)) == [dataset.url]
        assert private.num_rows == 100
    assert sets_of(store) == []


@pytest.mark.any_spark_will_do
def test_a_store_that_keeps_nothing_is_empty_after_the_block(spark: SparkSession, tmp_path: Path) -> None:
    store = Store(tmp_path / "store", keep_for=timedelta(0))
    with use_materialized(spark.range(100), ["id"], store) as dataset:
        assert values(dataset, "id")[-1] == 99.0
    assert sets_of(store) == []


@pytest.mark.no_cluster_needed
def test_lasting_key_depends_on_files_and_plan_and_is_none_for_rows_in_memory(
    spark: SparkSession, tmp_path: Path
) -> None:
    """tests/standalone/test_submit.py shows that another application computes the same key."""
    source = ["parquet", str(tmp_path / "rows")]
    write_numbers(tmp_path / "rows", 0)
    key = lasting_key(doubled(spark, tmp_path / "rows"), source)
    assert key is not None
    assert lasting_key(doubled(spark, tmp_path / "rows"), source) == key
    assert lasting_key(doubled(spark, tmp_path / "rows"), ["table", "rows"]) not in (key, None)
    write_numbers(tmp_path / "rows", 1)
    assert lasting_key(doubled(spark, tmp_path / "rows"), source) not in (key, None)
    assert lasting_key(spark.createDataFrame([(1,)], "x int").filter("x > 0"), source) is None
    assert lasting_key(spark.sql("SELECT * FROM VALUES (1), (2) AS rows(x)"), source) is None
    assert lasting_key(spark.range(5).selectExpr("rand() AS x"), source) is None


@pytest.mark.no_cluster_needed
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("SELECT * FROM VALUES (1, 40), (7, 9) AS t(x, y)", "SELECT * FROM VALUES (2, 3), (7, 9) AS t(x, y)"),
        pytest.param(
            "SELECT * FROM VALUES (1, array(40, 1)), (7, array(9, 1)) AS t(x, y)",
            "SELECT * FROM VALUES (2, array(3, 1)), (7, array(9, 1)) AS t(x, y)",
            marks=pytest.mark.slow_elsewhere,
        ),
    ],
)
def test_frames_whose_hashes_collide_are_not_confused(
    spark: SparkSession, store: Store, first: str, second: str
) -> None:
    seen = []
    for query in (first, second):
        spark.sql(query).createOrReplaceTempView("replaced_rows")
        for frame in (spark.sql(query), spark.table("replaced_rows")):
            seen += [values(materialize(frame, ["x", "y"], store))]
    assert seen == [[1.0, 7.0]] * 2 + [[2.0, 7.0]] * 2


@pytest.mark.no_cluster_needed
def test_the_same_object_over_a_replaced_view_gives_the_rows_that_spark_gives(
    spark: SparkSession, store: Store
) -> None:
    spark.range(3).createOrReplaceTempView("today")
    df = spark.table("today").selectExpr("id as x")
    materialize(df, ["x"], store)
    spark.range(5).createOrReplaceTempView("today")
    assert values(materialize(df, ["x"], store)) == sorted(float(row.x) for row in df.collect())


@pytest.mark.no_cluster_needed
@pytest.mark.parametrize(
    ("setting", "before", "after"),
    [
        ("spark.sql.session.timeZone", "Asia/Tokyo", "America/New_York"),
        ("spark.sql.legacy.timeParserPolicy", "LEGACY", "CORRECTED"),
        ("spark.sql.files.ignoreCorruptFiles", "true", "false"),
        ("spark.sql.caseSensitive", "true", "false"),
        ("spark.sql.a.setting.that.sparkdl.does.not.know", "1", "2"),
    ],
)
def test_any_changed_setting_of_the_session_gives_another_key(
    spark: SparkSession, setting: str, before: str, after: str
) -> None:
    df = spark.range(5)
    try:
        keys = []
        for value in (before, after, before):
            spark.conf.set(setting, value)
            keys.append(shared_key(df, {}))
    finally:
        spark.conf.unset(setting)
    assert keys[0] is not None
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.any_spark_will_do
def test_time_parser_policy_is_that_of_each_write(spark: SparkSession, store: Store) -> None:
    name, ansi = "spark.sql.legacy.timeParserPolicy", "spark.sql.ansi.enabled"
    try:
        spark.conf.set(ansi, "false")  # a null, rather than an error, for what cannot be parsed
        texts = spark.createDataFrame([("2020-01-05 XX",)], "t string")
        df = texts.selectExpr("coalesce(unix_timestamp(t, 'yyyy-MM-dd'), -1L) as x")
        spark.conf.set(name, "LEGACY")
        legacy = values(materialize(df, ["x"], store))
        spark.conf.set(name, "CORRECTED")
        assert values(materialize(df, ["x"], store)) == [-1.0]
        assert legacy != [-1.0]
    finally:
        spark.conf.unset(name)
        spark.conf.unset(ansi)


@pytest.mark.no_cluster_needed
def test_other_objects_never_get_the_rows_of_an_earlier_one(spark: SparkSession, store: Store) -> None:
    urls = set()
    for _ in range(5):
        df = spark.range(5)  # takes the memory, and so the id, of the one before
        urls.add(materialize(df, ["id"], store).url)
        del df
    assert len(urls) == 5


@pytest.mark.about_connect
def test_names_that_the_server_looks_up_at_each_call_have_no_key(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    write_numbers(tmp_path / "in", 0)
    df = spark.read.parquet(str(tmp_path / "in"))
    kept = (
        df,
        df.filter(df.x > 3),
        df.withColumn("y", F.col("x") * 2),
        df.selectExpr("x * 2 as y"),
        spark.createDataFrame([(1,)], ["x"]),
    )
    assert all(shared_key(frame, {}) for frame in kept)
    unknown = (
        df.select(F.col("current_date").alias("d")),
        df.selectExpr("current_user as d"),
        df.selectExpr("rand() as d"),
        df.selectExpr("date'today' as d"),
        df.select(F.abs("x")),
        df.filter("x > (select 1)"),
        df.sample(0.5) if spark.version < "4" else df.select(F.uuid()),
        df.union(df),
        spark.sql("select 1 as x"),
        df.mapInPandas(lambda frames: frames, "x bigint"),
    )
    assert [shared_key(frame, {}) for frame in unknown] == [None] * len(unknown)


@pytest.mark.any_spark_will_do
def test_decimals_cast_for_a_fit_are_written_once(spark: SparkSession, store: Store) -> None:
    df = spark.range(5).selectExpr("cast(id as decimal(10, 2)) as x")
    found = []
    for _ in range(2):
        with use_materialized(df.selectExpr("cast(x as double) as x"), ["x"], store, origin=df) as dataset:
            found.append(dataset)
    assert found[0] == found[1]
    assert materialize(df, ["x"], store) != found[0]


@pytest.mark.any_spark_will_do
def test_a_cache_that_is_dropped_leaves_no_old_rows(
    spark: SparkSession, tmp_path: Path, store: Store
) -> None:
    write_numbers(tmp_path / "in", 0)
    df = doubled(spark, tmp_path / "in").cache()
    df.count()
    materialize(df, ["x"], store)
    write_numbers(tmp_path / "in", 1000)
    assert values(materialize(df, ["x"], store))[0] == 0.0
    df.unpersist(blocking=True)
    assert values(materialize(df, ["x"], store))[0] == 2000.0


@pytest.mark.no_cluster_needed
def test_dataframe_of_a_stopped_session_is_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    df = spark.range(5)
    if hasattr(df, "_jdf"):
        monkeypatch.setattr(spark.sparkContext, "_jsc", None)
    else:
        monkeypatch.setattr(spark.client, "_closed", True)
    with pytest.raises(DataError, match="the session of this one was stopped"):
        materialize(df, ["id"], "memory://rows")
