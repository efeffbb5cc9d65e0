"""The Spark job behind a launch: submits the barrier stage from its own thread, cancels it, fetches its rows.

Runs on the driver, with classic Spark and Spark Connect: ``mapInArrow(barrier=True)`` is the only barrier call that
both have. :class:`TaggedCall` runs a call that starts Spark jobs in a thread of its own and under a tag, so that the
jobs can be cancelled. :func:`collect_within` limits the time of a Spark job: when the time is over, the job is
cancelled, and the caller waits for it only briefly. :func:`driver_hosts` finds the addresses at which the tasks reach
this process.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from typing import IO, TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from sparkdl.collective import Deadline
from sparkdl.errors import LaunchError, SlotsMissingError, count_of
from sparkdl.launch.stage import Stage, cancel_in_background
from sparkdl.launch.wire.messages import CHUNK_BYTES
from sparkdl.launch.wire.spec import LaunchSpec
from sparkdl.rendezvous.addresses import (
    LOOPBACK,
    hosts_known_as,
    is_local,
    reachable_hosts,
    resolve,
    route_host,
)
from sparkdl.spark.jobs import named_jobs, tagged
from sparkdl.spark.session import is_connect, setting

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row, SparkSession


CANCEL_INTERVAL_S = 1.0
"""How often the cancellation is repeated: Spark cancels only active jobs. A job is not active before it is submitted,
or while its barrier stage waits for executors because it has more tasks than there are slots."""

_logger = logging.getLogger(__name__)
Value = TypeVar("Value")


class TaggedCall(Generic[Value]):
    """Calls a function at once, in a thread with the caller's job group, description, scheduler pool and tags.

    Args:
        spark: classic or Connect session.
        tag: tag of all jobs that the function runs, and of no other jobs.
        function: function to call.

    Attributes:
        spark: the session.
        tag: the tag.
        ended: event that is set once the call has ended.
        value: return value of the function; None before it has returned, and if it raised.
        was_cancelled_here: whether :meth:`cancel` was called; False for a cancellation in Spark's UI, for example.
    """

    def __init__(self, spark: SparkSession, tag: str, function: Callable[[], Value]) -> None:
        self.spark = spark
        self.tag = tag
        self._function: Callable[[], Value] | None = function
        self.value: Value | None = None
        self._error: Exception | None = None
        self.was_cancelled_here = False
        # The caller may cancel by the tags of this thread; with classic Spark threads inherit them.
        self._callers_tags = spark.getTags() if is_connect(spark) else set()
        # Used instead of the thread's join(): Python 3.11 considers a thread ended if Ctrl-C interrupts that.
        self.ended = threading.Event()
        self._wake: Callable[[], None] | None = None
        _inheriting_thread(spark, self._call).start()

    @property
    def running(self) -> bool:
        """Whether the function has not returned yet."""
        return not self.ended.is_set()

    @property
    def error(self) -> Exception | None:
        """What the function raised, or Spark when the thread was tagged; None without an error and before the end."""
        return None if self.running else self._error

    def call_at_end(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once the call has ended, from its thread, and also from this one if it has ended."""
        self._wake = wake
        if not self.running:
            wake()

    def cancel(self, *, timeout_s: float) -> None:
        """Cancel the jobs of the call, also jobs submitted later, until it has ended or the time is over."""
        self.was_cancelled_here = True
        deadline, is_logged = Deadline(timeout_s), False
        while self.running:
            try:
                self._request_cancellation()
            except Exception as error:
                # An error of py4j or gRPC. It is not raised: the caller that cancels raises its own reason.
                if not is_logged:
                    _logger.warning("Cancelling the Spark jobs tagged %s failed: %s", self.tag, error)
                is_logged = True
            self.ended.wait(min(CANCEL_INTERVAL_S, deadline.remaining_s()))
            if deadline.expired:
                return

    def _request_cancellation(self) -> None:
        if is_connect(self.spark):
            self.spark.interruptTag(self.tag)
        else:
            self.spark.sparkContext.cancelJobsWithTag(self.tag)

    def _call(self) -> None:
        tagging = self.spark if is_connect(self.spark) else self.spark.sparkContext
        try:
            with ExitStack() as stack:
                for tag in (self.tag, *self._callers_tags):
                    stack.enter_context(tagged(tagging, tag))
                assert self._function is not None
                self.value = self._function()
        except Exception as error:
            self._error = error
        finally:
            # The function may be part of a reference cycle with this call, which would keep the value until the next
            # garbage collection.
            self._function = None
            self.ended.set()
            if self._wake is not None:
                self._wake()


