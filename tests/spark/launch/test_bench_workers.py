"""The Python workers of the contenders of ``sparkdl bench transform``, on a real session."""

from __future__ import annotations

import os

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.bench import transform


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_contenders_have_workers_of_their_own(spark: SparkSession) -> None:
    rows = spark.range(0, 4, 1, 2)

    def of_process() -> DataFrame:
        return rows.withColumn("pid", F.udf(lambda _: os.getpid(), "long")("id"))

    ours, other = (transform.in_own_workers(spark, name, of_process) for name in ("ours", "other"))
    pids = [{row["pid"] for row in frame.collect()} for frame in (ours, other, ours, other)]
    assert not (pids[0] | pids[2]) & (pids[1] | pids[3])
    assert not any("SPARKDL_BENCH" in name for name in spark.sparkContext.environment)
