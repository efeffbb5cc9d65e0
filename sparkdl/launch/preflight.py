"""Checks on the driver, before anything is started, whether the cluster can hold the ranks at once."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any

from sparkdl.errors import LaunchError, ParamError, SlotsMissingError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

EXECUTOR_PATIENCE_S = 30.0
"""How long after the application's start executors may still be registering."""


def is_connect(spark: SparkSession) -> bool:
    """Whether the session talks to a Spark Connect server."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def check_cluster(
    spark: SparkSession, *, num_ranks: int, gpus_per_rank: int, resources: ResourceProfile | None = None
) -> None:
    """Refuse what Spark would refuse or wait for without an end, and name the setting to change.

    Raises:
        ParamError: if ``num_ranks`` or ``gpus_per_rank`` is out of range, or ``resources`` ask for executors or for
            fewer GPUs than a rank is to have.
        SlotsMissingError: if the cluster cannot run that many tasks at once now.
        LaunchError: if a single machine cannot ever, executors are allocated dynamically, or it is a Spark Connect
            server before 4.0, which cannot keep a stage's rows (``localCheckpoint``).
    """
    if num_ranks < 1:
        raise ParamError(f"The number of ranks must be at least 1, got {num_ranks}.")
    if gpus_per_rank < 0:
        raise ParamError(f"The number of GPUs per rank cannot be negative, got {gpus_per_rank}.")
    if is_connect(spark) and int(spark.version.split(".")[0]) < 4:
        raise LaunchError(
            f"Ranks on Spark Connect need Spark 4.0 or later, and the server is Spark {spark.version}. "
            "Use a classic session there, or a newer server."
        )
    if _setting(spark, "spark.dynamicAllocation.enabled", "false").lower() == "true":
        raise LaunchError(
            "Ranks start together in a barrier stage, which Spark does not run with dynamic allocation. "
            "Set spark.dynamicAllocation.enabled=false and spark.executor.instances for this application."
        )
    if resources is not None:
        _check_resources(spark, resources, gpus_per_rank)
    slots = _count_slots(spark, num_ranks, resources)
    if slots is not None and slots < num_ranks:
        kind = LaunchError if _is_local(spark) else SlotsMissingError
        raise kind(
            f"{num_ranks} ranks need {num_ranks} slots at once and the cluster has {slots}. "
            f"Lower the number of ranks (numWorkers, num_workers or np) to {slots}, or raise {_what_to_raise(spark)}."
        )


def wait_for_slots(
    spark: SparkSession, wanted: int, *, timeout_s: float, resources: ResourceProfile | None = None
) -> int | None:
    """Return how many tasks the cluster runs at once, as soon as that is enough, or after so many seconds.

    Args:
        spark: classic or Connect session.
        wanted: how many are enough.
        timeout_s: how long executors may take to come; one that stands on a single machine has no others.
        resources: what a task takes, where that differs from what all tasks of the application take.

    Returns:
        The number of slots, free or not; None where Spark does not say, as on most Connect servers.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        slots = _count_slots(spark, 0, resources)
        is_settled = slots is None or slots >= wanted or _is_local(spark)
        if is_settled or time.monotonic() > deadline:
            return slots
        pause.wait(0.2)


def _is_local(spark: SparkSession) -> bool:
    return re.fullmatch(r"local(\[.*\])?", _setting(spark, "spark.master", "")) is not None


def _check_resources(spark: SparkSession, resources: ResourceProfile, gpus_per_rank: int) -> None:
    if int(spark.version.split(".")[0]) < 4:
        raise LaunchError(
            f"A ResourceProfile for ranks needs Spark 4.0 or later, and this is Spark {spark.version}. Leave resources "
            "away, and set spark.task.cpus and spark.task.resource.gpu.amount for the application."
        )
    if resources.executorResources:
        named = ", ".join(sorted(resources.executorResources))
        raise ParamError(
            f"resources asks for executors with {named}, and Spark makes executors for a stage only with dynamic "
            "allocation, with which no barrier stage runs. Use a profile of TaskResourceRequests alone."
        )
    if _is_local(spark):
        raise LaunchError(
            f"The master {_setting(spark, 'spark.master', '')!r} is one machine, where Spark knows no resource "
            "profiles. Leave resources away there."
        )
    gpus = resources.taskResources.get("gpu")
    if gpus is not None and gpus.amount < gpus_per_rank:
        raise ParamError(
            f"resources gives each task {gpus.amount:g} GPUs, and each rank is to have {gpus_per_rank}. "
            f'Use TaskResourceRequests().resource("gpu", {gpus_per_rank}).'
        )


def _count_slots(spark: SparkSession, wanted: int, resources: ResourceProfile | None = None) -> int | None:
    """How many tasks run at once; None where Spark does not say, as on most Connect servers."""
    local = re.fullmatch(r"local(?:\[(\d+|\*)(?:,\d+)?\])?", _setting(spark, "spark.master", ""))
    if local is not None and local[1] != "*":
        return int(local[1] or 1) // int(_setting(spark, "spark.task.cpus", "1"))
    if is_connect(spark):
        return None
    context: Any = spark.sparkContext
    scheduler = context._jsc.sc()
    manager = scheduler.resourceProfileManager()
    profile = manager.defaultResourceProfile()
    if resources is not None:
        profile = _java_profile(resources)
        manager.addResourceProfile(profile)
    pause = threading.Event()
    while True:
        slots = int(scheduler.maxNumConcurrentTasks(profile))
        age_s = time.time() - context.startTime / 1000
        if slots >= wanted or local is not None or age_s > EXECUTOR_PATIENCE_S:
            return slots
        pause.wait(0.2)


def _java_profile(resources: ResourceProfile) -> Any:
    """The profile in the JVM; one that was made before the session has only its requests."""
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    found = resources._java_resource_profile
    if found is None:
        requests = TaskResourceRequests(_requests=resources.taskResources)
        found = ResourceProfileBuilder().require(requests).build._java_resource_profile
    return found


def _what_to_raise(spark: SparkSession) -> str:
    master = _setting(spark, "spark.master", "")
    if master.startswith("local["):
        return f"N in the master {master!r}"
    return "spark.executor.instances or spark.executor.cores (spark.task.cpus and GPUs per task count too)"


def _setting(spark: SparkSession, name: str, default: str) -> str:
    if is_connect(spark):
        return spark.conf.get(name, default) or default
    return str(spark.sparkContext.getConf().get(name, default))
