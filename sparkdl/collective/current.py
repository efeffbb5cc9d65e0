"""The job and the communicator of this process, provided by a launcher or found from the environment.

For code to which neither is passed as an argument. A launcher may also provide a log on the driver and
send events there, and says when the program has ended. Ranks that ``mpiexec`` started find each other through MPI,
regardless of the transport that carries their data afterwards. If no launcher has provided a job, the process finds its
job by its environment variables.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.job import RankJob, enter_job, find_all, host_job, join_job
from sparkdl.collective.mpi.library import library_name, load_mpi
from sparkdl.collective.torchrun_variables import is_torchruns
from sparkdl.errors import CommunicatorTimeoutError, LaunchError
from sparkdl.rendezvous.addresses import LOOPBACK
from sparkdl.rendezvous.deadline import Deadline

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator
    from sparkdl.rendezvous.store import Rendezvous


_VARIABLES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
"""Variables with a rank and the world size: of Open MPI, and of MPICH and libraries derived from it."""

_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables of the same libraries with the number of ranks on this machine."""

_INVITATION_BYTES = 8192
_MEET_TIMEOUT_S = 300.0
_NAP_S = 1e-3
"""Pause between two polls: MPI's own waits have no deadline."""


def find_mpi_world(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    """Return a function that opens the communicator of the ranks of ``mpiexec``; None if it did not start this process.

    Raises:
        LaunchError: if only some of the variables of ``mpiexec`` are set.
    """
    for names in _VARIABLES:
        values = find_all(environ, names, "Start ranks by mpiexec, which sets both.")
        if values is not None:
            return partial(_open, int(values[1]), names[1], environ)
    return None


def _open(size: int, variable: str, environ: Mapping[str, str]) -> Communicator:
    is_open_mpi = variable.startswith("OMPI_")
    if is_open_mpi != ("Open MPI" in library_name()):
        # With another launcher, MPICH would end the process here, and Open MPI would see a world of one rank.
        raise LaunchError(_wrong_library(size, variable))
    world = load_mpi().COMM_WORLD
    if world.Get_size() != size:
        raise LaunchError(f"{_wrong_library(size, variable)} It sees a world of {world.Get_size()}.")

    def broadcast(invitation: bytes) -> bytes:
        buffer = np.zeros(_INVITATION_BYTES, np.uint8)
        buffer[: len(invitation)] = np.frombuffer(invitation, np.uint8)
        request = world.Ibcast(buffer, 0)
        deadline = Deadline(_MEET_TIMEOUT_S)
        while not request.Test():
            if deadline.expired:
                raise CommunicatorTimeoutError(
                    f"not all {size} ranks asked for their communicator within {_MEET_TIMEOUT_S:g} s. Call "
                    "current_communicator() on every rank."
                )
            time.sleep(_NAP_S)
        return buffer.tobytes().rstrip(b"\0")

    is_one_machine = any(environ.get(name) == str(size) for name in _LOCAL_SIZES)
    host = LOOPBACK if is_one_machine else None
    return host_job(world.Get_rank(), size, broadcast, environ, host=host)


def _wrong_library(size: int, variable: str) -> str:
    return (
        f"{variable}={size} comes from another MPI than {library_name()}, which mpi4py has loaded here. Use the"
        " mpiexec of that library, or name the right one in MPI4PY_LIBMPI."
    )


Finder = Callable[[Mapping[str, str]], "Callable[[], Communicator] | None"]
"""Takes environment variables; returns a function that opens the communicator of all ranks, or None."""

finders: list[Finder] = []
"""Finders that other packages have added, for the variables of further launchers."""


def find_own_job(environ: Mapping[str, str]) -> RankJob | None:
    """Return the job of ``sparkdl run`` in which this process is a rank; None if there is none.

    Raises:
        LaunchError: if only some of its variables are set; the message names the missing ones.
    """
    if is_torchruns(environ):
        return None  # a rank of sparkdl ran torchrun, whose ranks inherit the variables of sparkdl
    return RankJob.from_variables(environ)


_sources: list[tuple[Callable[[], Communicator], Callable[[], Communicator | None]]] = []
"""At most one entry: functions that return the communicator of this process, opened if need be, and as it is."""

_lock = threading.RLock()


def current_communicator() -> Communicator | None:
    """Return the communicator of all ranks of this job, opened at the first call; None outside a rank.

    A process that was started by ``sparkdl run``, by ``mpiexec`` or, if :mod:`sparkdl.torch` is imported, by
    ``torchrun`` finds the other ranks by its environment variables; all ranks have to call this. The process leaves
    the job when it ends.

    Raises:
        LaunchError: if only some of a launcher's variables are set; the message names the missing ones.
    """
    with _lock:
        if not _sources:
            if not finders and is_torchruns(os.environ):
                raise LaunchError(
                    "torchrun started this process: import sparkdl.torch, which knows torchrun's variables."
                )
            job = find_own_job(os.environ)
            # mpiexec last, as all child processes inherit its variables.
            openers = (finder(os.environ) for finder in (*finders, find_mpi_world))
            opener = partial(join_job, job) if job else next(filter(None, openers), None)
            if opener is None:
                return None
            set_current_communicator(opener())
        return _sources[0][0]()


def communicator_for(who: str, given: Communicator | None = None) -> Communicator:
    """Return the communicator that was given to ``who``, or else the current one.

    Raises:
        LaunchError: if there is none, or only some of a launcher's variables are set.
    """
    communicator = given or current_communicator()
    if communicator is None:
        raise LaunchError(
            f"{who} found no communicator: this process was not started as a rank. Run the training function by "
            "sparkdl.Runner, or the script by `sparkdl run`, mpiexec or torchrun."
        )
    return communicator


def provided_communicator() -> Communicator | None:
    """Return the current communicator if it is open, else None; does not wait for other ranks."""
    sources = tuple(_sources)  # which another thread may empty
    if not sources:
        return None
    _, as_it_is = sources[0]
    return as_it_is()


def provide_communicator(
    open_once: Callable[[], Communicator], as_it_is: Callable[[], Communicator | None]
) -> None:
    """Set the function that opens the communicator of this process at its first call, and then returns it.

    The other one returns it if it is open, and None otherwise: other threads call that, and must never open one.
    """
    _sources[:] = [(open_once, as_it_is)]


def set_current_communicator(communicator: Communicator | None) -> None:
    """Set the communicator of this process; None after it was closed."""
    _sources[:] = [] if communicator is None else [(lambda: communicator, lambda: communicator)]


_ends: list[Callable[[], object]] = []
"""What is called when the program of this rank has ended."""


def at_end(function: Callable[[], object]) -> None:
    """Call a function when the program of this rank has ended, at the latest when the process exits.

    Functions are called in reverse order, and each only once. After an exception a launcher's ranks are ended without
    them.
    """
    if function not in _ends:
        _ends.append(function)
    atexit.unregister(end_program)
    atexit.register(end_program)  # again, so that it runs before what was registered in the meantime


def cancel_at_end(function: Callable[[], object]) -> None:
    """Undo :func:`at_end`."""
    if function in _ends:
        _ends.remove(function)


def end_program() -> None:
    """Call the functions given to :func:`at_end`. For launchers of ranks, before they close the communicator."""
    while _ends:
        _ends.pop()()


os.register_at_fork(after_in_child=_ends.clear)  # what was begun is the parent's


@dataclass(frozen=True)
class Worlds:
    """How the ranks of an elastic launch form another world.

    Attributes:
        has_state: returns whether rank 0 of the current world has a state that the others take over.
        is_to_leave: returns whether other ranks wait to join; ranks learn this at different times.
        meet_again: leaves the current world for a reason, and waits for the next one; its second argument says how far
            this rank's state has come: the rank that has come farthest is rank 0 of the next world.
    """

    has_state: Callable[[], bool]
    is_to_leave: Callable[[], bool]
    meet_again: Callable[[str, int], None]


@dataclass
class Provided:
    """What the launcher of this process has provided.

    Attributes:
        job: the job, and the rendezvous that is connected to its coordinator; None without a launcher.
        worlds: how this process changes its world; None if the ranks stay together.
        driver_log: prints a message on the driver, even if other output of the ranks is not shown there.
        report: sends an event to the driver, whose values JSON can encode; nothing is sent without a driver.
    """

    job: tuple[RankJob, Rendezvous] | None = None
    worlds: Worlds | None = None
    driver_log: Callable[[str], None] = print
    report: Callable[[dict[str, Any]], None] = field(default=lambda _: None)


provided = Provided()


def current_job() -> RankJob | None:
    """Return the job in which sparkdl started this process as a rank; None elsewhere, also in a rank of ``torchrun``.

    Raises:
        LaunchError: if only some of the variables of ``sparkdl run`` are set; the message names the missing ones.
    """
    return find_own_job(os.environ) if provided.job is None else provided.job[0]


def job_rendezvous(job: RankJob) -> Rendezvous:
    """Return the rendezvous of the current job, connected at the first call. Other ranks need not make this call.

    Raises:
        ConnectionError: if the coordinator cannot be reached.
        SparkdlError: if the coordinator has another secret, or has ended.
    """
    return enter_job(job).client if provided.job is None else provided.job[1]
