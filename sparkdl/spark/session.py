"""The caller's Spark session: the active session, whether it is of Spark Connect or was stopped, and its settings."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from sparkdl.cores import THREADS, chosen_threads
from sparkdl.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


def active_session() -> SparkSession:
    """Return the active Spark session of this thread, or else the one that was created last, in any thread.

    Raises:
        LaunchError: if there is none.
    """
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    with suppress(PySparkRuntimeError):
        session = SparkSession.active()
        if not is_session_stopped(session):
            return session
    raise LaunchError("There is no active Spark session. Create one first, or pass it as spark=.")


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is one of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_session_stopped(spark: SparkSession) -> bool:
    """Whether a session was stopped, by ``stop()`` or with its application."""
    return bool(cast("Any", spark).is_stopped) if is_connect(spark) else is_context_stopped(spark)


def is_context_stopped(spark: SparkSession) -> bool:
    """Whether the context of a classic session was stopped, or its JVM does not answer."""
    context: Any = spark.sparkContext
    if context._jsc is None:
        return True
    try:
        return bool(context._jsc.sc().isStopped())
    except Exception:  # of py4j, whose connection to the JVM is closed
        return True


def setting(spark: SparkSession, name: str) -> str:
    """Return a setting of the application; empty if it is not set, or the server does not return it."""
    if not is_connect(spark):
        return str(spark.sparkContext.getConf().get(name, ""))
    from pyspark.errors import PySparkException

    try:
        return spark.conf.get(name, "") or ""
    except PySparkException:  # managed servers do not return some settings
        return ""


def is_local(spark: SparkSession) -> bool:
    """Whether the master is ``local``: executors are threads of the driver's process."""
    return re.fullmatch(r"local(\[.*\])?", setting(spark, "spark.master")) is not None


def task_cpus(spark: SparkSession, resources: ResourceProfile | None = None) -> int:
    """Return the number of cores that Spark reserves for each task."""
    asked = None if resources is None else resources.taskResources.get("cpus")
    return int(setting(spark, "spark.task.cpus") or 1) if asked is None else int(asked.amount)


def shares_gpus(spark: SparkSession) -> bool:
    """Whether a task gets a part of a GPU, so that several tasks use it at once."""
    amount = setting(spark, "spark.task.resource.gpu.amount")
    return bool(amount) and 0 < float(amount) < 1


def default_parallelism(spark: SparkSession) -> int | None:
    """Return ``spark.default.parallelism``, by default the number of cores; None if a Connect server does not tell."""
    if not is_connect(spark):
        return int(spark.sparkContext.defaultParallelism)
    number = setting(spark, "spark.default.parallelism")
    return int(number) if number else None


def threads_by_settings(spark: SparkSession) -> int | None:
    """Return the number of threads that the user chose for all tasks by ``OMP_NUM_THREADS``; None if there is none.

    Executors cannot tell: Spark sets this variable in its Python workers unless it is in ``spark.executorEnv``. With a
    master on the driver's machine, which includes ``local-cluster``, the driver's own environment counts, too.
    """
    chosen = chosen_threads({THREADS: setting(spark, f"spark.executorEnv.{THREADS}")})
    if chosen is None and setting(spark, "spark.master").startswith("local"):
        chosen = chosen_threads(os.environ)
    return chosen
