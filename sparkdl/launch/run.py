"""Runs a function on ranks, ends them if one hangs, and returns the value of each.

:class:`SlotHolders` holds the launches of this process whose ranks run, and which therefore occupy slots that other
launches wait for. Spark queues a barrier stage until slots for all of its tasks are free. A launch whose ranks do not
start therefore checks the :class:`SlotHolders`. If another launch holds the slots, as when ``CrossValidator`` fits
models in parallel, it waits; otherwise the wait is limited.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sparkdl.collective import check_timeout, check_transport, new_secret
from sparkdl.cores import check_threads, in_threads
from sparkdl.errors import SlotsMissingError
from sparkdl.launch.collect import collect
from sparkdl.launch.hangs.report import hang_error
from sparkdl.launch.hangs.watch import Hang, HangLimits, HangWatch, hang_limits
from sparkdl.launch.slots import OnWait, check_cluster
from sparkdl.launch.spark_job import STATUS_LAG_S, SparkJob, driver_hosts
from sparkdl.launch.task.meeting import FINISH_TIMEOUT_S
from sparkdl.launch.wire.channel import DriverChannel, RankMessage
from sparkdl.launch.wire.messages import pickle_call
from sparkdl.launch.wire.outcome import Failure, RankHealth, StopReason
from sparkdl.launch.wire.spec import LaunchSpec, installed_versions
from sparkdl.spark.jobs import jobs_of, name_of, named_jobs
from sparkdl.spark.session import active_session, task_cpus, threads_by_settings

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_logger = logging.getLogger(__name__)


class SlotHolders:
    """Thread-safe set of launches, by the names of their jobs."""

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self._lock = threading.Lock()

    def add(self, job: str) -> None:
        """Note that all ranks of a launch run."""
        with self._lock:
            self._jobs.add(job)

    def remove(self, job: str) -> None:
        """Note that a launch has ended, whether or not its ranks ever ran."""
        with self._lock:
            self._jobs.discard(job)

    def has_others(self, job: str) -> bool:
        """Whether ranks of another launch run."""
        with self._lock:
            return bool(self._jobs - {job})


END_TIMEOUT_S = 15.0
"""Time limit for the tasks to report the stacks of their ranks and to end. A task that hangs itself does neither."""

END_AFTER_FAILURE_TIMEOUT_S = FINISH_TIMEOUT_S + END_TIMEOUT_S
"""How long the tasks may take to end once code on a rank has raised: rank 0's task may wait for the others first."""


class HangGuard:
    """Ends a launch in which a rank hangs, or in which a task does not end after a failure.

    Args:
        channel: channel to the tasks.
        limits: times after which a rank counts as hanging.
    """

    def __init__(self, channel: DriverChannel, limits: HangLimits) -> None:
        self._channel = channel
        self._watch = HangWatch(limits)
        self._found: tuple[Hang, dict[int, RankHealth]] | None = None
        self._end_by = math.inf
        self._has_failed = False

    @property
    def is_overdue(self) -> bool:
        """Whether the tasks have not ended in time after a rank hung or failed."""
        return time.monotonic() >= self._end_by

    def poll(self) -> None:
        """Check whether a rank hangs, and end all tasks if one does. Has to be called often."""
        if self._found is not None:
            return
        if not self._has_failed and _are_explained(self._channel.failures):
            self._has_failed = True
            self._end_by = time.monotonic() + END_AFTER_FAILURE_TIMEOUT_S
        now, reports = time.monotonic(), self._channel.health
        hang = self._watch.observe(now, reports)
        if hang is None:
            return
        self._found = hang, {rank: report.health for rank, report in reports.items()}
        self._end_by = min(self._end_by, now + END_TIMEOUT_S)
        self._channel.cancel(StopReason(hang.why, is_hang=True))

    def check(self) -> None:
        """Raise an error if a hang was found; to be called once the tasks have ended or are overdue.

        Raises:
            HangError: if a rank hung; the error names the rank, and the stacks of all ranks are logged.
        """
        failures = self._channel.failures
        if self._found is None or _are_explained(failures):
            return
        hang, health = self._found
        raise hang_error(hang, failures, health, self._channel.hosts)


def _are_explained(failures: Sequence[Failure]) -> bool:
    """Whether code on a rank raised, which explains why the others end or wait."""
    return any(not failure.is_consequence and not failure.is_loss for failure in failures)


CANCEL_TIMEOUT_S = 10.0
LAST_LINES_TIMEOUT_S = 5.0

_slot_holders = SlotHolders()

