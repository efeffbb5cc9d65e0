"""Checks on the driver, before anything is started, whether a cluster has a slot for every rank at once.

If slots are missing, the check waits for executors that Spark has yet to start: replacements of lost executors, and
executors that the settings request. :class:`Executors` holds their number.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.errors import LaunchError, ParamError, SlotsMissingError
from sparkdl.spark.session import is_connect, is_local, setting, task_cpus

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

EXECUTOR_PATIENCE_S = 30.0
"""How long after the application's start executors may still be registering."""

LOG_INTERVAL_S = 30.0
"""How often the wait for slots is logged while nothing changes."""

_POLL_S = 0.2
_EXECUTORS_S = 1.0
"""Seconds for which a list of the executors is reused: listing takes several calls to the JVM per executor."""

OnWait = Callable[[str], None]

_logger = logging.getLogger(__name__)


def check_cluster(
    spark: SparkSession,
    *,
    num_ranks: int,
    gpus_per_rank: int = 0,
    resources: ResourceProfile | None = None,
    start_timeout_s: float | None = None,
    on_wait: OnWait | None = None,
    is_barrier: bool = True,
) -> None:
    """Refuse a launch that Spark would refuse or never start, and name the setting to change.

    Args:
        spark: classic or Connect session.
        num_ranks: number of tasks that have to run at once.
        gpus_per_rank: number of GPUs that each rank sees.
        resources: resources of each task, if they differ from the application's default; None if they do not.
        start_timeout_s: seconds to wait for slots of executors that Spark has yet to start, such as replacements of
            lost ones; None leaves this wait to a later check and refuses only if there will never be enough slots.
        on_wait: called with a line that says what the check waits for; the line is also logged.
        is_barrier: whether the tasks are one barrier stage; False for tasks that start and end by themselves.

    Raises:
        ParamError: if ``resources`` requests executors, or fewer GPUs for a task than its rank is to have.
        SlotsMissingError: if the cluster cannot run that many tasks at once, even after the wait.
        LaunchError: if a local master has too few slots, executors are allocated dynamically, Spark leaves too little
            memory to Python processes (``spark.executor.pyspark.memory``), the session belongs to
            a Spark Connect server before 4.0, which cannot keep a stage's rows (``localCheckpoint``); or if
            ``resources`` is given with Spark before 4.0 or a local master, which do not support it.
    """
    if is_connect(spark) and int(spark.version.split(".")[0]) < 4:
        raise LaunchError(
            f"Ranks on Spark Connect need Spark 4.0 or later, and the server is Spark {spark.version}. "
            "Use a classic session there, or a newer server."
        )
    is_dynamic = setting(spark, "spark.dynamicAllocation.enabled").lower() == "true" and not is_local(spark)
    if is_dynamic and is_barrier:
        raise LaunchError(
            "Ranks start together in a barrier stage, which Spark does not run with dynamic allocation. "
            "Set spark.dynamicAllocation.enabled=false and spark.executor.instances for this application, or make "
            "the fit elastic (elastic=True), each rank with a model of its own."
        )
    check_memory(lambda name: setting(spark, name))
    if resources is not None:
        _check_resources(spark, resources, gpus_per_rank)
    if not is_dynamic:  # otherwise tasks that wait make Spark start executors
        _require_slots(spark, num_ranks, resources, start_timeout_s, on_wait)


def wait_for_slots(
    spark: SparkSession,
    wanted: int,
    *,
    timeout_s: float,
    resources: ResourceProfile | None = None,
    is_logged: bool = False,
) -> int | None:
    """Wait until the cluster has the wanted number of slots or the time is over, and return the number of slots.

    Args:
        spark: classic or Connect session.
        wanted: number of slots to wait for.
        timeout_s: seconds to wait for executors; with a local master there are none to wait for.
        resources: resources of each task, if they differ from the application's default; None if they do not.
        is_logged: whether to log a warning that says what this function waits for.

    Returns:
        The number of slots, free or not; None if Spark does not report it, as on most Connect servers.
    """
    cluster = _SlotCounter(spark, resources)
    wait_log = _WaitLog(wanted, timeout_s, None) if is_logged else None
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        slots = cluster.slots()
        if slots is None or slots >= wanted or not cluster.may_grow or time.monotonic() > deadline:
            return slots
        if wait_log is not None:
            wait_log.update(slots, cluster.executors())
        pause.wait(_POLL_S)


