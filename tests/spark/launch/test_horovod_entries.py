"""``horovod.spark`` with its import changed, on the active session."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

import sparkdl.horovod.spark
from sparkdl.errors import ParamError
from tests.runner import horovod_examples as examples

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.mark.slow_elsewhere
def test_horovod_spark_run_returns_the_value_of_each_rank(spark: SparkSession) -> None:
    out = io.StringIO()
    values = sparkdl.horovod.spark.run(
        examples.fn, args=(42,), num_proc=2, env={"GREETING": "hello"}, stdout=out, verbose=2, use_mpi=False
    )
    assert values == [(0, 2, "hello"), (1, 2, "hello")]
    assert sorted(out.getvalue().splitlines()) == [
        f"[{rank}]<stdout>:Hello, rank = {rank}, size = 2, magic_number = 42" for rank in (0, 1)
    ]


@pytest.mark.any_spark_will_do
def test_horovod_spark_runs_as_many_ranks_as_sparks_default_parallelism(spark: SparkSession) -> None:
    size = spark.sparkContext.defaultParallelism
    assert [value[:2] for value in sparkdl.horovod.spark.run(examples.fn, (1,))] == [
        (rank, size) for rank in range(size)
    ]


@pytest.mark.slow_elsewhere
def test_horovod_spark_run_elastic_continues_after_a_killed_rank(spark: SparkSession, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    values = sparkdl.horovod.spark.run_elastic(
        examples.train_elastically, args=(str(marker),), num_proc=2, min_num_proc=1, max_num_proc=2
    )
    assert marker.exists()
    assert values[0] == values[-1]
    sizes, _ = values[0]
    assert sizes[:4] == [2, 2, 2, 1]
    assert len(sizes) >= 12  # an epoch that was committed and interrupted is repeated, as it is written


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("run", {"nics": ["eth0"]}, r"does not take nics=\['eth0'\]. Set SPARKDL_LISTEN"),
        ("run", {"extra_mpi_args": "--x"}, "no mpirun"),
        ("run_elastic", {"reset_limit": 3}, "max_restarts"),
        ("run_elastic", {"num_proc": 2, "min_np": 3}, "between min_num_proc=3 and max_num_proc=2"),
    ],
)
def test_arguments_without_a_meaning_here_are_refused(
    spark: SparkSession, function: str, arguments: dict, message: str
) -> None:
    with pytest.raises(ParamError, match=message):
        getattr(sparkdl.horovod.spark, function)(examples.fn, (1,), **arguments)
