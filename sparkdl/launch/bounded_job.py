"""A Spark job that may take only so long: it is cancelled then, and nobody waits for it. Runs on the *driver*."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from sparkdl.errors import LaunchError
from sparkdl.launch.preflight import is_connect
from sparkdl.launch.spark_job import inheriting_thread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


def collect_within(spark: SparkSession, frame: DataFrame, timeout_s: float) -> list[Row]:
    """Collect a DataFrame.

    Raises:
        LaunchError: if that takes longer; the job is cancelled.
        Exception: what Spark raises.
    """
    tag = f"sparkdl-{secrets.token_hex(8)}"
    tagging: Any = spark if is_connect(spark) else spark.sparkContext
    add, remove = ("addTag", "removeTag") if is_connect(spark) else ("addJobTag", "removeJobTag")
    outcome: list[Any] = []

    def run() -> None:
        getattr(tagging, add)(tag)
        try:
            outcome.append(frame.collect())
        except Exception as error:
            outcome.append(error)
        finally:
            getattr(tagging, remove)(tag)

    thread = inheriting_thread(spark, run)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        if is_connect(spark):
            spark.interruptTag(tag)
        else:
            spark.sparkContext.cancelJobsWithTag(tag)
        raise LaunchError(
            f"the cluster had not run the tasks within {timeout_s:g} s: other jobs hold its slots, or executors are "
            "missing"
        )
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    rows: list[Row] = outcome[0]
    return rows
