"""``make_spark_converter`` from a real Spark session."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from sparkdl.data import Column, Store, make_spark_converter, materialize, open_dataset, use_materialized
from sparkdl.data.dataset.footers import list_parquet_files
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import DataError, ParamError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONF = "petastorm.spark.converter.parentCacheDirUrl"


@pytest.mark.slow_elsewhere
def test_a_dataframe_becomes_batches_of_tensors_and_is_deleted_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = spark.range(50).selectExpr(
        "id", "id / 2 as half", "array(array(id / 4, 1.5d)) as grid", "cast(id as float) as narrow"
    )
    spark.conf.set(CONF, f"file://{tmp_path}")
    try:
        converter = make_spark_converter(df)
    finally:
        spark.conf.unset(CONF)
    with converter:
        assert converter.cache_dir_url.startswith(f"file://{tmp_path}/")
        assert all(Path(url.removeprefix("file://")).is_file() for url in converter.file_urls)
        assert len(converter) == 50
        assert [(column.name, column.dtype, column.shape) for column in converter.dataset.columns] == [
            ("id", "int64", ()),
            ("half", "float32", ()),
            ("grid", "float32", (1, 2)),
            ("narrow", "float32", ()),
        ]
        with converter.make_torch_dataloader(batch_size=20, num_epochs=1) as loader:
            batches = list(loader)
        rows = torch.cat([batch["id"] for batch in batches])
        assert rows.sort().values.tolist() == list(range(50))
        assert torch.equal(torch.cat([batch["half"] for batch in batches]), rows.float() / 2)
        assert torch.equal(torch.cat([batch["grid"] for batch in batches])[:, 0, 0], rows.float() / 4)
    converter.delete()
    assert not any(Path(url.removeprefix("file://")).exists() for url in converter.file_urls)


@pytest.mark.any_spark_will_do
def test_dtype_none_leaves_numbers_as_they_are_and_float64_widens_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = spark.range(4).selectExpr("id / 2 as wide", "cast(id as float) as narrow")
    for dtype, expected in ((None, ["float64", "float32"]), ("float64", ["float64", "float64"])):
        with make_spark_converter(df, tmp_path, dtype=dtype) as converter:
            assert converter.dataset.columns == tuple(
                Column(name=name, dtype=dtype)
                for name, dtype in zip(("wide", "narrow"), expected, strict=True)
            )


@pytest.mark.any_spark_will_do
def test_plain_read_of_parquet_is_used_in_place_and_not_deleted(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(7).write.parquet(f"{tmp_path}/theirs")
    with make_spark_converter(spark.read.parquet(f"{tmp_path}/theirs"), tmp_path / "store") as converter:
        assert converter.cache_dir_url == f"file://{tmp_path}/theirs"
    assert spark.read.parquet(f"{tmp_path}/theirs").count() == 7


@pytest.mark.any_spark_will_do
def test_invalid_dtype_and_empty_dataframe_are_errors_at_once(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ParamError, match="dtype must be 'float32', 'float64' or None, got 'float16'"):
        make_spark_converter(spark.range(3), tmp_path, dtype="float16")
    with pytest.raises(DataError, match="no rows"):
        make_spark_converter(spark.range(0), tmp_path)


@pytest.mark.any_spark_will_do
def test_rows_of_a_converter_are_kept_until_its_own_delete(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(9).selectExpr("id * 2 as x")
    store = Store(f"file://{tmp_path}/store")
    first, second = (make_spark_converter(df, store.url) for _ in range(2))
    assert first == second
    on_rank = pickle.loads(pickle.dumps(second))
    for goes in (first.delete, on_rank.delete, lambda: store.cleanup(timedelta(0))):
        goes()
        assert list_parquet_files(open_location(second.dataset.url))
    second.delete()
    assert not Path(second.cache_dir_url.removeprefix("file://")).exists()


@pytest.mark.any_spark_will_do
def test_dataset_of_another_store_is_read_in_place_and_not_deleted(
    spark: SparkSession, tmp_path: Path
) -> None:
    theirs = Store(f"file://{tmp_path}/store")
    original = materialize(spark.range(9).selectExpr("id * 2 as x"), ["x"], theirs)
    df = spark.read.parquet(original.url)
    with make_spark_converter(df, theirs.url) as converter:
        assert open_location(converter.dataset.url).path == open_location(original.url).path
        assert theirs.cleanup(timedelta(0)) == []
    with use_materialized(df, ["x"], Store(tmp_path / "ours", keep_for=timedelta(0))) as dataset:
        assert open_location(dataset.url).path == open_location(original.url).path
        assert theirs.cleanup(timedelta(0)) == []
    assert open_dataset(original.url) == original
    assert theirs.cleanup(timedelta(0)) == [original.url]