def _inheriting_thread(spark: SparkSession, target: Callable[[], None]) -> threading.Thread:
    if is_connect(spark):
        return threading.Thread(target=target, name="sparkdl-job", daemon=True)
    from pyspark import InheritableThread

    thread: threading.Thread = InheritableThread(target=target, name="sparkdl-job", daemon=True)
    return thread


ROW_SCHEMA = "rank int, kind string, chunk int, body binary"
STATUS_LAG_S = 12.0
"""Longest delay of Spark's status tracker, which may learn of a task's start from the executor's next heartbeat."""

FETCH_CHUNKS = 12
"""Number of chunks per fetch to the driver: 48 MiB, as 128 MiB end a Connect server that has the default heap."""

_KINDS = 4
"""Most outcomes of a rank: its failure and exception, or its result, and its log."""


TaskFunction: TypeAlias = "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]"
"""What Spark calls in each task, with batches of rows, for batches of rows of :data:`ROW_SCHEMA`."""


def barrier_function(spec: LaunchSpec) -> TaskFunction:
    """Make the function that Spark pickles; it holds the spec and nothing else."""
    is_plain = spec.is_alone

    def rows() -> Iterator[tuple[int, str, int, bytes]]:
        from pyspark import BarrierTaskContext, TaskContext

        # not needed on the driver
        from sparkdl.launch.task.barrier_task import plain_task, run_barrier_task, spark_task

        context = TaskContext.get()
        assert context is not None, "a task calls this"
        task = plain_task(context) if is_plain else spark_task(BarrierTaskContext.get())
        for row in run_barrier_task(spec, task):
            yield task.rank, *row

    return task_function(rows)


