"""Turns what the barrier stage left into the ranks' values, or into the one exception that names the culprit.

Runs on the driver.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from typing import Any

from sparkdl.errors import LaunchError, RankError
from sparkdl.launch.outcome import Failure, find_culprit
from sparkdl.launch.spark_job import SparkJob

SPOOL_BYTES = 64 << 20
"""Results up to this size are assembled in memory, larger ones in a temporary file."""


def collect(
    job: SparkJob, heard: list[Failure], num_ranks: int, on_log: Callable[[int, str], None]
) -> list[Any]:
    """Fetch what the ranks returned, by rank.

    Args:
        job: a job that has ended.
        heard: failures that the driver heard of while the job ran.
        num_ranks: how many values there have to be.
        on_log: gets rank and line of what could not reach the driver before.

    Raises:
        LaunchError: if the ranks could not be started, or were lost with their executors.
        RankError: if a rank failed; ``__cause__`` is its exception.
    """
    outcomes = job.outcomes()
    for rank, kind, num_chunks in outcomes:
        if kind == "log":
            for line in _fetch(job, rank, kind, num_chunks).decode("utf-8", "replace").splitlines():
                on_log(rank, line)
    for rank, kind, num_chunks in outcomes:
        if kind == "refused":
            reason = _fetch(job, rank, kind, num_chunks).decode()
            raise LaunchError(
                f"Driver and executors do not match: {reason}. Install the same versions on both."
            )
    failures = list(heard)
    for rank, kind, num_chunks in outcomes:
        if kind == "failure":
            pickled = next((c for r, k, c in outcomes if (r, k) == (rank, "error")), 0)
            error = _fetch(job, rank, "error", pickled)
            failures.append(Failure.from_json(_fetch(job, rank, kind, num_chunks), pickled=error))
    culprit = find_culprit(_with_pickled(failures))
    if culprit is not None:
        raise _rank_error(culprit) from _original(culprit)
    if job.error is not None:
        raise LaunchError(f"Spark ended the ranks' stage: {job.error}") from job.error
    chunks = {rank: num_chunks for rank, kind, num_chunks in outcomes if kind == "result"}
    if len(chunks) < num_ranks:
        lost = sorted(set(range(num_ranks)) - set(chunks))
        raise LaunchError(
            f"Ranks {lost} were lost with their executors. Look at the executors' logs, then run again."
        )
    return [_load(job, rank, chunks[rank]) for rank in range(num_ranks)]


def _with_pickled(failures: list[Failure]) -> list[Failure]:
    """Put the copy that came through Spark, with its exception, in the place of the one that was heard first."""
    complete = {failure.rank: failure for failure in failures if failure.pickled}
    return [complete.get(failure.rank, failure) for failure in failures]


def _rank_error(failure: Failure) -> RankError:
    detail = f"\n\n{failure.traceback.rstrip()}" if failure.traceback else ""
    message = (
        f"Rank {failure.rank} on {failure.host} failed and all ranks were ended: {failure.error}{detail}"
    )
    return RankError(message, rank=failure.rank, host=failure.host, traceback_text=failure.traceback)


def _original(failure: Failure) -> BaseException | None:
    try:
        error = pickle.loads(failure.pickled)  # noqa: S301 - came through Spark's own authenticated channels
    except Exception:
        return None  # its class cannot be built here; the traceback tells
    return error if isinstance(error, BaseException) else None


def _fetch(job: SparkJob, rank: int, kind: str, num_chunks: int) -> bytes:
    with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as file:
        job.fetch(rank, kind, num_chunks, file)
        file.seek(0)
        return file.read()


def _load(job: SparkJob, rank: int, num_chunks: int) -> Any:
    with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as file:
        job.fetch(rank, "result", num_chunks, file)
        file.seek(0)
        return pickle.load(file)  # noqa: S301 - likewise
