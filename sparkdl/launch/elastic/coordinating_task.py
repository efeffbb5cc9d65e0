"""An elastic launch whose tasks cannot reach the driver, as with a Connect client behind a firewall.

A task of Spark, the *coordinating task*, then does what :mod:`.members` does on the driver otherwise. Each member is a
plain task that offers its slot to it (:mod:`.offers`) and returns how its rank ended as rows. The driver starts these
tasks, starts others in place of those that have ended, and fetches the values of the last world's ranks.

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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    SparkdlError,
)
from sparkdl.launch.elastic.offers import Invitation, SlotOffer
from sparkdl.launch.spark_job import ROW_SCHEMA, SparkJob, collect_within, task_function
from sparkdl.launch.supervision import CANCEL_TIMEOUT_S, END_TIMEOUT_S, Listener, collect
from sparkdl.launch.wire.channel import REACH_TIMEOUT_S, UNSENT_BYTES, RankMessage
from sparkdl.launch.wire.messages import CHUNK_BYTES
from sparkdl.rendezvous.addresses import LISTEN, Address, hosts_of_name, reachable_hosts
from sparkdl.spark.failures import were_executors_lost
from sparkdl.spark.jobs import named_jobs

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row, SparkSession

    from sparkdl.launch.elastic.roster import ElasticLimits
    from sparkdl.launch.stage import Stage
    from sparkdl.launch.supervision import OnEvent, OnLog
    from sparkdl.launch.wire.spec import LaunchSpec

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_PAUSE_S = 3.0
"""How long after the end of a member's task another one is started: the run may be over, and the others end as well."""

_PATIENT_S = 1e6
"""Seconds for which the task of a member may wait for a slot: it joins when there is one."""

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
        LaunchError: if the cluster does not run the task within the start timeout.
    """
    secret = spec.secret
    with Coordinator(secret=secret, world_size=1, host=host) as coordinator:
        address = coordinator.address

        def try_to_connect() -> Iterator[_TaskRow]:
            with suppress(OSError):
                RendezvousClient.connect(address, secret, timeout_s=REACH_TIMEOUT_S).close()
                yield 0, "reached", 0, b""

        with named_jobs(spark, "looking whether executors reach the driver"):
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
    errors are the same, too. All worlds use the folder of their checkpoints under the first name of ``leases``.

    Args:
        spark: session of Spark Connect.
        spec: spec of the launch.
        limits: limits of the launch.
        resources: resources of each member's task, if they differ from the application's default.
        on_log: called with the number of a member and a line that it has printed.
        on_event: called with the number of a member and an event that it has reported.
        leases: names under which successive worlds use the folder of their checkpoints.

    Raises:
        ParamError: if a member has several ranks: these would need a barrier stage.
        ExecutorsLostError: if the coordinating task is lost more than ``limits.max_restarts`` times.
    """
    if limits.is_barrier:
        raise ParamError(
            f"{limits.group_size} ranks share a copy of the model, and the executors cannot reach this machine, which "
            f"such an elastic launch needs. Set {LISTEN} to an address, network or interface that they reach, or leave "
            "elastic out."
        )
    logger.warning(
        "The executors cannot reach this machine. So a task coordinates the ranks, and takes a slot. What the ranks "
        "print and report comes when the run is over, and if that task is lost, the run continues from its last "
        "checkpoint. To have it otherwise, set %s to an address, network or interface that they reach.",
        LISTEN,
    )
    listener = Listener(on_log, on_event)
    for num_restarts in count():
        lease = "" if leases is None else next(leases)
        try:
            with ExitStack() as stack:
                coordinating = _CoordinatingJob(spark, spec, limits, lease)
                stack.callback(lambda job: _end([job]), coordinating)
                members = _MemberJobs(spark, spec, limits, resources)
                stack.callback(lambda jobs: _end(jobs.values()), members.jobs)
                return _values(coordinating, members, listener)
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
    raise AssertionError("it has returned or raised")


def _values(coordinating: _CoordinatingJob, members: _MemberJobs, listener: Listener) -> list[Any]:
    """Supervise the jobs until the run is over, and return the values of its last world."""
    while coordinating.running:
        time.sleep(_POLL_S)
        if (address := coordinating.address) is not None:
            members.poll(address)
    coordinating.pass_on_records(listener)
    try:
        names = coordinating.names_of_jobs(listener)
    except RankError as error:
        raise error from members.cause_of(error)
    return members.values(names, listener)


class _CoordinatingTaskLostError(ExecutorsLostError):
    """The task that coordinates the ranks was lost."""


