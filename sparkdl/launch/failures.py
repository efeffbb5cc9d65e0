"""Chooses which of the ranks' failures to report when a launch has failed, and raises the exception for it.

One failed rank makes the others fail. The failure that began on its own rank is reported, not the failures that it
caused on other ranks.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import sysconfig
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from pathlib import Path

from sparkdl.collective.error_origin import Origin
from sparkdl.errors import (
    ClusterLostError,
    LaunchCancelledError,
    LaunchError,
    LinkLostError,
    RankDiedError,
    RankError,
    SparkdlError,
    count_of,
)
from sparkdl.launch.hangs.hang_error import raise_hang
from sparkdl.launch.stage import Stage
from sparkdl.launch.wire.outcome import Failure
from sparkdl.launch.wire.spec import HangLimits
from sparkdl.spark.failures import explain_job
from sparkdl.spark.jobs import purpose_of_jobs


def raise_for_failures(
    failures: list[Failure],
    spark_error: Exception | None,
    job: Stage,
    limits: HangLimits,
    returned: Collection[int] = (),
) -> None:
    """Raise the exception that says why a launch failed; return if no failure is known.

    Args:
        failures: failures of ranks, in the order in which they were received.
        spark_error: exception that ended the tasks, such as Spark's; None without one.
        job: the tasks that ran the ranks.
        limits: times after which a rank counts as hanging.
        returned: ranks whose function is known to have returned.

    Raises:
        LaunchError: if Spark ended the stage; see :func:`~sparkdl.spark.failures.explain_job`.
        RankError: if a rank failed; ``__cause__`` is its exception.
        LinkLostError: if a connection between ranks was cut.
        HangError: if the tasks found that a rank hangs.
    """
    culprit = find_culprit(_with_pickled(failures))
    if culprit is not None and culprit.is_consequence:
        raise_hang(failures, limits)
    if isinstance(spark_error, SparkdlError) and (culprit is None or culprit.is_consequence):
        raise spark_error  # a task that could not start its rank took the others with it
    has_raised = culprit is not None and not (culprit.is_loss or culprit.is_consequence)
    if spark_error is not None and job.spark is not None and not has_raised:
        doing = f"{purpose_of_jobs()}: {count_of(job.num_ranks, 'rank')}"
        explained = explain_job(spark_error, job.spark, doing)
        if isinstance(explained, LaunchCancelledError) and job.was_cancelled_here:
            explained = None
        # Tasks that Spark cancels on request are reported as lost, too.
        is_why_lost = isinstance(explained, (LaunchCancelledError, ClusterLostError))
        if explained is not None and (culprit is None or is_why_lost):
            raise explained from spark_error
    if culprit is not None:
        were_lost = were_ranks_lost(failures, returned, job.num_ranks)
        error = link_error(failures, job.num_ranks) or rank_error(culprit, were_lost, _stuck(failures))
        raise error from culprit.exception or spark_error
    if spark_error is not None and job.spark is None:
        raise LaunchError(
            f"A task of the ranks ended with {type(spark_error).__name__}: {spark_error}"
        ) from spark_error
    if spark_error is not None:
        raise LaunchError(f"Spark ended the ranks' stage: {spark_error}") from spark_error


def find_culprit(failures: Iterable[Failure]) -> Failure | None:
    """Choose the failure to report.

    This is the first failure that began on its own rank; otherwise the first one that all ranks share; otherwise the
    first consequence.
    """
    ordered = list(failures)
    causes = [failure for failure in ordered if not failure.is_consequence]
    by_itself = [failure for failure in causes if failure.origin != Origin.SHARED.value]
    return next(iter([*by_itself, *causes, *ordered]), None)


def were_ranks_lost(failures: Sequence[Failure], returned: Collection[int], num_ranks: int) -> bool:
    """Whether a rank was lost in a launch in which all known failures are consequences of others.

    No rank was lost if every rank has reported how it ended, and no rank has reported that another one was missing. In
    that case the function itself made a rank leave or close the communicator while others needed it, and a restart
    would repeat that.

    Args:
        failures: failures of the ranks that failed.
        returned: ranks whose function returned.
        num_ranks: number of ranks of the launch.
    """
    reported = {failure.rank for failure in failures} | set(returned)
    origins = {failure.origin for failure in failures}
    return (
        len(reported) < num_ranks
        or any(failure.is_loss for failure in failures)
        or Origin.LOST.value in origins
        # If a rank has returned, the others waited for it and it did not take part.
        or (Origin.LATE.value in origins and not returned)
    )


def link_error(failures: Sequence[Failure], num_ranks: int) -> LinkLostError | None:
    """Make the exception for a connection that was cut between living ranks; None if that is not what happened.

    Every rank has then reported a consequence of another rank's failure, and some of them that a rank was lost: no
    process ended and no code raised.

    Args:
        failures: failures of the ranks that failed, in the order in which they were received.
        num_ranks: number of ranks of the launch.
    """
    accusing = [failure for failure in failures if failure.origin == Origin.LOST.value]
    are_alive = all(failure.is_consequence and not failure.is_loss for failure in failures)
    if not accusing or not are_alive or len({failure.rank for failure in failures}) < num_ranks:
        return None
    first = accusing[0]
    views = [
        f"rank {failure.rank} on {failure.host} reported: {failure.error}"
        for failure in accusing[:_MAX_VIEWS]
    ]
    more = f"; {len(accusing) - _MAX_VIEWS} more ranks likewise" if len(accusing) > _MAX_VIEWS else ""
    return LinkLostError(
        f"A connection between ranks was cut while the processes of all ranks ran, and all ranks were ended: "
        f"{'; '.join(views)}{more}. Look at the network between these ranks.\n\n{first.traceback.rstrip()}",
        rank=first.rank,
        host=first.host,
        traceback_text=first.traceback,
    )


_MAX_VIEWS = 4


def rank_error(failure: Failure, were_lost: bool, stuck: str = "") -> RankError:
    """Make the exception that names the failed rank.

    Args:
        failure: the failure to report.
        were_lost: whether a rank was lost, if the failure is a consequence.
        stuck: text with the stacks of other ranks that did not end by themselves; empty if there are none.
    """
    traceback = _with_known_lines(failure.traceback)
    detail = f"\n\n{traceback.rstrip()}" if traceback else ""
    message = (
        f"Rank {failure.rank} on {failure.host} failed and all ranks were ended: {failure.error}"
        f"{_about_missing_module(failure.exception)}{detail}{stuck if failure.is_consequence else ''}"
    )
    kind = RankDiedError if failure.is_loss or (failure.is_consequence and were_lost) else RankError
    return kind(message, rank=failure.rank, host=failure.host, traceback_text=traceback)


def renumber_rank(error: RankError, rank: int) -> RankError:
    """Return the error with another number for its rank: launches within an elastic launch count their own ranks."""
    renumbered = copy(error)
    renumbered.args = (str(error).replace(f"Rank {error.rank} ", f"Rank {rank} ", 1),)
    renumbered.rank, renumbered.__cause__ = rank, error.__cause__
    return renumbered


def _with_known_lines(traceback: str) -> str:
    """Return a traceback with the lines of source that only this process has, such as those of a notebook's cells."""

    def with_line(frame: re.Match[str]) -> str:
        line = linecache.getline(frame["file"], int(frame["line"])).strip()
        return f"{frame[0]}{_BEFORE_LINE[bool(frame['between'])]}{line}" if line else frame[0]

    traceback = _LINE_OF_USER.sub(with_line, traceback, count=1)
    return _FRAME.sub(with_line, traceback)


