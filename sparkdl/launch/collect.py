"""Converts the rows of the barrier stage to the ranks' values, or to the one exception that names the failed rank.

Runs on the driver.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from sparkdl.data.spark.executor_python import executor_python_problem
from sparkdl.data.spark.spark_errors import has_application_ended, spark_words, were_executors_lost
from sparkdl.errors import (
    ClusterLostError,
    ExecutorsLostError,
    LaunchCancelledError,
    LaunchError,
    RankDiedError,
    RankError,
    SparkdlError,
)
from sparkdl.launch.hangs.report import raise_hang
from sparkdl.launch.hangs.watch import HangLimits
from sparkdl.launch.spark_job import SparkJob
from sparkdl.launch.wire.messages import unpack_error
from sparkdl.launch.wire.outcome import Failure, find_culprit, were_ranks_lost

SPOOL_BYTES = 64 << 20
"""Results up to this size are assembled in memory, larger ones in a temporary file."""


def collect(
    job: SparkJob,
    received: list[Failure],
    num_ranks: int,
    on_log: Callable[[int, str], None],
    limits: HangLimits,
) -> list[Any]:
    """Fetch the ranks' values, by rank.

    Args:
        job: a job that has ended, or was cancelled.
        received: failures that the driver received while the job ran.
        num_ranks: how many values there have to be.
        on_log: called with rank and line for lines that could not reach the driver before.
        limits: after which times a rank counts as hanging.

    Raises:
        LaunchError: if the ranks could not be started, or were lost with their executors.
        LaunchCancelledError: if the stage was cancelled in Spark.
        ClusterLostError: if Spark's application ended.
        RankError: if a rank failed; ``__cause__`` is its exception, with the causes of that.
        HangError: if the tasks found that a rank hangs.
    """
    try:
        rows = _Rows(job)
        for rank in rows.ranks("log"):
            for line in rows.read("log", rank).decode("utf-8", "replace").splitlines():
                on_log(rank, line)
        for rank in rows.ranks("refused"):
            reason = rows.read("refused", rank).decode()
            raise LaunchError(
                f"Driver and executors do not match: {reason}. Install the same versions on both."
            )
        returned = rows.ranks("result")
        missing = sorted(set(range(num_ranks)) - set(returned))
        if not missing:
            return [rows.load(rank) for rank in range(num_ranks)]
        failures = received + [
            Failure.from_json(rows.read("failure", rank), pickled=rows.read("error", rank))
            for rank in rows.ranks("failure")
        ]
        _raise_for(failures, job.error, job, limits, were_ranks_lost(failures, returned, num_ranks))
        raise ExecutorsLostError(
            f"Ranks {missing} were lost with their executors. Look at the executors' logs, then run again."
        )
    except SparkdlError:
        raise
    except Exception as error:
        if _is_spark_error(error):
            _raise_for(received, error, job, limits, were_ranks_lost(received, (), num_ranks))
        raise


def _raise_for(
    failures: list[Failure],
    spark_error: Exception | None,
    job: SparkJob,
    limits: HangLimits,
    were_lost: bool,
) -> None:
    culprit = find_culprit(_with_pickled(failures))
    if culprit is not None and culprit.is_consequence:
        raise_hang(failures, limits)
    # Tasks that Spark cancels on request are reported as lost, too.
    if culprit is None or culprit.is_loss or culprit.is_consequence:
        if job.was_cancelled_elsewhere(spark_error):
            raise LaunchCancelledError(
                f"The ranks' stage was cancelled in Spark, and all ranks were ended: {spark_words(spark_error)}"
            ) from spark_error
        if has_application_ended(spark_error, job.spark):
            raise ClusterLostError(
                "Spark's application ended while the ranks ran: its cluster went away, or it was stopped. "
                f"{spark_words(spark_error)}"
            ) from spark_error
    if culprit is not None:
        raise rank_error(culprit, were_lost, _stuck(failures)) from (
            unpack_error(culprit.pickled) or spark_error
        )
    if spark_error is not None:
        problem = executor_python_problem(spark_error, job.spark)
        if problem:
            raise LaunchError(problem) from spark_error
        kind = ExecutorsLostError if were_executors_lost(spark_error) else LaunchError
        raise kind(f"Spark ended the ranks' stage: {spark_error}") from spark_error


def _stuck(failures: list[Failure]) -> str:
    """Where ranks were that did not end after another one had failed, by their stacks."""
    stacks = {failure.rank: failure for failure in failures if failure.stack}
    return "".join(
        f"\n\nRank {rank} on {stuck.host} did not end by itself, and was here:\n{stuck.stack}"
        for rank, stuck in sorted(stacks.items())
    )


def _is_spark_error(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc")


class _Rows:
    """The rows that the tasks yielded, by kind and rank."""

    def __init__(self, job: SparkJob) -> None:
        self._job = job
        self._num_chunks = {(kind, rank): num_chunks for rank, kind, num_chunks in job.outcomes()}

    def ranks(self, kind: str) -> list[int]:
        return sorted(rank for other, rank in self._num_chunks if other == kind)

    def read(self, kind: str, rank: int) -> bytes:
        with self._fetched(kind, rank) as file:
            return file.read()

    def load(self, rank: int) -> Any:
        with self._fetched("result", rank) as file:
            return pickle.load(file)  # noqa: S301 - came through Spark's own authenticated channels

    @contextmanager
    def _fetched(self, kind: str, rank: int) -> Iterator[IO[bytes]]:
        with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as file:
            self._job.fetch(rank, kind, self._num_chunks.get((kind, rank), 0), file)
            file.seek(0)
            yield file


def _with_pickled(failures: list[Failure]) -> list[Failure]:
    """Replace failures that came through the channel by those that came through Spark, which have the exception."""
    complete = {failure.rank: failure for failure in failures if failure.pickled}
    return [complete.get(failure.rank, failure) for failure in failures]


def rank_error(failure: Failure, were_lost: bool, stuck: str = "") -> RankError:
    """Make the exception that names the failed rank.

    Args:
        failure: the failure to report.
        were_lost: whether a rank was lost, if the failure is a consequence.
        stuck: where other ranks were that did not end by themselves.
    """
    detail = f"\n\n{failure.traceback.rstrip()}" if failure.traceback else ""
    message = (
        f"Rank {failure.rank} on {failure.host} failed and all ranks were ended: {failure.error}{detail}"
        f"{stuck if failure.is_consequence else ''}"
    )
    kind = RankDiedError if failure.is_loss or (failure.is_consequence and were_lost) else RankError
    return kind(message, rank=failure.rank, host=failure.host, traceback_text=failure.traceback)
