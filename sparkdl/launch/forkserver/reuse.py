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


class _Kept(NamedTuple):
    kind: ForkserverKind
    forkserver: ForkserverConnection


_idle: list[_Kept] = []
_lock = threading.Lock()
_num_requests = [0]
"""Number of ranks that were requested."""


def prepare_rank(kind: ForkserverKind) -> None:
    """Start a forkserver for the next rank of this kind, unless this executor has one."""
    with _lock:
        if all(kept.kind != kind for kept in _idle):
            forkserver = start_if_first(*kind)
            if forkserver is not None:
                _keep_one_kind(_Kept(kind, forkserver))


def request_rank(
    kind: ForkserverKind, request: Mapping[str, Any], fds: Sequence[int]
) -> ForkserverConnection:
    """Send a request over an idle connection to a forkserver of this kind, or a new one, and return the connection.

    Raises:
        LaunchError: if a new forkserver cannot be started.
    """
    with _lock:
        _num_requests[0] += 1
        for kept in list(_idle):
            if kept.kind != kind:
                continue
            _idle.remove(kept)
            try:
                kept.forkserver.send(request, fds)
            except OSError:  # it was ended meanwhile
                kept.forkserver.disconnect()
            else:
                return kept.forkserver
    forkserver = connect_or_start(*kind)
    try:
        forkserver.send(request, fds)
    except OSError as error:
        how, output = forkserver.describe_exit(), forkserver.last_output()
        forkserver.disconnect()
        raise LaunchError(f"the forkserver {how} at once: {output}") from error
    return forkserver


def keep(kind: ForkserverKind, forkserver: ForkserverConnection) -> None:
    """Keep a forkserver whose rank has ended for the next rank, and drop those of other kinds, as they use memory."""
    with _lock:
        _keep_one_kind(_Kept(kind, forkserver))


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


def _keep_one_kind(kept: _Kept) -> None:
    """Keep an idle connection and those of its kind (one in a Python worker, several for local ranks); close others."""
    for other in _idle:
        if other.kind != kept.kind:
            other.forkserver.disconnect()
    _idle[:] = [kept, *(other for other in _idle if other.kind == kept.kind)]


@atexit.register
def _disconnect_idle() -> None:
    for kept in _idle:
        kept.forkserver.disconnect()
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
