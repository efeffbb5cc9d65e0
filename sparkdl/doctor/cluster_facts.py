"""Collects facts about every executor of a cluster, by a barrier stage that takes all of its slots.

The tasks of the stage call :func:`look_from_task` on the executors; the first task of each executor collects the facts.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparkdl.doctor.machine_facts import MachineFacts, look_around
from sparkdl.launch.spark_job import collect_within
from sparkdl.spark.jobs import named_jobs

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import BarrierTaskContext
    from pyspark.sql import SparkSession


def look_at_executors(
    spark: SparkSession, num_tasks: int, *, timeout_s: float
) -> list[tuple[MachineFacts, int]]:
    """Run tasks at the same time; return facts and number of tasks of every executor that runs at least one of them.

    Args:
        spark: classic or Connect session.
        num_tasks: number of tasks; the number of slots of the cluster, so that no executor is left out.
        timeout_s: maximal seconds of the stage, and of each query on an executor, where it is at most 20.

    Raises:
        LaunchError: if the stage takes longer, for example because there are no free slots.
        Exception: any exception of Spark, if its Python workers cannot run.
    """
    tasks = spark.range(0, num_tasks, 1, num_tasks).mapInArrow(
        _look(min(timeout_s, 20.0)), "facts string", barrier=True
    )
    with named_jobs(spark, "looking at the executors"):
        rows = collect_within(spark, tasks, timeout_s)
    facts = [json.loads(row["facts"]) for row in rows]
    names = [fact["executor"] for fact in facts]
    return [
        (MachineFacts.from_fields(fact["facts"]), names.count(fact["executor"]))
        for fact in facts
        if fact["facts"] is not None
    ]


def _look(timeout_s: float) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that Spark pickles; it captures only a number."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass  # the rows only number the tasks
        facts: dict[str, Any] = look_from_task(BarrierTaskContext.get(), timeout_s)
        yield pa.RecordBatch.from_arrays([pa.array([json.dumps(facts)], pa.string())], names=["facts"])

    return run


def look_from_task(context: BarrierTaskContext, timeout_s: float) -> dict[str, Any]:
    """Return the name of the executor, and its facts if this is the first task of the executor, else None."""
    # The Python workers of an executor are forked from one process.
    executor = f"{socket.gethostname()} {os.getppid()}"
    executors = context.allGather(executor)
    is_first = executors.index(executor) == context.partitionId()
    facts = asdict(look_around(timeout_s=timeout_s)) if is_first else None
    return {"executor": executor, "facts": facts}