OnLog = Callable[[int, str], None]
OnEvent = Callable[[int, dict[str, Any]], None]


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    spark: SparkSession | None = None,
    transport: str = "auto",
    wire: str = "float32",
    gpus_per_rank: int = 0,
    threads_per_rank: int | None = None,
    mpi: bool = False,
    resources: ResourceProfile | None = None,
    environment: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
    start_timeout_s: float = 300.0,
    operation_timeout_s: float = 300.0,
    hang_timeout_s: float | None = None,
    silence_timeout_s: float | None = None,
    on_log: OnLog | None = None,
    on_event: OnEvent | None = None,
    on_wait: OnWait | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(context, *args, **kwargs)`` in one process per rank, all at once, and return every rank's value.

    The function, its arguments and its value are pickled with cloudpickle and sent in chunks, without a limit of size.
    A failing rank ends all of them within seconds; Ctrl-C ends them too. ``on_log`` and ``on_event`` are called on the
    caller's thread.

    Several threads may launch at once: a launch without enough free slots waits for the slots of other launches.

    Args:
        function: called with a :class:`~sparkdl.launch.RankContext` as its first argument.
        args: further positional arguments of the function.
        num_ranks: number of ranks; each takes a slot of the cluster.
        spark: classic or Connect session; the active one when None.
        transport: transport of the communicator: ``auto`` or ``native`` (shared memory inside a host, TCP across),
            ``shm``, ``tcp``, ``mpi``; ``hierarchical`` and ``hierarchical-mpi``, which are ``native`` and ``mpi``,
            except that CUDA tensors of torch are first reduced by NCCL inside each host.
        wire: data type in which the communicator sends sums and averages of float32 between hosts: ``float32``, or, in
            half the bytes, ``bfloat16`` or ``float16``; see :func:`~sparkdl.collective.open_communicator`.
        gpus_per_rank: number of GPUs that each rank sees.
        threads_per_rank: number of threads in which torch, BLAS libraries, Arrow and tokenizers compute on each rank.
            When None, ``OMP_NUM_THREADS`` if the user set it: in ``environment``, in Spark's setting
            ``spark.executorEnv.OMP_NUM_THREADS`` or, with a local master, in the environment of this process.
            Otherwise the cores that Spark reserves for a task (``spark.task.cpus``, or ``resources``), or fewer if the
            executor's affinity or the quotas of its cgroups allow fewer.
        mpi: whether the ranks form an MPI world for mpi4py even if the transport is not MPI.
        resources: resources of each task of the stage, if they differ from the application's default. The profile may
            have only task requests, as Spark starts no executors for a stage. Needs Spark 4.0 and a cluster.
        environment: environment variables for the rank processes.
        modules: libraries that the function needs and that take long to import, such as ``("torch",)``. Each executor
            imports them once, in a process from which its ranks are forked; ranks of later launches are forked from
            it as well, until a minute has passed without tasks. Ranks with GPUs import the libraries themselves.
        start_timeout_s: limit in seconds of each of two waits. The first is for slots of executors that Spark has yet
            to start, because its settings request them or as replacements of lost ones. The second is for free slots,
            until all ranks have started; it is extended while ranks of another launch of this process run. Tasks that
            have started wait for the others for this time, too.
        operation_timeout_s: default deadline of a collective in seconds.
        hang_timeout_s: seconds after which a rank counts as hanging: if others wait for it in a collective, unless the
            collective has a longer deadline of its own; if its process sends no heartbeat, because it is stopped or
            holds Python's lock (the GIL); or if it has called ``context.progress()`` before and no longer does. Four
            fifths of ``operation_timeout_s`` when None; ``math.inf`` for never; at least 2.
        silence_timeout_s: seconds after which a process or task that sends no heartbeat counts as hanging, if this time
            is to be shorter than that for waits; ``hang_timeout_s`` when None.
        on_log: called with rank and line for everything the ranks print; prints ``[rank N] line`` when None.
        on_event: called with rank and event for every ``context.report(event)``.
        on_wait: called with a line that says what the launch waits for before the ranks start, whenever that changes
            and every half minute; the line is also logged as a warning.
        kwargs: keyword arguments of the function.

    Returns:
        Return values of the function, in order of rank.

    Raises:
        ParamError: if an argument has a value that cannot work.
        SerializationError: if function or arguments cannot be pickled.
        LaunchError: if the ranks cannot be started.
        SlotsMissingError: if the cluster cannot have so many slots, or did not have them in time.
        RankError: if a rank fails; the error names the first failed rank, and ``__cause__`` is that rank's exception.
        HangError: if a rank hangs; the error names the rank and where it was. The log has the stacks of all ranks.
    """
    check_transport(transport, wire)
    check_timeout(start_timeout_s, "start_timeout_s")
    check_timeout(operation_timeout_s, "operation_timeout_s")
    check_threads(threads_per_rank)
    limits = hang_limits(hang_timeout_s, operation_timeout_s, silence_timeout_s)
    payload = pickle_call(function, args, kwargs)
    session = spark or active_session()
    check_cluster(
        session,
        num_ranks=num_ranks,
        gpus_per_rank=gpus_per_rank,
        resources=resources,
        start_timeout_s=start_timeout_s,
        on_wait=on_wait,
    )
    num_threads = threads_per_rank or threads_by_settings(session)
    _logger.info(
        "Starting %d ranks with %s each.", num_ranks, in_threads(num_threads or task_cpus(session, resources))
    )
    secret, ranks = new_secret(), f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
    with jobs_of(f"run {name_of(function)}", unless_named=True), ExitStack() as stack:
        channel = stack.enter_context(DriverChannel(secret, num_ranks, host=driver_hosts(session)))
        spec = LaunchSpec(
            job=f"sparkdl-{secrets.token_hex(8)}",
            num_ranks=num_ranks,
            secret=secret,
            payload=payload,
            driver=channel.address,
            transport=transport,
            wire=wire,
            gpus_per_rank=gpus_per_rank,
            num_threads=num_threads,
            mpi=mpi,
            environment=tuple((environment or {}).items()),
            modules=tuple(modules),
            versions=installed_versions(),
            start_timeout_s=start_timeout_s,
            operation_timeout_s=operation_timeout_s,
            hang_timeout_s=limits.hang_timeout_s,
            silence_timeout_s=limits.silence_timeout_s,
        )
        with named_jobs(session, ranks):
            job = SparkJob(session, spec, resources)
        try:
            guard = HangGuard(channel, limits)
            _watch(job, channel, guard, spec, start_timeout_s, Listener(on_log, on_event))
            guard.check()
            if job.running:
                # A rank failed, and the task of another rank hangs: the failures that were received suffice.
                channel.cancel(StopReason("a rank failed, and not all tasks ended in time"))
                job.cancel(timeout_s=CANCEL_TIMEOUT_S)
        except BaseException as error:
            channel.cancel(StopReason(f"the driver cancelled: {type(error).__name__}"))
            job.cancel(timeout_s=CANCEL_TIMEOUT_S)
            raise
        finally:
            _slot_holders.remove(spec.job)
            if job.running:
                _cancel_in_background(job, channel, stack.pop_all())
        try:
            with named_jobs(session, f"fetching results of {ranks}"):
                return collect(job, channel.failures, num_ranks, on_log or _print_line, limits)
        finally:
            job.close()


class Listener:
    """Passes log lines and events of the ranks to the caller's callbacks."""

    def __init__(self, on_log: OnLog | None, on_event: OnEvent | None) -> None:
        self._on_log = on_log or _print_line
        self._on_event = on_event

    def handle(self, message: RankMessage) -> None:
        """Pass on a log line or an event."""
        if message.line is not None:
            self._on_log(message.rank, message.line)
        elif message.event is not None and self._on_event is not None:
            self._on_event(message.rank, message.event)