def _require_slots(
    spark: SparkSession,
    num_ranks: int,
    resources: ResourceProfile | None,
    start_timeout_s: float | None,
    on_wait: OnWait | None,
) -> None:
    cluster, began, pause = _SlotCounter(spark, resources), time.monotonic(), threading.Event()
    wait_log: _WaitLog | None = None
    while True:
        slots = cluster.slots()
        if slots is None or slots >= num_ranks:
            return
        executors, waited_s = cluster.executors(), time.monotonic() - began
        timeout_s = 0.0
        if cluster.may_grow:
            age_s = time.time() - float(spark.sparkContext.startTime or 0) / 1000
            timeout_s = max(0.0, EXECUTOR_PATIENCE_S - age_s)
        if executors.can_give(num_ranks, slots):
            if start_timeout_s is None:
                return
            timeout_s = max(waited_s + timeout_s, start_timeout_s)
        elif executors.most_slots is not None and num_ranks > executors.most_slots:
            timeout_s = 0.0
        else:
            timeout_s += waited_s
        if waited_s >= timeout_s:
            raise _slots_missing(spark, num_ranks, slots, executors, waited_s)
        wait_log = wait_log or _WaitLog(num_ranks, timeout_s, on_wait)
        wait_log.update(slots, executors)
        pause.wait(_POLL_S)


def _slots_missing(
    spark: SparkSession, num_ranks: int, slots: int, executors: Executors, waited_s: float
) -> LaunchError:
    kind = LaunchError if is_local(spark) else SlotsMissingError
    waited = f" after {waited_s:.0f} s of waiting" if waited_s >= 1 else ""
    lost = ""
    if executors.num_expected is not None and executors.num_active < executors.num_expected:
        lost = (
            f" Spark has {executors.num_active} of {executors.num_expected} executors: look at its UI for why "
            "others do not start."
        )
    lower = (
        f"Lower the number of ranks (numWorkers, num_workers or np) to {slots}, or raise"
        if slots
        else "Raise"
    )
    cpus = task_cpus(spark)
    fewer_cores = "" if cpus == 1 else f", or lower spark.task.cpus: each slot takes {cpus} cores"
    what = (
        f"N in the master {setting(spark, 'spark.master')!r}{fewer_cores}"
        if is_local(spark)
        else f"spark.executor.instances or spark.executor.cores{fewer_cores} (GPUs per task count too)"
    )
    return kind(
        f"{num_ranks} ranks need {num_ranks} slots at once and the cluster has {slots}{waited}.{lost} {lower} {what}."
    )


class _WaitLog:
    """Logs which slots a launch waits for: at once, when that changes, and every half minute."""

    def __init__(self, wanted: int, timeout_s: float, on_wait: OnWait | None) -> None:
        self._wanted, self._timeout_s, self._on_wait = wanted, timeout_s, on_wait
        self._logged: tuple[int, int] | None = None
        self._began = self._logged_at = time.monotonic()

    def update(self, slots: int, executors: Executors) -> None:
        now, state = time.monotonic(), (slots, executors.num_active)
        if state == self._logged and now - self._logged_at < LOG_INTERVAL_S:
            return
        self._logged, self._logged_at = state, now
        of_expected = "" if executors.num_expected is None else f" of {executors.num_expected}"
        text = (
            f"Waiting for {self._wanted - slots} of {self._wanted} slots: Spark has "
            f"{executors.num_active}{of_expected} executors, with {slots} slots; waited for "
            f"{now - self._began:.0f} s, for up to {self._timeout_s:.0f} s"
        )
        _logger.warning("%s.", text)
        if self._on_wait is not None:
            self._on_wait(text)


