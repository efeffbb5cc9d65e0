"""An elastic launch whose tasks cannot reach the driver, as with a Connect client behind a firewall.

A task of Spark, the *coordinating task*, then runs :mod:`.members` in place of the driver. Each member is a plain task
that offers its slot to it (:mod:`.offers`), and returns how its rank ended as rows. The driver starts these tasks,
starts others in place of those that have ended, and fetches the values of the last world's ranks.

The driver learns the address of the coordinating task from a second task of the same barrier stage, which ends at once:
a Connect server sends the rows of a task when that task has ended, while other tasks of the stage run. What ranks print
and report reaches the driver when the run is over.
"""

from __future__ import annotations

import json
import logging
import pickle
import secrets
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from typing import IO, TYPE_CHECKING, Any

from sparkdl.collective import Coordinator, Deadline, RendezvousClient
from sparkdl.cores import threads_of_task
from sparkdl.errors import (
    ExecutorsLostError,
    LaunchError,
    ParamError,
    ProcessesLostError,
    RankError,
    SlotsMissingError,
    SparkdlError,
)
from sparkdl.launch.elastic.members import run_members, values_of_world
from sparkdl.launch.elastic.offers import Invitation, SlotOffer
from sparkdl.launch.elastic.roster import PATIENT_S
from sparkdl.launch.failures import renumber_rank
from sparkdl.launch.slots import check_cluster
from sparkdl.launch.spark_job import ROW_SCHEMA, SparkJob, collect_within, task_function
from sparkdl.launch.stage import Stage, cancel_in_background
from sparkdl.launch.supervision import CANCEL_TIMEOUT_S, END_TIMEOUT_S, Listener, collect
from sparkdl.launch.wire.channel import REACH_TIMEOUT_S, UNSENT_BYTES, RankMessage
from sparkdl.launch.wire.messages import CHUNK_BYTES
from sparkdl.rendezvous.addresses import LISTEN, Address, hosts_of_name, reachable_hosts
from sparkdl.spark.failures import explain_job
from sparkdl.spark.jobs import purpose_of_jobs, spark_job
from sparkdl.spark.session import is_local, setting

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row, SparkSession

    from sparkdl.launch.elastic.roster import ElasticLimits
    from sparkdl.launch.supervision import OnEvent, OnLog
    from sparkdl.launch.wire.spec import LaunchSpec

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often it is looked whether tasks have started or are missing; their ends and rows are heard of at once."""

_PAUSE_S = 3.0
"""How long after the end of a member's task another one is started: the run may be over, and the others end as well."""

_HOPELESS_S = 4 * END_TIMEOUT_S
"""How long too few members may run after others were refused: longer than the coordinating task takes to end a run."""

_STORE_TIMEOUT_S = 600.0
"""How long Spark may take to store the values of the ranks once the run is over."""

_MOST_RECORD_BYTES = 32 << 20
"""Most bytes of what ranks print and report: all of it passes through the memory of a Connect server at once."""

_NAMING, _COORDINATING = 0, 1
"""The tasks of the coordinating task's stage: the first returns the address of the second."""

_TaskRow = tuple[int, str, int, bytes]


def can_reach_driver(spark: SparkSession, spec: LaunchSpec, host: str | Sequence[str]) -> bool:
    """Whether a task of Spark can connect to this process.

    Args:
        spark: session of Spark Connect.
        spec: spec of the launch.
        host: address or addresses of this machine at which tasks are to reach it.

    Raises:
        LaunchError: if the cluster does not run the task within the start timeout, or cannot run it.
    """
    secret = spec.secret
    with Coordinator(secret=secret, world_size=1, host=host) as coordinator:
        address = coordinator.address

        def try_to_connect() -> Iterator[_TaskRow]:
            with suppress(OSError):
                RendezvousClient.connect(address, secret, timeout_s=REACH_TIMEOUT_S).close()
                yield 0, "reached", 0, b""

        with spark_job(spark, "looking whether executors reach the driver"):
            rows = spark.range(0, 1, 1, 1).mapInArrow(task_function(try_to_connect), ROW_SCHEMA)
            return bool(collect_within(spark, rows, spec.start_timeout_s))


