"""Ranks that ``mpiexec`` started: they find each other through MPI, whatever carries their data then. Runs on ranks."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.addresses import LOOPBACK
from sparkdl.collective.deadline import Deadline
from sparkdl.collective.job import find_all
from sparkdl.collective.membership import host_job
from sparkdl.collective.mpi_library import library_name, load_mpi
from sparkdl.errors import CommunicatorTimeoutError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sparkdl.collective.communicator import Communicator

_VARIABLES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
"""What Open MPI tells its processes, and what MPICH and its relatives do."""

_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""How many ranks this machine has, in their words."""

_INVITATION_BYTES = 8192
_MEET_TIMEOUT_S = 300.0
_NAP_S = 1e-3
"""Between two questions whether it has come: MPI's own waits have no deadline."""


def find_mpi_world(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    """What opens the communicator of the ranks that an ``mpiexec`` started together with this one; None without one.

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