@dataclass(frozen=True, kw_only=True)
class Executors:
    """The executors of an application.

    Attributes:
        num_active: number of executors that are running.
        num_expected: number of executors that should be running: the number that the settings request or, if they do
            not say, the largest number that have run at once. None if neither is known.
        slots_of_each: number of slots per executor; 0 if it is not known.
        most_slots: largest number of slots that the settings allow for all executors; None if they do not say.
    """

    num_active: int = 0
    num_expected: int | None = None
    slots_of_each: int = 0
    most_slots: int | None = None

    def can_give(self, wanted: int, slots: int) -> bool:
        """Whether there will be as many slots as wanted once all expected executors are there."""
        if self.num_expected is None or (self.most_slots is not None and wanted > self.most_slots):
            return False
        per_executor = -(-slots // self.num_active) if self.num_active else self.slots_of_each
        return slots + (self.num_expected - self.num_active) * per_executor >= wanted


class _SlotCounter:
    """Counts slots and executors of a session."""

    def __init__(self, spark: SparkSession, resources: ResourceProfile | None) -> None:
        self._spark = spark
        self._master = setting(spark, "spark.master")
        local = re.fullmatch(r"local(?:\[(\d+|\*)(?:,\d+)?\])?", self._master)
        self._local_slots: int | None = None
        if local is not None and local[1] != "*":
            self._local_slots = int(local[1] or 1) // task_cpus(spark)
        self.may_grow = local is None
        self._known: Executors | None = None
        self._known_at = 0.0
        self._scheduler: Any = None
        if self._local_slots is None and not is_connect(spark):
            context: Any = spark.sparkContext
            self._scheduler = context._jsc.sc()
            manager = self._scheduler.resourceProfileManager()
            self._profile = manager.defaultResourceProfile()
            if resources is not None:
                self._profile = _java_profile(resources)
                manager.addResourceProfile(self._profile)

    def slots(self) -> int | None:
        """How many tasks can run at once; None if Spark does not report it, as on most Connect servers."""
        if self._local_slots is not None:
            return self._local_slots
        return None if self._scheduler is None else int(self._scheduler.maxNumConcurrentTasks(self._profile))

    def executors(self) -> Executors:
        """The running and the expected executors, as of at most a second ago."""
        if not self.may_grow:
            return Executors(num_active=1, num_expected=1, most_slots=self.slots())
        now = time.monotonic()
        if self._known is None or now - self._known_at > _EXECUTORS_S:
            self._known, self._known_at = self._list_executors(), now
        return self._known

    def _list_executors(self) -> Executors:
        lives = self._lives()
        asked = executors_by_settings(self._master, lambda name: setting(self._spark, name))
        num_expected = asked.num_expected if asked.num_expected is not None else most_at_once(lives)
        return replace(
            asked,
            num_active=sum(removed is None for _, removed, _ in lives),
            num_expected=num_expected or None,
            slots_of_each=asked.slots_of_each or max((tasks for _, _, tasks in lives), default=1),
        )

    def _lives(self) -> list[tuple[float, float | None, int]]:
        """For each executor that Spark remembers: when it was added and removed, and its number of slots."""
        listed = self._scheduler.statusStore().executorList(False)
        executors = [listed.apply(index) for index in range(listed.size())]
        return [
            (
                float(executor.addTime().getTime()),
                float(executor.removeTime().get().getTime()) if executor.removeTime().isDefined() else None,
                int(executor.maxTasks()),
            )
            for executor in executors
            if executor.id() != "driver"
        ]


def executors_by_settings(master: str, get: Callable[[str], str]) -> Executors:
    """Read the requested executors from the master and the settings.

    These are a master such as ``local-cluster[2,1,1024]``, ``spark.executor.instances`` and ``spark.cores.max``.

    Args:
        master: master of the application.
        get: function that returns the value of a setting, or an empty text if it is not set.
    """
    cpus = int(get("spark.task.cpus") or 1)
    simulated = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master)
    if simulated is not None:
        number, cores = simulated[1], simulated[2]
    elif master.startswith("spark://"):
        # A standalone master ignores spark.executor.instances, and its workers may have fewer cores than this limit.
        most_cores = get("spark.cores.max")
        return Executors(most_slots=int(most_cores) // cpus if most_cores else None)
    else:
        number, cores = get("spark.executor.instances"), get("spark.executor.cores")
    if not number:
        return Executors()
    per_executor = int(cores or 1) // cpus
    return Executors(
        num_expected=int(number), slots_of_each=per_executor, most_slots=int(number) * per_executor
    )


def most_at_once(lives: Iterable[tuple[float, float | None, int]]) -> int:
    """Return the largest number of executors that ran at once, from when each was added and removed."""
    changes = []
    for added, removed, _ in lives:
        changes.append((added, 1))
        if removed is not None:
            changes.append((removed, -1))
    number = most = 0
    for _, change in sorted(changes):  # at the same time, removals come first
        number += change
        most = max(most, number)
    return most


def _check_resources(spark: SparkSession, resources: ResourceProfile, gpus_per_rank: int) -> None:
    if int(spark.version.split(".")[0]) < 4:
        raise LaunchError(
            f"A ResourceProfile for ranks needs Spark 4.0 or later, and this is Spark {spark.version}. Omit resources, "
            "and set spark.task.cpus and spark.task.resource.gpu.amount for the application."
        )
    if resources.executorResources:
        named = ", ".join(sorted(resources.executorResources))
        raise ParamError(
            f"resources requests executors with {named}. Spark starts executors for a stage only with dynamic "
            "allocation, which barrier stages do not support. Use a profile that has only TaskResourceRequests."
        )
    if is_local(spark):
        raise LaunchError(
            f"The master {setting(spark, 'spark.master')!r} is one machine, where Spark has no resource "
            "profiles. Omit resources there."
        )
    gpus = resources.taskResources.get("gpu")
    if gpus is not None and gpus.amount < gpus_per_rank:
        raise ParamError(
            f"resources gives each task {gpus.amount:g} GPUs, and each rank is to have {gpus_per_rank}. "
            f'Use TaskResourceRequests().resource("gpu", {gpus_per_rank}).'
        )


_SIZES = {"": 20, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
"""Exponents of 2 of the units of Spark's sizes; a number without one is in MiB."""

NEEDED_BYTES = 5 << 29
"""Address space of a rank with torch: 2.5 GiB. Most of it are libraries that are mapped but not in memory."""


def check_memory(get: Callable[[str], str]) -> None:
    """Check that Spark's limit of the memory of Python workers, which their ranks inherit, leaves room for torch.

    Args:
        get: function that returns a Spark setting, or an empty text if it is not set.

    Raises:
        LaunchError: if the limit is too low; libraries then fail with errors such as "can't start new thread".
    """
    name = "spark.executor.pyspark.memory"
    size = re.fullmatch(r"(\d+)([bkmgtp]?)b?", get(name).strip().lower())
    if size is None:
        return
    cores = int(get("spark.executor.cores") or 1)  # Spark divides the memory by this number
    limit = (int(size[1]) << _SIZES[size[2]]) // cores
    if limit < NEEDED_BYTES:
        by = "" if cores == 1 else f" divided by spark.executor.cores={cores}"
        raise LaunchError(
            f"{name}={get(name)}{by} limits each Python process to {limit / 2**30:.1f} GiB of address space, and a "
            f"rank needs {NEEDED_BYTES / 2**30:g} GiB for torch, and more for its model and rows. Set it to "
            f"{4 * cores}g or more, or leave it out."
        )


def _java_profile(resources: ResourceProfile) -> Any:
    """The profile as a JVM object; for a profile that was made before the session, it is built from its requests."""
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    profile = resources._java_resource_profile
    if profile is None:
        requests = TaskResourceRequests(_requests=resources.taskResources)
        profile = ResourceProfileBuilder().require(requests).build._java_resource_profile
    return profile
