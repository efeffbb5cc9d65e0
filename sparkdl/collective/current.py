"""The job and the communicator of this process, for code that was handed none: provided by a launcher, or found."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkdl.collective.discovery import find_job, find_own_job
from sparkdl.collective.membership import enter_job

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.job import Job
    from sparkdl.collective.rendezvous import Rendezvous

_sources: list[tuple[Callable[[], Communicator], Callable[[], bool]]] = []
"""Holds what gives the communicator of this process, if there is one, and says whether it is open."""

_jobs: list[tuple[Job, Rendezvous]] = []
"""Holds the job that a launcher has provided, with its rendezvous."""

_lock = threading.RLock()


def current_communicator() -> Communicator | None:
    """The communicator over all ranks of this job, opened now if it was not yet; None outside a rank.

    A process that ``sparkdl run``, ``mpiexec`` or, where :mod:`sparkdl.torch` is imported, ``torchrun`` started finds
    the others by its environment variables; all of them have to ask. It leaves the job when it ends.

    Raises:
        LaunchError: if a launcher's variables are there only in part; the message names the missing ones.
    """
    with _lock:
        if not _sources:
            find = find_job(os.environ)
            if find is None:
                return None
            set_current_communicator(find())
        return _sources[0][0]()


def provided_communicator() -> Communicator | None:
    """The current communicator, if it is open; no other rank is waited for."""
    if not _sources:
        return None
    get, is_open = _sources[0]
    return get() if is_open() else None


def provide_communicator(open_once: Callable[[], Communicator], is_open: Callable[[], bool]) -> None:
    """Have the communicator of this process opened by ``open_once`` when somebody asks for it first."""
    _sources[:] = [(open_once, is_open)]


def set_current_communicator(communicator: Communicator | None) -> None:
    """Make ``communicator`` the one of this process; None when it is closed."""
    _sources[:] = [] if communicator is None else [(lambda: communicator, lambda: True)]


def current_job() -> Job | None:
    """The job of which a launcher of ours made this process a rank; None elsewhere, also in a rank of ``torchrun``.

    Raises:
        LaunchError: if the variables of ``sparkdl run`` are there only in part; the message names the missing ones.
    """
    return _jobs[0][0] if _jobs else find_own_job(os.environ)


def job_rendezvous(job: Job) -> Rendezvous:
    """The rendezvous of the current job, connected to now if it was not yet. Other ranks need not ask for it.

    Raises:
        ConnectionError: if the coordinator cannot be reached.
        SparkdlError: if it has another secret, or is gone.
    """
    if _jobs:
        return _jobs[0][1]
    return enter_job(job)


def provide_job(job: Job, rendezvous: Rendezvous) -> None:
    """Make ``job`` the one of this process, which is connected to its coordinator."""
    _jobs[:] = [(job, rendezvous)]
