"""How Spark's UI shows the jobs of sparkdl, and that the user's own job names remain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl import Runner
from sparkdl.data import materialize
from sparkdl.doctor.cluster_facts import look_at_executors
from sparkdl.errors import LaunchCancelledError
from sparkdl.launch import run_on_ranks
from sparkdl.spark.jobs import DESCRIPTION, GROUP, spark_job
from tests.spark.estimators.estimator_examples import make_estimator
from tests.spark.launch import rank_functions as functions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ToldJobs:
    """The jobs that a classic session has run since this object was made, as Spark's UI shows them."""

    def __init__(self, spark: SparkSession) -> None:
        self._context: Any = spark.sparkContext
        self._known = self._all().keys()

    def names(self) -> list[tuple[str | None, str | None]]:
        """Description and job group of each job, in order, without repetitions."""
        told = [job for number, job in sorted(self._all().items()) if number not in self._known]
        return list(dict.fromkeys(told))

    def _all(self) -> dict[int, tuple[str | None, str | None]]:
        context = self._context._jsc.sc()
        context.listenerBus().waitUntilEmpty(60_000)
        jobs = context.statusStore().jobsList(None)
        found = [jobs.apply(index) for index in range(jobs.size())]
        return {job.jobId(): (_or_none(job.description()), _or_none(job.jobGroup())) for job in found}


def _or_none(option: Any) -> str | None:
    return option.get() if option.isDefined() else None


@pytest.fixture
def properties(spark: SparkSession) -> Iterator[Any]:
    """A function that reads the local properties of this thread that name jobs; both are unset at first."""
    context = spark.sparkContext

    def read() -> tuple[str | None, str | None]:
        return context.getLocalProperty(DESCRIPTION), context.getLocalProperty(GROUP)

    assert read() == (None, None)
    yield read
    for name in (DESCRIPTION, GROUP, "spark.job.interruptOnCancel"):
        context.setLocalProperty(name, None)


@pytest.mark.any_spark_will_do
def test_jobs_of_a_fit_are_described_with_the_epoch_and_share_one_job_group(
    spark: SparkSession, frame: DataFrame, properties: Any, tmp_path: Path
) -> None:
    told = ToldJobs(spark)
    make_estimator(tmp_path, epochs=2).fit(frame)
    names = told.names()
    groups = {group for _, group in names}
    assert len(groups) == 1
    assert str(groups.pop()).startswith("sparkdl-")
    written, trained, fetched = [description for description, _ in names]
    assert written == "sparkdl fit TorchEstimator: writing rows"
    assert re.fullmatch(
        r"sparkdl fit TorchEstimator: training, 2 ranks \| epoch 2/2, loss [\d.]+", str(trained)
    )
    assert fetched == "sparkdl fit TorchEstimator: training, fetching results of 2 ranks"
    assert properties() == (None, None), "the user's thread has what it had"


@pytest.mark.any_spark_will_do
def test_users_job_group_is_kept_and_their_description_restored(
    spark: SparkSession, properties: Any, tmp_path: Path
) -> None:
    told = ToldJobs(spark)
    spark.sparkContext.setJobGroup("of the user", "an experiment")
    materialize(spark.range(10).selectExpr("id + 1 as x"), ["x"], str(tmp_path / "store"))
    assert told.names() == [("sparkdl materialize: writing rows", "of the user")]
    assert properties() == ("an experiment", "of the user")
    with pytest.raises(ZeroDivisionError), spark_job(spark, "dividing"):
        raise ZeroDivisionError
    assert properties() == ("an experiment", "of the user")


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_every_kind_of_job_has_the_job_group_of_the_user(
    spark: SparkSession, properties: Any, tmp_path: Path
) -> None:
    told = ToldJobs(spark)
    spark.sparkContext.setJobGroup("of the user", "an experiment")
    Runner(num_workers=1, spark=spark).run(functions_of_runner)
    materialize(spark.range(10).selectExpr("id + 1 as x"), ["x"], str(tmp_path / "store"))
    look_at_executors(spark, 1, timeout_s=60)
    assert told.names() == [
        ("sparkdl run functions_of_runner: 1 rank", "of the user"),
        ("sparkdl run functions_of_runner: fetching results of 1 rank", "of the user"),
        ("sparkdl materialize: writing rows", "of the user"),
        ("sparkdl looking at the executors", "of the user"),
    ]
    assert properties() == ("an experiment", "of the user")


def functions_of_runner() -> None:
    """Do nothing on a rank."""


@pytest.mark.about_connect
def test_jobs_on_spark_connect_have_their_description_as_a_tag(spark: SparkSession, tmp_path: Path) -> None:
    import threading

    spark.addTag("of-the-user")
    cancelled: list[str] = []

    def cancel() -> None:
        cancelled.extend(spark.interruptTag("sparkdl run hang: 2 ranks"))

    def hear(rank: int, event: dict[str, Any]) -> None:
        threading.Thread(target=cancel).start()

    try:
        with pytest.raises(LaunchCancelledError):
            run_on_ranks(functions.hang, str(tmp_path), num_ranks=2, spark=spark, on_event=hear)
        assert spark.getTags() == {"of-the-user"}
    finally:
        spark.clearTags()
    assert cancelled