def _end(jobs: Iterable[SparkJob]) -> None:
    """Cancel jobs that still run, and release the rows of all."""
    for job in jobs:
        try:
            if job.running:
                job.cancel(timeout_s=0.0)
                job.cancel_in_background(lambda: None)
        finally:
            job.close()


class _CoordinatingJob(SparkJob):
    """The stage of the coordinating task; its rows come while it runs."""

    def __init__(self, spark: SparkSession, spec: LaunchSpec, limits: ElasticLimits, lease: str) -> None:
        self._rows: list[Row] = []
        self._limits = spec.limits
        own = replace(limits, own=0)
        function = task_function(lambda: _rows_of_coordination(spec, own, lease))
        super().__init__(spark, replace(spec, num_ranks=2), function=function)

    def _run_stage(self, rows: DataFrame) -> None:
        for row in rows.toLocalIterator():
            self._rows.append(row)

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
            _, outcome = collect(self, [], listener.log, self._limits)
        except ExecutorsLostError as error:
            raise _CoordinatingTaskLostError(
                "The task that coordinates the ranks was lost, and all ranks were ended."
            ) from error
        if isinstance(outcome, SparkdlError):
            raise outcome
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
    """The jobs of the members' tasks.

    Attributes:
        jobs: the jobs by their names, also those that have ended.
    """

    def __init__(
        self, spark: SparkSession, spec: LaunchSpec, limits: ElasticLimits, resources: ResourceProfile | None
    ) -> None:
        self.jobs: dict[str, SparkJob] = {}
        self._spark, self._spec, self._limits, self._resources = spark, spec, limits, resources
        self._ended: list[str] = []
        self._start_from = time.monotonic()
        self._hopeless_by: Deadline | None = None

    def poll(self, address: Address) -> None:
        """Start tasks that are missing.

        Args:
            address: address of the coordinating task.

        Raises:
            LaunchError: if Spark cannot run the tasks, or they do not reach the coordinating task.
            ProcessesLostError: if more tasks have ended than may be started again, and too few are left.
        """
        running = [job for job in self.jobs.values() if job.running]
        for job in running:
            job.check_start(int(job.tasks_run))
        for name, job in self.jobs.items():
            if not job.running and name not in self._ended:
                self._ended.append(name)
                self._start_from = time.monotonic() + _PAUSE_S
        is_refused = any(
            (error := self.jobs[name].error) is not None and not were_executors_lost(error)
            for name in self._ended
        )
        if len(self._ended) <= self._limits.max_restarts and not is_refused:
            if time.monotonic() >= self._start_from:
                for _ in range(self._limits.most - len(running)):
                    self._start(address)
        elif is_refused or len(running) < self._limits.least:
            # Unless the run is over, and the coordinating task ends in this moment.
            self._hopeless_by = self._hopeless_by or Deadline(END_TIMEOUT_S)
            if self._hopeless_by.expired:
                self._raise()

    def _raise(self) -> None:
        for name in reversed(self._ended):
            collect(self.jobs[name], [], lambda *_: None, self._spec.limits)
        raise ExecutorsLostError(
            f"{len(self._ended)} tasks of ranks have ended, more than may be started again (maxRestarts, max_restarts: "
            f"{self._limits.max_restarts}), and too few are left."
        )

    def _start(self, address: Address) -> None:
        name = f"sparkdl-{secrets.token_hex(8)}"
        spec = replace(self._spec, job=name, num_ranks=1, roster=address, start_timeout_s=_PATIENT_S)
        function = task_function(lambda: _rows_of_member(spec))
        self.jobs[name] = SparkJob(self._spark, spec, self._resources, function)

    def values(self, names: Sequence[str | None], listener: Listener) -> list[Any]:
        """Return the values of the ranks of the last world.

        Args:
            names: name of the job of each rank; None for a lost one, whose value is None.
            listener: receives lines that came too late for the coordinating task.
        """
        _end(job for name, job in self.jobs.items() if name not in names)
        self._wait(name for name in names if name is not None)
        values: list[Any] = []
        for rank, name in enumerate(names):
            value = None
            if name is not None:
                try:
                    (value,) = collect(self.jobs[name], [], listener.log, self._spec.limits)
                except (ProcessesLostError, RankError) as error:
                    if rank == 0:
                        raise
                    logger.warning("Rank %d ended after rank 0 had returned: %s", rank, error)
            values.append(value)
        return values

    def cause_of(self, error: RankError) -> BaseException | None:
        """The exception of a rank's code that has ended the run; None if it was no exception."""
        if isinstance(error, ProcessesLostError):
            return None
        self._wait(self.jobs)
        for job in self.jobs.values():
            if job.running:
                continue
            try:
                collect(job, [], lambda *_: None, self._spec.limits)
            except RankError as own:
                if own.traceback_text == error.traceback_text:
                    return own.__cause__
            except LaunchError:
                pass  # of another member, which was lost
        return None

    def _wait(self, names: Iterable[str]) -> None:
        deadline = Deadline(CANCEL_TIMEOUT_S)
        while any(self.jobs[name].running for name in names) and not deadline.expired:
            time.sleep(_POLL_S)