def task_function(rows: Callable[[], Iterator[tuple[int, str, int, bytes]]]) -> TaskFunction:
    """Make the function of a task that returns the rows that another function yields there."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for _ in batches:
            pass  # each row only makes Spark start a task
        types = (pa.int32(), pa.string(), pa.int32(), pa.binary())
        for row in rows():
            columns = [pa.array([value], type_) for value, type_ in zip(row, types, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=["rank", "kind", "chunk", "body"])

    return run


_slot_holders: set[SparkJob] = set()
"""The jobs of this process whose ranks have all started, and which occupy slots that other jobs wait for."""

_slot_holders_lock = threading.Lock()


class SparkJob(TaggedCall["DataFrame | None"], Stage):
    """One barrier stage, run by a thread so that the caller can watch it and be interrupted.

    Spark queues a barrier stage until slots for all of its tasks are free. If another launch of this process holds the
    slots, as when ``CrossValidator`` fits models in parallel, :meth:`check_start` waits without limit.

    Args:
        spark: classic or Connect session.
        spec: spec of the launch.
        resources: resources of each task, if they differ from the application's default.
        function: function of the tasks; that of a launch's ranks when None.
    """

    def __init__(
        self,
        spark: SparkSession,
        spec: LaunchSpec,
        resources: ResourceProfile | None = None,
        function: TaskFunction | None = None,
    ) -> None:
        self.num_ranks = spec.num_ranks
        self._spec, self._task_function = spec, function or barrier_function(spec)
        # Passed only if there is one: Spark before 4.0 has no such argument.
        self._profile = {} if resources is None else {"profile": resources}
        self._executors: list[str] = []
        self._fetched: list[Row] = []
        self._tasks_seen = threading.Event()
        self._start_by = time.monotonic() + spec.start_timeout_s
        self._ranks = count_of(spec.num_ranks, "rank")
        with named_jobs(spark, self._ranks):
            super().__init__(spark, spec.job, self._run)

    @property
    def tasks_run(self) -> bool:
        """Whether the tasks of the stage run or have run, as of at most :data:`STATUS_LAG_S` ago."""
        if not self._tasks_seen.is_set() and not is_connect(self.spark):
            tracker = self.spark.sparkContext.statusTracker()
            stages = [tracker.getStageInfo(stage) for stage in self._stage_ids()]
            if any(
                stage is not None and self._is_ours(stage.numTasks, stage.numActiveTasks) for stage in stages
            ):
                self._tasks_seen.set()
        return self._tasks_seen.is_set()

    def check_start(self, num_started: int) -> None:
        """Check whether the ranks start in time, unless another launch of this process holds their slots.

        Raises:
            SlotsMissingError: if Spark has not started the tasks in time.
        """
        if num_started == self.num_ranks:
            with _slot_holders_lock:
                _slot_holders.add(self)
            return
        if time.monotonic() < self._start_by:
            return
        with _slot_holders_lock:
            do_others_hold_slots = bool(_slot_holders - {self})
        if do_others_hold_slots:
            _logger.info("%s wait for slots that another launch of this process holds.", self._ranks)
            self._start_by = time.monotonic() + self._spec.start_timeout_s
        # Tasks may run without reaching the driver; Spark reports them.
        elif self.tasks_run:
            self._start_by = math.inf
        elif self.running and time.monotonic() > self._start_by + STATUS_LAG_S:
            raise SlotsMissingError(
                f"{num_started} of {self._ranks} had started after {self._spec.start_timeout_s:g} s. "
                "Other jobs hold the free slots, or executors are missing: wait for them or start fewer ranks."
            )

    def _release_slots(self) -> None:
        with _slot_holders_lock:
            _slot_holders.discard(self)

    @property
    def is_to_leave(self) -> bool:
        """Whether Spark decommissions the executor of a task; with Spark Connect False, as it does not tell."""
        if is_connect(self.spark) or not self.running:
            return False
        if len(self._executors) < self.num_ranks:
            self._executors = self._find_executors()
        context: Any = self.spark.sparkContext
        scheduler = context._jsc.sc().taskScheduler()
        return any(
            scheduler.getExecutorDecommissionState(executor).isDefined() for executor in self._executors
        )

    def _find_executors(self) -> list[str]:
        """The executors of the running tasks, by task."""
        context: Any = self.spark.sparkContext
        store, executors = context._jsc.sc().statusStore(), []
        for stage in self._stage_ids():
            tasks = store.taskList(stage, 0, self.num_ranks)
            executors += [tasks.apply(index).executorId() for index in range(tasks.size())]
        return executors

    def cancel(self, *, timeout_s: float) -> None:
        """Cancel the stage in Spark until it has ended or the time is over."""
        self._release_slots()
        super().cancel(timeout_s=timeout_s)

    def outcomes(self) -> list[tuple[int, str, int]]:
        """Rank, kind and number of chunks of everything that the tasks yielded."""
        rows = self.value
        if rows is None:
            return []
        # A further job would take longer than fetching all small bodies. Only the last chunk of an outcome is small.
        most = min(CHUNK_BYTES - 1, FETCH_CHUNKS * CHUNK_BYTES // (_KINDS * self.num_ranks))
        small = rows.selectExpr("rank", "kind", "chunk", f"if(length(body) <= {most}, body, null) as body")
        self._fetched = self._collect(small)
        # Counted here: in Spark it would be a shuffle.
        num_chunks_of = Counter((row["rank"], row["kind"]) for row in self._fetched)
        return sorted((rank, kind, num_chunks) for (rank, kind), num_chunks in num_chunks_of.items())

    def fetch(self, rank: int, kind: str, num_chunks: int, into: IO[bytes]) -> None:
        """Write the body of one outcome into a file. A large body is fetched now, a few chunks at a time."""
        rows = self.value
        assert rows is not None
        fetched = [row for row in self._fetched if (row["rank"], row["kind"]) == (rank, kind)]
        if all(row["body"] is not None for row in fetched):
            into.writelines(row["body"] for row in sorted(fetched, key=itemgetter("chunk")))
            return
        mine = rows.filter((rows["rank"] == rank) & (rows["kind"] == kind))
        for start in range(0, num_chunks, FETCH_CHUNKS):
            window = mine.filter(mine["chunk"].between(start, start + FETCH_CHUNKS - 1))
            into.writelines(row["body"] for row in sorted(self._collect(window), key=itemgetter("chunk")))

    def _collect(self, frame: DataFrame) -> list[Row]:
        with named_jobs(self.spark, f"fetching results of {self._ranks}"):
            return frame.collect()

    def close(self) -> None:
        """Release the rows, which Spark keeps as long as their DataFrame is referenced.

        On Spark Connect, releasing the last reference sends a request to the server. The request blocks for ever if the
        interpreter is exiting, as when an uncaught exception references this job.
        """
        self._release_slots()
        self._fetched = []
        self.value = None

    def _stage_ids(self) -> set[int]:
        context: Any = self.spark.sparkContext
        # pyspark's tracker finds jobs only by their group, which belongs to the caller.
        job_ids = context._jsc.sc().statusTracker().getJobIdsForTag(self.tag)
        jobs = [context.statusTracker().getJobInfo(job) for job in job_ids]
        return {stage for job in jobs if job is not None for stage in job.stageIds}

    def _run(self) -> DataFrame | None:
        spark, spec = self.spark, self._spec
        # pyspark's type for handlers is a class, but it takes any function; it calls them in the operation's thread.
        note_progress: Any = partial(self._note_progress, threading.get_ident())
        if is_connect(spark):
            spark.registerProgressHandler(note_progress)
        try:
            tasks = spark.range(0, spec.num_ranks, 1, spec.num_ranks)
            # A plain task may run with dynamic allocation.
            is_barrier = not spec.is_alone
            return self._run_stage(
                tasks.mapInArrow(self._task_function, ROW_SCHEMA, barrier=is_barrier, **self._profile)
            )
        finally:
            if is_connect(spark):
                spark.removeProgressHandler(note_progress)

    def _run_stage(self, rows: DataFrame) -> DataFrame | None:
        """Run the stage once, and keep its rows on the executors, from which they are fetched in parts.

        No limit on the size of a result then applies to all rows together, and no fetch can run the ranks again.
        """
        return rows.localCheckpoint(eager=True)

    def _note_progress(
        self,
        our_thread: int,
        stages: Iterable[Any] | None,
        inflight_tasks: int,
        operation_id: str | None,
        done: bool,
    ) -> None:
        del operation_id, done
        if threading.get_ident() != our_thread:
            return  # another operation of this session
        if any(self._is_ours(stage.num_tasks, inflight_tasks) for stage in stages or ()):
            self._tasks_seen.set()

    def _is_ours(self, num_tasks: int, num_active: int) -> bool:
        # The tasks of a barrier stage are launched all at once or not at all.
        return num_tasks == self.num_ranks and num_active > 0


CANCEL_TIMEOUT_S = 5.0
"""How long the caller waits for a cancelled job to end; after that, cancelling continues in the background."""


def collect_within(spark: SparkSession, frame: DataFrame, timeout_s: float) -> list[Row]:
    """Collect a DataFrame within a time limit.

    Raises:
        LaunchError: if it takes longer than ``timeout_s``; the job is cancelled.
        Exception: if the job fails in Spark; it is Spark's exception.
    """
    call = TaggedCall(spark, f"sparkdl-{secrets.token_hex(8)}", frame.collect)
    try:
        call.ended.wait(timeout_s)
    finally:
        if call.running:  # the time is over, or the wait has ended by Ctrl-C
            try:
                call.cancel(timeout_s=CANCEL_TIMEOUT_S)
            finally:
                if call.running:
                    cancel_in_background(call)
    if call.was_cancelled_here:
        raise LaunchError(
            f"the cluster had not run the tasks within {timeout_s:g} s: other jobs hold its slots, or executors are "
            "missing"
        )
    if call.error is not None:
        raise call.error
    assert call.value is not None, "it has ended well"
    return call.value


def driver_hosts(spark: SparkSession) -> Sequence[str]:
    """The addresses of this machine at which the tasks of a session are to reach this process.

    This is loopback if Spark runs on this machine alone; otherwise the address that Spark's own driver listens on, or,
    for a client of Spark Connect, the local address from which it reaches the server.
    """
    master, driver = setting(spark, "spark.master"), setting(spark, "spark.driver.host")
    if is_connect(spark):
        server = resolve(_server_host(spark))
        if not any(map(is_local, server)):
            return reachable_hosts(host for there in server if (host := route_host(there)) is not None)
        # The server may be reached through a tunnel, and run elsewhere.
        is_spark_here = any(map(is_local, resolve(driver)))
    else:
        is_spark_here = True
    if is_spark_here and re.match(r"local(-cluster)?(\[|$)", master):
        return [LOOPBACK]
    return hosts_known_as("spark.driver.host", driver, setting(spark, "spark.driver.bindAddress"))


def _server_host(spark: SparkSession) -> str:
    from pyspark.errors import PySparkException

    try:
        return str(spark.client.host)
    except PySparkException:  # a channel that a service's own client has built has no host
        return ""
