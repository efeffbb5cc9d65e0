"""Spark jobs that fail because of files or of the executors' Python: short errors instead of Java traces."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from sparkdl.data import Store, materialize, use_materialized
from sparkdl.errors import (
    ClusterLostError,
    CorruptFileError,
    DataError,
    ExecutorsLostError,
    FileVanishedError,
    LaunchCancelledError,
    LaunchError,
    SparkJobError,
    StoreError,
)
from sparkdl.estimators import TorchRegressor
from sparkdl.estimators.fit.labels import stored_values
from sparkdl.launch import run_on_ranks
from sparkdl.spark.failures import spark_failures_named
from tests.processes import wait_until_gone
from tests.spark.launch.rank_functions import sum_of_ranks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONGEST_MESSAGE = 700


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A folder of two files. The second has a page in column ``pair`` that cannot be decompressed."""
    folder = tmp_path / "rows with space"
    folder.mkdir()
    table = pa.table(
        {"x": range(1000), "y": [0.5] * 1000, "pair": [[float(i), -float(i)] for i in range(1000)]}
    )
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(table, folder / name, row_group_size=500, use_dictionary=False)
    spoil(folder / "b.parquet", row_group=1, column=2)
    return folder


def spoil(path: Path, *, row_group: int, column: int) -> None:
    """Overwrite the end of a column chunk, like a disk fault: the file looks unchanged."""
    chunk, times = pq.read_metadata(path).row_group(row_group).column(column), path.stat()
    content = bytearray(path.read_bytes())
    end = chunk.data_page_offset + chunk.total_compressed_size
    spoiled = min(1000, chunk.total_compressed_size)
    content[end - spoiled : end] = b"\xff" * spoiled
    path.write_bytes(bytes(content))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.slow_elsewhere
@pytest.mark.skipif(pyspark.__version__ < "4", reason="Spark 3.5 does not name the file")
def test_a_damaged_file_is_named_whether_rows_are_read_in_place_or_copied(
    spark: SparkSession, damaged: Path, store: Store
) -> None:
    df = spark.read.parquet(str(damaged))
    for rows in (df, df.where("x >= 0")):
        with pytest.raises(CorruptFileError, match=r"/b\.parquet, row group 1, column 'pair'") as caught:
            materialize(rows, ["x", "pair"], store)
        assert len(str(caught.value)) < LONGEST_MESSAGE
        assert caught.value.__cause__ is not None, "what Spark said is kept"
    dataset = materialize(df, ["x", "y"], store)
    assert dataset.num_rows == 2000, "columns that are not damaged can be read"


@pytest.mark.any_spark_will_do
def test_a_file_that_vanished_under_spark_is_an_error_of_its_own(
    spark: SparkSession, damaged: Path, store: Store
) -> None:
    df = spark.read.parquet(str(damaged)).where("x >= 0")
    (damaged / "b.parquet").unlink()
    with pytest.raises(FileVanishedError, match=r"/b\.parquet.* no longer there"):
        materialize(df, ["x"], store)


@pytest.mark.any_spark_will_do
def test_spark_error_about_a_file_that_the_driver_cannot_read_is_one_line(
    spark: SparkSession,
) -> None:
    java = "\n".join(
        [
            "An error occurred: org.apache.spark.SparkException: [FAILED_READ_FILE.{hint}] Encountered error while "
            "reading file nosuch://there/a%20b.parquet. SQLSTATE: KD001",
            *["\tat org.apache.spark.Something"] * 100,
            "Caused by: java.lang.RuntimeException: java.io.IOException: {cause}",
        ]
    )
    for hint, cause, error in (
        ("CANNOT_READ_FILE_FOOTER", "no footer", CorruptFileError),
        ("NO_HINT", "the wire is cut", DataError),
    ):
        with pytest.raises(error) as caught, spark_failures_named(spark):
            raise RuntimeError(java.format(hint=hint, cause=cause))
        assert type(caught.value) is error
        assert str(caught.value).startswith(f"Spark cannot read nosuch://there/a b.parquet: {cause}. ")
        assert len(str(caught.value)) < LONGEST_MESSAGE


@pytest.mark.any_spark_will_do
def test_labels_of_a_damaged_file_are_an_error_with_file_row_group_and_column(
    spark: SparkSession, damaged: Path, store: Store
) -> None:
    dataset = materialize(spark.read.parquet(str(damaged)), ["x", "y"], store)
    assert sum(map(len, stored_values(dataset, "y"))) == 2000
    spoil(damaged / "b.parquet", row_group=0, column=1)
    with pytest.raises(CorruptFileError, match=r"b\.parquet, row group 0, column 'y' failed"):
        list(stored_values(dataset, "y"))


@pytest.mark.any_spark_will_do
@pytest.mark.usefixtures("bare_python")
def test_a_python_of_the_executors_without_sparkdl_is_named_with_the_setting(
    spark: SparkSession, store: Store
) -> None:
    for start in (
        lambda: materialize(spark.range(10).selectExpr("id + 1 as x"), ["x"], store),
        lambda: run_on_ranks(sum_of_ranks, num_ranks=2, spark=spark),
    ):
        with pytest.raises(
            LaunchError, match=r"runs '.*/bare-python' on the executors, which has no module .*PYSPARK_PYTHON"
        ) as caught:
            start()
        assert len(str(caught.value)) < LONGEST_MESSAGE
    assert not list(Path(store.url).glob("fit-*"))