def _rows_of_coordination(spec: LaunchSpec, limits: ElasticLimits, lease: str) -> Iterator[_TaskRow]:
    """Coordinate the run in one task of the stage, and return its address from the other one."""
    from pyspark import BarrierTaskContext

    from sparkdl.launch.elastic.members import run_members

    context = BarrierTaskContext.get()
    task = context.partitionId()
    if task == _NAMING:
        yield task, "address", 0, context.allGather()[_COORDINATING].encode()
        yield task, "result", 0, pickle.dumps(None)
        return
    own = context.getTaskInfos()[task].address.rpartition(":")[0].strip("[]")

    def announce(invitation: Invitation) -> None:
        context.allGather(invitation.coordinator.to_bytes().decode())

    with _Records() as records:
        outcome: list[Any] | SparkdlError
        try:
            outcome = run_members(
                _start_nothing,
                spec,
                limits,
                host=reachable_hosts(hosts_of_name(own)),
                on_log=lambda member, line: records.add(rank=member, line=line),
                on_event=lambda member, event: records.add(rank=member, event=event),
                leases=repeat(lease),
                on_open=announce,
            )
        except SparkdlError as error:
            outcome = error
        for number, chunk in enumerate(records.chunks()):
            yield task, "records", number, chunk
    yield task, "result", 0, pickle.dumps(outcome)


def _start_nothing(spec: LaunchSpec, slot: int) -> Stage:
    raise AssertionError(f"slot {slot} of {spec.job} is not offered by a task")


class _Records(logging.Handler):
    """What ranks print and report, and what this package logs while the block runs, as lines of JSON in a file."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._file = tempfile.SpooledTemporaryFile(max_size=UNSENT_BYTES)  # noqa: SIM115 - closed by the block
        self._writing = threading.Lock()
        self._logger = logging.getLogger("sparkdl")

    def __enter__(self) -> _Records:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._file.close()

    def emit(self, record: logging.LogRecord) -> None:
        self.add(logger=record.name, level=record.levelno, text=record.getMessage())

    def add(self, **fields: Any) -> None:
        with self._writing:
            self._file.write(json.dumps(fields).encode() + b"\n")

    def chunks(self) -> Iterator[bytes]:
        self._file.seek(0)
        yield from iter(partial(self._file.read, CHUNK_BYTES), b"")


def _rows_of_member(spec: LaunchSpec) -> Iterator[_TaskRow]:
    """Offer the slot of this task to the coordinating task, and return how the member in it has ended."""
    from pyspark import TaskContext

    from sparkdl.launch.local_stage import LocalStage
    from sparkdl.launch.task.barrier_task import plain_task

    context = TaskContext.get()
    assert context is not None, "a task calls this"
    assert spec.roster is not None, "the address of the coordinating task"
    if context.attemptNumber() > 0:
        return  # Spark runs a lost task again; the driver starts another one, too, and counts it
    task, stages = plain_task(context), list[LocalStage]()

    def start(of_member: LaunchSpec, _slot: int) -> LocalStage:
        own = replace(
            of_member,
            environment=spec.environment,
            num_threads=threads_of_task(spec.num_threads, task.cpus),
        )
        stages.append(LocalStage(own, [task.gpus]))
        return stages[-1]

    invitation = Invitation(coordinator=spec.roster, secret=spec.secret)
    SlotOffer(invitation, start, num_slots=1, max_restarts=None, label=spec.job).run()
    for stage in stages:
        for rank, kind, num_chunks in stage.outcomes():
            with tempfile.SpooledTemporaryFile(max_size=UNSENT_BYTES) as file:
                stage.fetch(rank, kind, num_chunks, file)
                file.seek(0)
                for number, chunk in enumerate(iter(partial(file.read, CHUNK_BYTES), b"")):
                    yield rank, kind, number, chunk