def run_members_from_task(
    spark: SparkSession,
    spec: LaunchSpec,
    limits: ElasticLimits,
    *,
    resources: ResourceProfile | None,
    on_log: OnLog | None,
    on_event: OnEvent | None,
    leases: Iterator[str] | None,
) -> list[Any]:
    """Run the function of a launch on ranks that come and go, coordinated by a task of Spark.

    The other arguments have the same meaning as those of :func:`~sparkdl.launch.elastic.members.run_members`, and the
    errors are the same, too. All worlds of one coordinating task use the folder of their checkpoints under one name.

    Args:
        spark: session of Spark Connect.
        spec: spec of the launch.
        limits: limits of the launch.
        resources: resources of each member's task, if they differ from the application's default.
        on_log: called with the number of a member and a line that it has printed.
        on_event: called with the number of a member and an event that it has reported.
        leases: names under which the worlds of successive coordinating tasks use the folder of their checkpoints.

    Raises:
        ParamError: if a member has several ranks: these would need a barrier stage.
        LaunchError: if executors are allocated dynamically, or members cannot join.
        ExecutorsLostError: if the coordinating task is lost more than ``limits.max_restarts`` times.
    """
    _check(spark, spec, limits, resources)
    logger.warning(
        "The executors cannot reach this machine, so a task coordinates the ranks and takes a slot. What the ranks "
        "print and report arrives when the run is over. If that task is lost, the run continues from its last "
        "checkpoint. To avoid this, set %s to an address, network or interface that the executors reach.",
        LISTEN,
    )
    listener = Listener(on_log, on_event)
    for num_restarts in count():
        lease, news = "" if leases is None else next(leases), threading.Event()
        try:
            with ExitStack() as stack:
                coordinating = _CoordinatingJob(spark, spec, limits, lease)
                coordinating.call_at_end(news.set)
                members = _MemberJobs(spark, spec, limits, resources, news.set)
                stack.callback(lambda job, others: _end([*others.values(), job]), coordinating, members.jobs)
                try:
                    return _values(coordinating, members, listener, news)
                finally:
                    listener.show_due(is_end=True)
        except _CoordinatingTaskLostError as error:
            if num_restarts == limits.max_restarts:
                raise
            logger.warning(
                "%s The run continues from its last checkpoint, or without one from the beginning: restart %d of %d.",
                error,
                num_restarts + 1,
                limits.max_restarts,
            )
        spec = replace(spec, job=f"sparkdl-{secrets.token_hex(8)}")
        time.sleep(_PAUSE_S)
    raise AssertionError("it has returned or raised")


def _check(
    spark: SparkSession, spec: LaunchSpec, limits: ElasticLimits, resources: ResourceProfile | None
) -> None:
    """Refuse what a coordinating task cannot do.

    Raises:
        ParamError: if a member has several ranks.
        LaunchError: if executors are allocated dynamically.
        SlotsMissingError: if there are no slots for the minimum of ranks and the coordinating task.
    """
    remedy = f"Set {LISTEN} to an address, network or interface of this machine that executors reach"
    if limits.is_barrier:
        raise ParamError(
            f"An elastic launch in which {limits.group_size} ranks share a model needs executors that can reach this "
            f"machine, and these cannot. {remedy}, or leave elastic out."
        )
    if setting(spark, "spark.dynamicAllocation.enabled").lower() == "true" and not is_local(spark):
        raise LaunchError(
            "The executors cannot reach this machine. A task that coordinates the ranks would need a barrier stage, "
            f"which Spark does not run with dynamic allocation. {remedy}, or set spark.dynamicAllocation.enabled=false."
        )
    try:
        check_cluster(
            spark,
            num_ranks=limits.least + 1,
            gpus_per_rank=spec.gpus_per_rank,
            resources=resources,
            start_timeout_s=spec.start_timeout_s,
        )
    except SlotsMissingError as error:
        raise SlotsMissingError(
            f"The executors cannot reach this machine, so that a task coordinates the ranks and takes a slot. {error}"
        ) from error


def _values(
    coordinating: _CoordinatingJob, members: _MemberJobs, listener: Listener, news: threading.Event
) -> list[Any]:
    """Supervise the jobs, which set ``news``, until the run is over, and return the values of its last world."""
    while coordinating.running:
        news.wait(_LOOK_S)
        news.clear()
        coordinating.check_start(2 * int(coordinating.tasks_run))
        if (address := coordinating.address) is not None:
            members.poll(address)
    coordinating.pass_on_records(listener)
    try:
        names = coordinating.names_of_jobs(listener)
    except SlotsMissingError:
        members.raise_refusal()
        raise
    except RankError as error:
        cause = error if isinstance(error, ProcessesLostError) else members.as_raised(error)
        raise cause from cause.__cause__
    return members.values(names, listener)


