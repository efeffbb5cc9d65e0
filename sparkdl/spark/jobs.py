"""The Spark jobs that sparkdl starts: their names in Spark's UI, and the errors of those that fail.

:func:`spark_job` wraps every block that runs Spark jobs; :func:`jobs_of` wraps the purpose of the jobs, such as a fit
or a run. On classic Spark the jobs have a description and, unless the user has set one, a job group; both are local
properties of the thread, and their old values are restored when the block ends. Spark Connect has no descriptions:
there the jobs have the same words as a tag.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.spark.failures import spark_failures_named
from sparkdl.spark.session import is_connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from sparkdl.errors import DataError

_logger = logging.getLogger(__name__)

DESCRIPTION = "spark.job.description"
GROUP = "spark.jobGroup.id"

TASKS_END_TIMEOUT_S = 10.0
"""Seconds to wait until the other tasks of a failed job end; Spark kills their Python workers after two seconds."""

_CONNECT_TASKS_END_S = 4.0
"""Seconds to wait for these tasks on Spark Connect, which does not report whether tasks run."""


@dataclass(frozen=True)
class _Purpose:
    """The purpose of jobs in words, from the outermost block to the innermost, and the job group that they get."""

    words: tuple[str, ...]
    group: str

    def __str__(self) -> str:
        if not self.words:
            return "sparkdl"
        first, *others = self.words
        return f"sparkdl {first}" + (f": {', '.join(others)}" if others else "")


_purpose: ContextVar[_Purpose | None] = ContextVar("sparkdl_purpose_of_spark_jobs", default=None)


@contextmanager
def jobs_of(words: str, *, unless_named: bool = False) -> Iterator[None]:
    """Set the purpose of the Spark jobs of a block, such as ``fit TorchClassifier``. Blocks may be nested.

    Starts no job itself.

    Args:
        words: words of the purpose, which are appended to those of the enclosing block.
        unless_named: whether to leave the words out if an enclosing block has set a purpose.
    """
    before = _purpose.get()
    if before is not None and unless_named:
        yield
        return
    group = f"sparkdl-{secrets.token_hex(4)}" if before is None else before.group
    token = _purpose.set(_Purpose((*(before.words if before is not None else ()), words), group))
    try:
        yield
    finally:
        _purpose.reset(token)


def purpose_of_jobs() -> str:
    """Return the words for the jobs of this block, such as ``sparkdl fit Net: writing rows``."""
    return str(_purpose.get() or _Purpose((), ""))


def name_of(function: Any) -> str:
    """Return the name of a function for the words about jobs that run it; for a path, the name of the file."""
    if isinstance(function, str | os.PathLike):
        return os.path.basename(os.fspath(function))
    function = getattr(function, "func", function)  # of functools.partial
    return str(getattr(function, "__name__", type(function).__name__))


@contextmanager
def spark_job(
    spark: SparkSession,
    words: str,
    *,
    explain_file: Callable[[str], DataError | None] | None = None,
    waits_for_tasks: bool = False,
) -> Iterator[None]:
    """Name the Spark jobs that a block runs, and raise their failures as sparkdl's errors.

    Args:
        spark: classic or Connect session.
        words: what the jobs do, such as ``writing rows``; appended to the words of :func:`jobs_of`.
        explain_file: function that says more of a file that Spark could not read, as
            :func:`~sparkdl.spark.failures.spark_failures_named` takes it.
        waits_for_tasks: whether a failing block waits until the jobs' other tasks have ended; otherwise these may
            still write where the caller is about to clean up.

    Raises:
        As :func:`~sparkdl.spark.failures.spark_failures_named`.
    """
    with (
        jobs_of(words),
        spark_failures_named(spark, doing=purpose_of_jobs(), explain_file=explain_file),
        _name_jobs(spark) as tag,
    ):
        try:
            yield
        except BaseException:
            if waits_for_tasks:
                with suppress(Exception):  # if Spark is gone, its tasks are gone, too
                    _wait_for_tasks(spark, tag)
            raise


@contextmanager
def named_jobs(spark: SparkSession, words: str) -> Iterator[None]:
    """Name the Spark jobs of a block and of the threads that it starts; failures are raised as Spark raises them."""
    with jobs_of(words), _name_jobs(spark):
        yield


@contextmanager
def _name_jobs(spark: SparkSession) -> Iterator[str]:
    """Name the jobs of a block after its purpose, and yield a tag that they have."""
    purpose = _purpose.get()
    assert purpose is not None, "the block is one of jobs_of"
    if is_connect(spark):
        with tagged(spark, str(purpose).replace(",", ";")) as tag:  # a tag cannot have commas
            yield tag
        return
    context: Any = spark.sparkContext
    before = {name: context.getLocalProperty(name) for name in (DESCRIPTION, GROUP)}
    context.setLocalProperty(DESCRIPTION, str(purpose))
    if before[GROUP] is None:
        context.setLocalProperty(GROUP, purpose.group)
    try:
        with (
            tagged(context, purpose.group),
            tagged(context, f"sparkdl-{secrets.token_hex(8)}") as tag,
        ):
            yield tag
    finally:
        with suppress(
            Exception
        ):  # a stopped context has no properties, and the error of the block says that it stopped
            for name, value in before.items():
                context.setLocalProperty(name, value)


@contextmanager
def tagged(tagging: Any, tag: str) -> Iterator[str]:
    """Give the jobs of a block a tag, by a session of Spark Connect or by a classic context; yield the tag."""
    add, remove, get = (
        (tagging.addTag, tagging.removeTag, tagging.getTags)
        if hasattr(tagging, "addTag")
        else (tagging.addJobTag, tagging.removeJobTag, tagging.getJobTags)
    )
    if tag in get():
        yield tag
        return
    add(tag)
    try:
        yield tag
    finally:
        with suppress(Exception):  # as above
            remove(tag)


def describe_progress(spark: SparkSession, words: str) -> None:
    """Show words behind the description of the running jobs of this block's purpose in Spark's UI.

    Spark takes a description only when a job is submitted, so this changes the UI's own record of the job and of its
    stages, which no public call does. A Spark whose record is another one keeps the first description, and so does
    Spark Connect, which has none.
    """
    purpose = _purpose.get()
    if purpose is None or is_connect(spark):
        return
    try:
        _describe_running(spark.sparkContext, purpose, words)
    except Exception as error:  # of py4j, for what this Spark does not have
        _logger.debug("The description of the running Spark job cannot be changed: %s", error)


def _describe_running(context: Any, purpose: _Purpose, words: str) -> None:
    jvm_context = context._jsc.sc()
    store = jvm_context.statusStore()
    listener, now = store.listener().get(), context._jvm.System.nanoTime()
    jobs, stages = _field(listener, "liveJobs").get(listener), _field(listener, "liveStages").get(listener)
    for number in jvm_context.statusTracker().getJobIdsForTag(purpose.group):
        job = jobs.get(number)
        if job.isEmpty():  # it has ended
            continue
        live = [(job.get(), _field(job.get(), "description"))]
        for stage in context.statusTracker().getJobInfo(number).stageIds:
            found = stages.get(context._jvm.scala.Tuple2(stage, 0))
            if found is not None:
                live.append((found, _field(found, "description")))
        for entity, description in live:
            if not str(description.get(entity)).startswith(f"Some({purpose}"):
                continue
            shown = f"{description.get(entity).get().partition(_BEFORE_PROGRESS)[0]}{_BEFORE_PROGRESS}{words}"
            description.set(entity, context._jvm.scala.Option.apply(shown))
            entity.write(store.store(), now, False)


_BEFORE_PROGRESS = " | "


def _field(instance: Any, name: str) -> Any:
    """Return the accessible field of a Java object."""
    field = instance.getClass().getDeclaredField(name)
    field.setAccessible(True)
    return field


def _wait_for_tasks(spark: SparkSession, tag: str) -> None:
    """Wait at most :data:`TASKS_END_TIMEOUT_S` until no task of the jobs runs; on Spark Connect, for a fixed time."""
    pause = threading.Event()
    if is_connect(spark):
        pause.wait(_CONNECT_TASKS_END_S)
        return
    deadline = time.monotonic() + TASKS_END_TIMEOUT_S
    while _has_tasks(spark.sparkContext, tag) and time.monotonic() < deadline:
        pause.wait(0.1)


def _has_tasks(context: Any, tag: str) -> bool:
    tracker = context.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in context._jsc.sc().statusTracker().getJobIdsForTag(tag)]
    known = [job for job in jobs if job is not None]
    stages = [tracker.getStageInfo(stage) for job in known for stage in job.stageIds]
    # Spark reports a failed job to its listeners somewhat later than to the caller.
    return any(job.status == "RUNNING" for job in known) or any(
        stage is not None and stage.numActiveTasks > 0 for stage in stages
    )
