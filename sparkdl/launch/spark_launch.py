"""Runs a function on ranks that are tasks of a Spark cluster, and returns the value of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.errors import count_of
from sparkdl.launch.hangs.watch import hang_limits
from sparkdl.launch.ranks import check_spec, run_spec
from sparkdl.launch.slots import OnWait, check_cluster
from sparkdl.launch.spark_job import SparkJob, driver_hosts
from sparkdl.launch.wire.messages import pickle_call
from sparkdl.launch.wire.spec import LaunchSpec
from sparkdl.spark.jobs import jobs_of, name_of
from sparkdl.spark.session import active_session, is_connect, task_cpus, threads_by_settings

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from sparkdl.launch.elastic.roster import ElasticLimits
    from sparkdl.launch.supervision import OnEvent, OnLog

_logger = logging.getLogger(__name__)


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
    elastic: ElasticLimits | None = None,
    leases: Iterator[str] | None = None,
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
        elastic: limits of an elastic launch, which begins with ``num_ranks`` ranks and continues while ranks are lost
            and others join; ``on_log`` and ``on_event`` then get the number of a member, which no other process has.
            None for a launch whose ranks start and end together.
        leases: names under which the successive worlds of an elastic launch use the folder of their checkpoints.
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
    spec = LaunchSpec(
        num_ranks=num_ranks,
        payload=pickle_call(function, args, kwargs),
        transport=transport,
        wire=wire,
        gpus_per_rank=gpus_per_rank,
        num_threads=threads_per_rank,
        mpi=mpi and elastic is None,
        environment=tuple((environment or {}).items()),
        modules=tuple(modules),
        start_timeout_s=start_timeout_s,
        limits=hang_limits(hang_timeout_s, operation_timeout_s, silence_timeout_s),
    )
    check_spec(spec, elastic)
    session = spark or active_session()
    check_cluster(
        session,
        num_ranks=num_ranks if elastic is None else elastic.least,
        gpus_per_rank=gpus_per_rank,
        resources=resources,
        start_timeout_s=start_timeout_s,
        on_wait=on_wait,
        is_barrier=elastic is None or elastic.is_barrier,
    )
    spec = replace(spec, num_threads=threads_per_rank or threads_by_settings(session))
    _logger.info(
        "Starting %d ranks with %s each.",
        num_ranks,
        count_of(spec.num_threads or task_cpus(session, resources), "thread"),
    )
    host = driver_hosts(session)
    with jobs_of(f"run {name_of(function)}", unless_named=True):
        if elastic is not None and is_connect(session):
            from sparkdl.launch.elastic.coordinating_task import can_reach_driver, run_members_from_task

            if not can_reach_driver(session, spec, host):
                return run_members_from_task(
                    session,
                    spec,
                    elastic,
                    resources=resources,
                    on_log=on_log,
                    on_event=on_event,
                    leases=leases,
                )
        return run_spec(
            lambda spec, _: SparkJob(session, spec, resources),
            spec,
            host=host,
            on_log=on_log,
            on_event=on_event,
            elastic=elastic,
            leases=leases,
        )