class _CoordinatingTaskLostError(ExecutorsLostError):
    """The task that coordinates the ranks was lost."""


def _end(jobs: Iterable[SparkJob]) -> None:
    """Cancel jobs that still run, and release the rows of all."""
    running = [job for job in jobs if job.running]
    try:
        for job in running:
            job.cancel(timeout_s=0.0)
        deadline = Deadline(CANCEL_TIMEOUT_S)
        for job in running:
            job.ended.wait(deadline.remaining_s())
    finally:
        for job in running:
            if job.running:
                cancel_in_background(job)
        for job in jobs:
            job.close()


class _CoordinatingJob(SparkJob):
    """The stage of the coordinating task. Its rows come while it runs, and each wakes the caller as its end does."""

    def __init__(self, spark: SparkSession, spec: LaunchSpec, limits: ElasticLimits, lease: str) -> None:
        self._rows: list[Row] = []
        self._limits = spec.limits
        # The ranks get the function from their own tasks.
        without_payload, of_members = replace(spec, payload=b""), replace(limits, own_slots=0)
        function = task_function(lambda: _rows_of_coordination(without_payload, of_members, lease))
        super().__init__(spark, replace(spec, num_ranks=2), function=function)

    def _run_stage(self, rows: DataFrame) -> None:
        for row in rows.toLocalIterator():
            self._rows.append(row)
            if self._wake is not None:
                self._wake()

    def check_start(self, num_started: int) -> None:
        """See :class:`~sparkdl.launch.stage.Stage`."""
        try:
            super().check_start(num_started)
        except SlotsMissingError as error:
            raise SlotsMissingError(
                f"The task that coordinates the ranks had not started after {self._spec.start_timeout_s:g} s. It needs "
                "two free slots to start, and keeps one. Other jobs hold the slots, or executors are missing."
            ) from error

    @property
    def address(self) -> Address | None:
        """Address of the coordinating task's rendezvous; None before it is known."""
        body = self._body("address")
        return Address.from_bytes(body) if body else None

    def _body(self, kind: str) -> bytes:
        return b"".join(row["body"] for row in list(self._rows) if row["kind"] == kind)

    def pass_on_records(self, listener: Listener) -> None:
        """Pass on what the ranks have printed and reported, and what the task has logged."""
        for text in self._body("records").decode().splitlines():
            record = json.loads(text)
            if "logger" in record:
                logging.getLogger(record["logger"]).log(record["level"], "%s", record["text"])
            else:
                listener.handle(RankMessage(**record))

    def names_of_jobs(self, listener: Listener) -> list[str | None]:
        """The name of the job of each rank of the last world; None for a rank that was lost at the end.

        Raises:
            ExecutorsLostError: if the coordinating task was lost.
            SparkdlError: if something else has ended the run.
        """
        try:
            _, (outcome, cause) = collect(self, [], listener.log, self._limits)
        except ExecutorsLostError as error:
            raise _CoordinatingTaskLostError(
                "The task that coordinates the ranks was lost, and all ranks were ended."
            ) from error
        if isinstance(outcome, SparkdlError):
            raise outcome from cause
        names: list[str | None] = outcome
        return names

    def outcomes(self) -> list[tuple[int, str, int]]:
        """See :class:`~sparkdl.launch.stage.Stage`."""
        num_chunks_of = Counter((row["rank"], row["kind"]) for row in self._rows)
        return [(rank, kind, num_chunks) for (rank, kind), num_chunks in num_chunks_of.items()]

    def fetch(self, rank: int, kind: str, num_chunks: int, into: IO[bytes]) -> None:  # noqa: ARG002 - few rows
        """See :class:`~sparkdl.launch.stage.Stage`."""
        for row in self._rows:
            if (row["rank"], row["kind"]) == (rank, kind):
                into.write(row["body"])


