"""Forkservers that are kept after a launch, so that the ranks of the next one start at once.

Runs in Spark's Python workers, and in the process that starts ranks of its own machine. A Python worker runs one task
after the other, and Spark ends it after a minute without tasks. Importing torch takes two seconds; if a forkserver is
kept, the ranks of the second fit do not wait for this. :func:`prepare_in_task` starts a forkserver in a Spark task
that runs before the ranks.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from sparkdl.cores import threads_of_task
from sparkdl.errors import LaunchError
from sparkdl.launch.forkserver.client import ForkserverConnection
from sparkdl.launch.forkserver.start import connect_or_start, start_if_first
from sparkdl.launch.rank.environment import rank_environment


class ForkserverKind(NamedTuple):
    """What ranks must have in common to be forked from one forkserver."""

    environment: Mapping[str, str]
    modules: tuple[str, ...]


_idle: list[tuple[ForkserverKind, ForkserverConnection]] = []
_lock = threading.RLock()
_num_requests = [0]
"""Number of ranks that were requested."""


def prepare_rank(kind: ForkserverKind) -> None:
    """Start a forkserver for the next rank of this kind, unless this executor has one."""
    with _lock:
        if all(other != kind for other, _ in _idle):
            forkserver = start_if_first(*kind)
            if forkserver is not None:
                keep(kind, forkserver)


def request_rank(
    kind: ForkserverKind, request: Mapping[str, Any], fds: Sequence[int]
) -> ForkserverConnection:
    """Send a request over an idle connection to a forkserver of this kind, or a new one, and return the connection.

    Raises:
        LaunchError: if a new forkserver cannot be started.
    """
    with _lock:
        _num_requests[0] += 1
        for kept in [kept for kept in _idle if kept[0] == kind]:
            _idle.remove(kept)
            forkserver = kept[1]
            try:
                forkserver.send(request, fds)
            except OSError:  # it was ended meanwhile
                forkserver.disconnect()
            else:
                return forkserver
    forkserver = connect_or_start(*kind)
    try:
        forkserver.send(request, fds)
    except OSError as error:
        how, output = forkserver.describe_exit(), forkserver.last_output()
        forkserver.disconnect()
        raise LaunchError(f"the forkserver {how} at once: {output}") from error
    return forkserver


def keep(kind: ForkserverKind, forkserver: ForkserverConnection) -> None:
    """Keep an idle connection for the next rank, and drop those of other kinds, as their forkservers use memory.

    There is one of a kind in a Python worker, and several for local ranks.
    """
    with _lock:
        for other, of_other in _idle:
            if other != kind:
                of_other.disconnect()
        _idle[:] = [(kind, forkserver), *(kept for kept in _idle if kept[0] == kind)]


def end_idle_forkservers(timeout_s: float) -> None:
    """End the kept forkservers if no rank is requested for this long; returns at once.

    This is for a launcher, which may run for days. A Python worker is ended by Spark.
    """
    num_requests = _num_requests[0]

    def end() -> None:
        with _lock:
            if _num_requests[0] == num_requests:
                _disconnect_idle()

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()


@atexit.register
def _disconnect_idle() -> None:
    for _, forkserver in _idle:
        forkserver.disconnect()
    _idle.clear()


os.register_at_fork(after_in_child=_idle.clear)


def prepare_in_task(
    partition: int, *, num_ranks: int, num_threads: int | None, modules: Sequence[str]
) -> None:
    """Start a forkserver for the next launch while another task runs; the ranks are then forked from it.

    This is for ranks without GPUs: the barrier task assigns GPUs later. If it fails, the launch raises the error.

    Args:
        partition: partition number of the task. Only the first ``num_ranks`` tasks start a forkserver, as there may be
            thousands of tasks.
        num_ranks: number of ranks of the next launch.
        num_threads: number of threads of each rank that the user chose; None for the cores of a task.
        modules: modules to import: those that :func:`~sparkdl.launch.run_on_ranks` will be called with.
    """
    if partition < num_ranks:
        from pyspark import TaskContext

        context = TaskContext.get()
        threads = threads_of_task(num_threads, context.cpus() if context is not None else 1)
        with suppress(LaunchError):  # the launch will raise it
            prepare_rank(ForkserverKind(rank_environment({}, gpus=None, num_threads=threads), tuple(modules)))