_BEFORE_LINE = {False: ": ", True: "\n    "}
# The text of sparkdl.tracebacks, where it lacks lines of source.
_LINE_OF_USER = re.compile(r"\A(?P<file>[^\s\"][^\n\"]*), line (?P<line>\d+), in [^\n:]+(?P<between>)$", re.M)
_FRAME = re.compile(
    r"^  File \"(?P<file>[^\"]+)\", line (?P<line>\d+), in [^\n]+(?=(?P<between>\n(?!    )))", re.M
)


def _about_missing_module(error: BaseException | None) -> str:
    """What to do about a module that a rank lacks and the driver has; empty for other errors."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    top = (getattr(error, "name", None) or "").partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top else None
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is None or spec.origin is None:
        return ""
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    if any(Path(spec.origin).is_relative_to(folder) for folder in installed):
        return f". The driver has {top!r} installed, at {spec.origin}. Install it for the Python of the ranks, too"
    path = "the zip file of its folder" if spec.submodule_search_locations else repr(spec.origin)
    return (
        f". The driver has {top!r} at {spec.origin}, which ranks do not see. Send it with "
        f"spark.sparkContext.addPyFile({path}), on Spark Connect with spark.addArtifacts({path}, pyfile=True), or "
        "list it under code in a job file"
    )


def _with_pickled(failures: list[Failure]) -> list[Failure]:
    """Replace failures received through the channel by those received through Spark, which have the exception."""
    complete = {failure.rank: failure for failure in failures if failure.pickled}
    return [complete.get(failure.rank, failure) for failure in failures]


def _stuck(failures: list[Failure]) -> str:
    """Return the stacks of the ranks that did not end by themselves after another rank had failed, as a text."""
    stacks = {failure.rank: failure for failure in failures if failure.stack}
    return "".join(
        f"\n\nRank {rank} on {stuck.host} did not end by itself, and was here:\n{stuck.stack}"
        for rank, stuck in sorted(stacks.items())
    )