class _MemberJobs:
    """The jobs of the members' tasks. The coordinating task counts losses; here tasks are started again for it.

    ``wake`` is called when a task has ended.

    Attributes:
        jobs: the jobs by their names, also those that have ended.
    """

    def __init__(
        self,
        spark: SparkSession,
        spec: LaunchSpec,
        limits: ElasticLimits,
        resources: ResourceProfile | None,
        wake: Callable[[], None],
    ) -> None:
        self.jobs: dict[str, SparkJob] = {}
        self._wake = wake
        self._spark, self._spec, self._limits, self._resources = spark, spec, limits, resources
        self._running: set[str] = set()
        self._refused: SparkJob | None = None
        self._start_from = time.monotonic()
        self._hopeless_by: Deadline | None = None

    def poll(self, address: Address) -> None:
        """Start tasks that are missing.

        Args:
            address: address of the coordinating task.

        Raises:
            LaunchError: if Spark cannot run the tasks, or they do not reach the coordinating task.
        """
        for name in list(self._running):
            job = self.jobs[name]
            if job.running:
                job.check_start(int(job.tasks_run))
                continue
            self._running.discard(name)
            self._start_from = time.monotonic() + _PAUSE_S
            if job.error is not None and not isinstance(
                explain_job(job.error, self._spark, purpose_of_jobs()), ExecutorsLostError
            ):
                self._refused = job
        if self._refused is None:
            if time.monotonic() >= self._start_from:
                for _ in range(self._limits.most - len(self._running)):
                    self._start(address)
        elif len(self._running) >= self._limits.least:
            self._hopeless_by = None
        else:
            # Tasks that start while the run ends are refused, too. The coordinating task then ends soon.
            self._hopeless_by = self._hopeless_by or Deadline(_HOPELESS_S)
            if self._hopeless_by.expired:
                self.raise_refusal()

    def raise_refusal(self) -> None:
        """Raise why a task could not take part; do nothing if none was refused.

        Raises:
            LaunchError: if one was.
        """
        if self._refused is not None:
            collect(self._refused, [], lambda *_: None, self._spec.limits)

    def _start(self, address: Address) -> None:
        name = f"sparkdl-{secrets.token_hex(8)}"
        spec = replace(self._spec, job=name, num_ranks=1, roster=address, start_timeout_s=PATIENT_S)
        function = task_function(lambda: _rows_of_member(spec))
        self.jobs[name] = SparkJob(self._spark, spec, self._resources, function)
        self.jobs[name].call_at_end(self._wake)
        self._running.add(name)

    def values(self, names: Sequence[str | None], listener: Listener) -> list[Any]:
        """Return the values of the ranks of the last world.

        Args:
            names: name of the job of each rank; None for a lost one, whose value is None.
            listener: receives lines that came too late for the coordinating task.

        Raises:
            LaunchError: if Spark does not store the value of rank 0 in time.
            RankError: if rank 0 was lost at the end.
        """
        _end([job for name, job in self.jobs.items() if name not in names])
        deadline = Deadline(_STORE_TIMEOUT_S)

        def fetch(rank: int, job: SparkJob) -> list[Any]:
            job.ended.wait(deadline.remaining_s())
            if job.running:
                raise LaunchError(
                    f"The function has returned on rank {rank}, and Spark has not stored its value within "
                    f"{_STORE_TIMEOUT_S:g} s. Return less, or write it to a file."
                )
            return collect(job, [], listener.log, self._spec.limits)

        return values_of_world(
            [
                None if name is None else partial(fetch, rank, self.jobs[name])
                for rank, name in enumerate(names)
            ],
            group_size=1,
        )

    def as_raised(self, error: RankError) -> RankError:
        """The error that ended the run as the rank's own task returned it: with the exception of its code as cause."""
        deadline = Deadline(END_TIMEOUT_S)
        for job in self.jobs.values():
            job.ended.wait(deadline.remaining_s())
            try:
                if not job.running and any(kind == "failure" for _, kind, _ in job.outcomes()):
                    collect(job, [], lambda *_: None, self._spec.limits)
            except RankError as raised:
                if raised.traceback_text == error.traceback_text:
                    return renumber_rank(raised, error.rank)
            except Exception:  # of Spark, or of a value that cannot be unpickled
                logger.debug("The failure of a member cannot be fetched.", exc_info=True)
        return error


def _rows_of_coordination(spec: LaunchSpec, limits: ElasticLimits, lease: str) -> Iterator[_TaskRow]:
    """Coordinate the run in one task of the stage, and return its address from the other one."""
    from pyspark import BarrierTaskContext

    from sparkdl.launch.task.barrier_task import spark_task

    task = spark_task(BarrierTaskContext.get())
    if task.rank == _NAMING:
        yield task.rank, "address", 0, task.all_gather("")[_COORDINATING].encode()
        yield task.rank, "result", 0, pickle.dumps(None)
        return
    has_announced = False

    def announce(address: str) -> None:
        nonlocal has_announced
        has_announced = True
        task.all_gather(address)

    with _Records() as records:
        outcome: list[Any] | SparkdlError
        cause: BaseException | None = None
        try:
            outcome = run_members(
                _start_nothing,
                spec,
                limits,
                host=reachable_hosts(hosts_of_name(task.hosts[0])),
                on_log=lambda member, line: records.add(rank=member, line=line),
                on_event=records.add_event,
                leases=repeat(lease),
                on_open=lambda invitation: announce(invitation.coordinator.to_bytes().decode()),
            )
        except SparkdlError as error:
            outcome, cause = error, error.__cause__
        finally:
            if not has_announced:  # the other task waits for it
                announce("")
        for number, chunk in enumerate(records.chunks()):
            yield task.rank, "records", number, chunk
    yield task.rank, "result", 0, _pickle_outcome(outcome, cause)