def _note_process(partition: int, folder: str) -> None:
    Path(folder, f"writer-{partition}.pid").write_text(str(os.getpid()))


@pytest.mark.slow_elsewhere
@pytest.mark.no_cluster_needed
def test_python_worker_killed_while_rows_are_written_is_named_and_leaves_no_files(
    spark: SparkSession, tmp_path: Path, store: Store
) -> None:
    folder, stores = str(tmp_path), str(tmp_path / "store")

    def rows_of_a_killed_worker(batches: Any) -> Any:
        from pyspark import TaskContext

        if TaskContext.get().partitionId() == 1:
            # The other worker is waiting by now.
            while not Path(folder, "reader-0.pid").exists():
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        # The worker that writes this partition may not have begun: Spark 3.5 starts it with the first rows.
        Path(folder, "reader-0.pid").write_text(str(os.getpid()))
        # Yield rows only after the driver has removed the partial dataset, unless Spark ends this task before.
        while list(Path(stores).glob("fit-*")):
            threading.Event().wait(0.01)
        yield from batches

    rows = spark.range(0, 1000, 1, 2).mapInArrow(rows_of_a_killed_worker, "id long")
    note = partial(_note_process, folder=folder)
    with (
        pytest.raises(
            ExecutorsLostError, match=r"^sparkdl use_materialized: writing rows: .*Task 1 .*local\[N, 4\]"
        ) as caught,
        use_materialized(rows, ["id"], store, in_tasks=note),
    ):
        pass
    assert len(str(caught.value)) < LONGEST_MESSAGE
    assert type(caught.value.__cause__).__name__ in ("Py4JJavaError", "SparkException")
    assert wait_until_gone([int(file.read_text()) for file in tmp_path.glob("*-0.pid")]) == []
    assert not list(Path(stores).glob("fit-*"))
    assert materialize(spark.range(10).selectExpr("id + 1 as x"), ["x"], store).num_rows == 10


@pytest.mark.about_executors
def test_rows_are_written_once_although_a_python_worker_was_killed(
    spark: SparkSession, tmp_path: Path, store: Store
) -> None:
    killed = str(tmp_path / "killed")

    def rows_of_a_worker_killed_once(batches: Any) -> Any:
        for batch in batches:
            yield batch  # the file has been begun
            if not os.path.exists(killed):
                Path(killed).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    rows = spark.range(0, 100_000, 1, 1).mapInArrow(rows_of_a_worker_killed_once, "id long")
    dataset = materialize(rows, ["id"], store, row_group_bytes=1 << 12)
    assert os.path.exists(killed)
    assert dataset.num_rows == 100_000
    (folder,) = Path(store.url).glob("fit-*")
    assert len(list(folder.glob("*.parquet"))) == 1, "nothing of the attempt that was killed"


@pytest.mark.any_spark_will_do
def test_py4j_and_grpc_errors_of_a_job_are_replaced_by_errors_of_sparkdl(spark: SparkSession) -> None:
    from pyspark.errors import ArithmeticException
    from pyspark.errors.exceptions import connect
    from pyspark.sql import functions as F

    for words, error in (
        ("Job aborted: ExecutorLostFailure (executor 1 exited caused by one of them)", ExecutorsLostError),
        ("Job 7 cancelled part of cancelled job group mine", LaunchCancelledError),
        ("Job 7 cancelled because SparkContext was shut down", ClusterLostError),
        ("org.apache.spark.SparkException: Job aborted: java.io.IOException: no route", SparkJobError),
    ):
        with (
            pytest.raises(error) as caught,
            spark_failures_named(spark, doing="sparkdl fit Net: writing rows"),
        ):
            # SparkException came with Spark 4.0.
            raise getattr(connect, "SparkException", connect.SparkConnectGrpcException)(words)
        assert type(caught.value) is error
        assert str(caught.value).startswith("sparkdl fit Net: writing rows: ")
        assert caught.value.__cause__ is not None
    assert "the Spark job failed: Job aborted: no route. " in str(caught.value)
    # A condition raised by the user's query has its own exception class, which says what to do. Spark 3.5 hides the
    # class of what a task raises.
    own = ArithmeticException if spark.version >= "4" else SparkJobError
    ansi = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", "true")  # the default of Spark 4
    try:
        with pytest.raises(own, match="CAST_OVERFLOW"), spark_failures_named(spark):
            spark.range(1).select(F.expr("cast(300 + id as tinyint)")).collect()
    finally:
        spark.conf.set("spark.sql.ansi.enabled", ansi)


def test_fit_on_parquet_names_tables_with_logs_and_missing_connectors(
    spark: SparkSession, tmp_path: Path
) -> None:
    estimator = TorchRegressor(featuresCol=["x"], labelCol="y")
    spark.range(4).selectExpr("id AS x", "id AS y").write.parquet(str(tmp_path / "table"))
    (tmp_path / "table" / "_delta_log").mkdir()
    with pytest.raises(DataError, match="is a Delta table"):
        estimator.fit_on_parquet(tmp_path / "table")
    with pytest.raises(StoreError, match=r"lacks Hadoop's connector .*spark\.jars\.packages") as caught:
        estimator.fit_on_parquet("gs://bucket/rows")
    assert "com.google.cloud.bigdataoss:gcs-connector" in str(caught.value)
    assert len(str(caught.value)) < LONGEST_MESSAGE
