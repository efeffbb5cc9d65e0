"""The job and the communicator of this process, provided by a launcher or found from the environment.

For code that was passed neither of them. Runs on ranks. Ranks that ``mpiexec`` started find each other through MPI,
whichever transport carries their data afterwards. A process to which no launcher provided a job finds the job that it
is a rank of by its environment variables.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.job import Job, enter_job, find_all, host_job, join_job
from sparkdl.collective.mpi.library import library_name, load_mpi
from sparkdl.collective.torchrun_variables import is_torchruns
from sparkdl.errors import CommunicatorTimeoutError, LaunchError
from sparkdl.rendezvous.addresses import LOOPBACK
from sparkdl.rendezvous.deadline import Deadline

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator
    from sparkdl.rendezvous.store import Rendezvous


_VARIABLES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
"""The variables of Open MPI, and those of MPICH and libraries derived from it."""

_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Their variables for the number of ranks on this machine."""

_INVITATION_BYTES = 8192
_MEET_TIMEOUT_S = 300.0
_NAP_S = 1e-3
"""Pause between two polls: MPI's own waits have no deadline."""


def find_mpi_world(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    """A function that opens the communicator of the ranks that ``mpiexec`` started; None if it did not start this one.

    Raises:
        LaunchError: if variables are missing that it sets.
    """
    for names in _VARIABLES:
        found = find_all(environ, names, "Start ranks by mpiexec, which sets both.")
        if found is not None:
            return partial(_open, int(found[1]), names[1], environ)
    return None


def _open(size: int, variable: str, environ: Mapping[str, str]) -> Communicator:
    is_open_mpi = variable.startswith("OMPI_")
    if is_open_mpi != ("Open MPI" in library_name()):
        # MPICH would end the process here, and Open MPI take it for a world of one.
        raise LaunchError(_wrong_library(size, variable))
    world = load_mpi().COMM_WORLD
    if world.Get_size() != size:
        raise LaunchError(f"{_wrong_library(size, variable)} It sees a world of {world.Get_size()}.")

    def spread(invitation: bytes) -> bytes:
        buffer = np.zeros(_INVITATION_BYTES, np.uint8)
        buffer[: len(invitation)] = np.frombuffer(invitation, np.uint8)
        request = world.Ibcast(buffer, 0)
        deadline = Deadline(_MEET_TIMEOUT_S)
        while not request.Test():
            if deadline.expired:
                raise CommunicatorTimeoutError(
                    f"not all {size} ranks asked for their communicator within {_MEET_TIMEOUT_S:g} s"
                )
            time.sleep(_NAP_S)
        return buffer.tobytes().rstrip(b"\0")

    is_one_machine = any(environ.get(name) == str(size) for name in _LOCAL_SIZES)
    host = LOOPBACK if is_one_machine else None
    return host_job(world.Get_rank(), size, spread, environ, host=host)


def _wrong_library(size: int, variable: str) -> str:
    return (
        f"{variable}={size} comes from another MPI than {library_name()}, which mpi4py has loaded here. Use the"
        " mpiexec of that library, or name the right one in MPI4PY_LIBMPI."
    )


Finder = Callable[[Mapping[str, str]], "Callable[[], Communicator] | None"]
"""Takes environment variables; returns a function that opens the communicator of all ranks, or None."""

_added: list[Finder] = []


def add_finder(finder: Finder) -> None:
    """Add a finder for another launcher's variables. Idempotent."""
    if finder not in _added:
        _added.append(finder)


def find_job(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    """A function that opens the communicator of the job that this process is a rank of; None outside a job.

    ``sparkdl run`` is looked for first and ``mpiexec`` last, whose variables all child processes inherit.

    Raises:
        LaunchError: if a launcher's variables are there only in part; the message names the missing ones.
    """
    for finder in (_find_own, *_added, find_mpi_world):
        opener = finder(environ)
        if opener is not None:
            return opener
    return None


def find_own_job(environ: Mapping[str, str]) -> Job | None:
    """The job that ``sparkdl run`` made this process a rank of; None if it did not.

    Raises:
        LaunchError: if some of its variables are missing; the message names them.
    """
    if is_torchruns(environ):
        return None  # inside a rank of ours it has started ranks of its own, which inherit our variables
    return Job.from_variables(environ)


def _find_own(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    if not _added and is_torchruns(environ):
        raise LaunchError(
            "torchrun started this process: import sparkdl.torch, which knows torchrun's variables."
        )
    job = find_own_job(environ)
    return None if job is None else partial(join_job, job)


_sources: list[tuple[Callable[[], Communicator], Callable[[], bool]]] = []
"""At most one entry: returns the communicator of this process, and whether it is open."""

_jobs: list[tuple[Job, Rendezvous]] = []
"""At most one entry: the job that a launcher has provided, and its rendezvous."""

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
    """Have the communicator of this process opened by ``open_once`` at the first use."""
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
