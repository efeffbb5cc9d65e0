"""Processes that ranks are forked from, kept for the next ranks, which then start at once.

Runs in the Python worker that runs a barrier task. Such a worker runs one task after the other, and Spark ends it
when it has been idle for a minute. Importing torch takes a rank two seconds; with a kept process, the second fit does
not wait for it. Spark tasks that run before the ranks can have a process import what the ranks need.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from sparkdl.errors import LaunchError
from sparkdl.launch.forkserver.client import RankNursery
from sparkdl.launch.forkserver.start import begin_nursery, reach_nursery
from sparkdl.launch.rank.environment import rank_environment


class Kind(NamedTuple):
    """What ranks have in common that can be forked from one process."""

    environment: Mapping[str, str]
    modules: tuple[str, ...]


class _Kept(NamedTuple):
    kind: Kind
    nursery: RankNursery


_idle: list[_Kept] = []
_choosing = threading.Lock()
_num_requests = [0]
"""How often a rank was wanted."""


def prepare_rank(kind: Kind) -> None:
    """Have a process import what the next rank of this kind needs, unless one of this executor does already."""
    with _choosing:
        if all(kept.kind != kind for kept in _idle):
            nursery = begin_nursery(*kind)
            if nursery is not None:
                _keep_alike(_Kept(kind, nursery))


def ask_nursery(kind: Kind, request: Mapping[str, Any], fds: Sequence[int]) -> RankNursery:
    """Send a request to an idle process that suits, or to another one, and return who got it.

    Raises:
        LaunchError: if a new one cannot be started.
    """
    with _choosing:
        _num_requests[0] += 1
        for kept in list(_idle):
            if kept.kind != kind:
                continue
            _idle.remove(kept)
            try:
                kept.nursery.ask(request, fds)
            except OSError:  # somebody ended it meanwhile
                kept.nursery.leave()
            else:
                return kept.nursery
    nursery = reach_nursery(*kind)
    try:
        nursery.ask(request, fds)
    except OSError as error:
        how, said = nursery.how_it_ended(), nursery.last_words()
        nursery.leave()
        raise LaunchError(f"the process that a rank is forked from {how} at once: {said}") from error
    return nursery


def give_back(kind: Kind, nursery: RankNursery) -> None:
    """Keep a process whose rank has ended for the next one, and none of another kind, as they hold memory."""
    with _choosing:
        _keep_alike(_Kept(kind, nursery))


def end_idle_processes(timeout_s: float) -> None:
    """End what is kept for later ranks when nobody has wanted one for so long; returns at once.

    For who starts ranks in a process that may live for days. A Python worker is itself ended by Spark.
    """
    num_requests = _num_requests[0]

    def end() -> None:
        with _choosing:
            if _num_requests[0] == num_requests:
                _leave_idle()

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()


def _keep_alike(kept: _Kept) -> None:
    """Keep a connection beside those for the same ranks: one in a Python worker, several where ranks are local."""
    for other in _idle:
        if other.kind != kept.kind:
            other.nursery.leave()
    _idle[:] = [kept, *(other for other in _idle if other.kind == kept.kind)]


@atexit.register
def _leave_idle() -> None:
    for kept in _idle:
        kept.nursery.leave()
    _idle.clear()


os.register_at_fork(after_in_child=_idle.clear)


def prepare_in_task(partition: int, *, num_ranks: int, modules: Sequence[str]) -> None:
    """Have a process import modules beside a task; the ranks that this executor runs next begin with it.

    Args:
        partition: number of the task. Later ones than there are ranks prepare nothing: there may be thousands of them.
        num_ranks: of the launch that follows, whose ranks have no GPUs: those are given them by their own task.
        modules: that :func:`~sparkdl.launch.run_on_ranks` is called with.
    """
    if partition < num_ranks:
        with suppress(LaunchError):  # the launch will tell
            prepare_rank(Kind(rank_environment({}, gpus=None), tuple(modules)))