def _watch(
    job: SparkJob,
    channel: DriverChannel,
    guard: HangGuard,
    spec: LaunchSpec,
    start_timeout_s: float,
    listener: Listener,
) -> None:
    start_deadline = time.monotonic() + start_timeout_s
    while job.running and not guard.is_overdue:
        message = channel.next_message(0.1)
        if message is not None:
            listener.handle(message)
        guard.poll()
        started = channel.started
        if len(started) == spec.num_ranks:
            _slot_holders.add(spec.job)
            continue
        if time.monotonic() < start_deadline:
            continue
        if _slot_holders.has_others(spec.job):
            _logger.info("%d ranks wait for slots that another launch of this process holds.", spec.num_ranks)
            start_deadline = time.monotonic() + start_timeout_s
            continue
        # Tasks may run without reaching the driver; Spark reports them.
        if job.tasks_run:
            start_deadline = math.inf
        elif job.running and time.monotonic() > start_deadline + STATUS_LAG_S:
            raise SlotsMissingError(
                f"{len(started)} of {spec.num_ranks} ranks had started after {start_timeout_s:g} s. "
                "Other jobs hold the free slots, or executors are missing: wait for them or start fewer ranks."
            )
    # A rank's last lines may still be on their way when its task has ended.
    deadline = time.monotonic() + (0.0 if guard.is_overdue else LAST_LINES_TIMEOUT_S)
    while True:
        channel.wait_until_disconnected(max(0.0, deadline - time.monotonic()))
        message = channel.next_message(0.0)
        if message is None:
            return
        listener.handle(message)


def _cancel_in_background(job: SparkJob, channel: DriverChannel, stack: ExitStack) -> None:
    """Continue to cancel a job that Spark has not ended, and make tasks that Spark still starts end at once."""
    _logger.warning(
        "Spark has not ended the job of this launch although it was cancelled. It is cancelled again every second, and "
        "ranks that start until then end without running the function."
    )
    channel.ignore_messages()
    job.cancel_in_background(stack.close)


def _print_line(rank: int, line: str) -> None:
    print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)