def _pickle_outcome(outcome: list[Any] | SparkdlError, cause: BaseException | None) -> bytes:
    try:
        return pickle.dumps((outcome, cause))
    except Exception:  # of the cause, which may be an exception of any library
        return pickle.dumps((outcome, None))


def _start_nothing(spec: LaunchSpec, slot: int) -> Stage:
    raise AssertionError(f"slot {slot} of {spec.job} is not offered by a task")


class _Records(logging.Handler):
    """What ranks print and report, and what this package logs while the block runs, as lines of JSON.

    If they take more than :data:`_MOST_RECORD_BYTES`, the first lines that ranks have printed are left out.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._writing = threading.Lock()
        self._lines: deque[tuple[int, bytes]] = deque()
        self._others: list[tuple[int, bytes]] = []
        self._numbers = count()
        self._num_bytes = self._num_dropped = 0
        self._logger = logging.getLogger("sparkdl")

    def __enter__(self) -> _Records:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.add(logger=record.name, level=record.levelno, text=record.getMessage())
        except Exception:
            self.handleError(record)

    def add_event(self, member: int, event: dict[str, Any]) -> None:
        # Samples and traces of a monitor are of use while the run goes on, and there are many.
        if event.get("kind") not in ("monitor", "trace"):
            self.add(rank=member, event=event)

    def add(self, **fields: Any) -> None:
        text = json.dumps(fields).encode() + b"\n"
        with self._writing:
            (self._lines if "line" in fields else self._others).append((next(self._numbers), text))
            self._num_bytes += len(text)
            while self._num_bytes > _MOST_RECORD_BYTES and self._lines:
                self._num_bytes -= len(self._lines.popleft()[1])
                self._num_dropped += 1

    def chunks(self) -> Iterator[bytes]:
        if self._num_dropped:
            logger.warning(
                "The ranks have printed more than %d MiB. The first %d lines are left out.",
                _MOST_RECORD_BYTES >> 20,
                self._num_dropped,
            )
        records = b"".join(text for _, text in sorted([*self._lines, *self._others]))
        for start in range(0, len(records), CHUNK_BYTES):
            yield records[start : start + CHUNK_BYTES]


def _rows_of_member(spec: LaunchSpec) -> Iterator[_TaskRow]:
    """Offer the slot of this task to the coordinating task, and return how the member in it has ended.

    If Spark runs the task again, as after the loss of its executor, that is another member.
    """
    from pyspark import TaskContext

    from sparkdl.launch.local_stage import LocalStage
    from sparkdl.launch.task.barrier_task import plain_task

    context = TaskContext.get()
    assert context is not None, "a task calls this"
    assert spec.roster is not None, "the address of the coordinating task"
    task, stages = plain_task(context), list[LocalStage]()

    def start(of_member: LaunchSpec, _slot: int) -> LocalStage:
        complete = replace(
            of_member,
            payload=spec.payload,
            environment=spec.environment,
            num_threads=threads_of_task(spec.num_threads, task.cpus),
        )
        stages.append(LocalStage(complete, [task.gpus]))
        return stages[-1]

    invitation = Invitation(coordinator=spec.roster, secret=spec.secret)
    SlotOffer(invitation, start, num_slots=1, max_restarts=0, ends_with_members=True, label=spec.job).run()
    for stage in stages:
        if stage.running:
            raise LaunchError(
                "A rank has not ended after its run was over, and its process is ended with this one."
            )
        for rank, kind, num_chunks in stage.outcomes():
            with tempfile.SpooledTemporaryFile(max_size=UNSENT_BYTES) as file:
                stage.fetch(rank, kind, num_chunks, file)
                file.seek(0)
                for number, chunk in enumerate(iter(partial(file.read, CHUNK_BYTES), b"")):
                    yield rank, kind, number, chunk
