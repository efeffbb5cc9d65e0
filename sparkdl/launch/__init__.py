"""Runs a function on ranks: one process per slot of a Spark barrier stage, on classic Spark and Spark Connect.

Knows Spark and processes, not torch and not training. The driver calls :func:`run_on_ranks`, or
:func:`run_on_local_ranks` for processes of its own machine; in every rank process the function receives a
:class:`RankContext`. A rank of ``sparkdl run`` is a program instead, under the same supervision. Begin with
``supervision``, then ``task/barrier_task`` and ``rank/process``: what a launch does on the *driver*, in the *task* of
each rank and on the *rank*. Two modules start the tasks: ``spark_job`` in Spark, and ``local_launch`` as threads of the
driver. ``wire`` holds the messages between them. The modules of this package itself, not those of its folders, run on
the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.launch.lines import AlikeLines
from sparkdl.launch.restarts import Restarts, Start, hold_place, run_with_restarts
from sparkdl.launch.slots import check_cluster, wait_for_slots
from sparkdl.launch.spark_launch import run_on_ranks
from sparkdl.lazy import attributes
from sparkdl.spark.session import active_session

if TYPE_CHECKING:
    from sparkdl.launch.forkserver.reuse import prepare_in_task
    from sparkdl.launch.local_launch import run_on_local_ranks
    from sparkdl.launch.rank.context import RankContext

# Loaded on first use: a driver that uses Spark does not need them.
_MODULES = {
    "RankContext": ".rank.context",
    "prepare_in_task": ".forkserver.reuse",
    "run_on_local_ranks": ".local_launch",
}

__all__ = [
    "AlikeLines",
    "RankContext",
    "Restarts",
    "Start",
    "active_session",
    "check_cluster",
    "hold_place",
    "prepare_in_task",
    "run_on_local_ranks",
    "run_on_ranks",
    "run_with_restarts",
    "wait_for_slots",
]


__getattr__, __dir__ = attributes(__name__, _MODULES)
