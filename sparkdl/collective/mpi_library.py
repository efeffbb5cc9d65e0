"""The MPI library of this process: the one module that imports mpi4py (others only name its types). Runs on ranks."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from sparkdl.errors import CommunicatorError, TransportUnavailableError

if TYPE_CHECKING:
    from types import ModuleType

unfinished: set[object] = set()
"""Communicators that are being made, are open or have failed: while there is one, MPI_Finalize could wait for ever."""


def load_mpi() -> ModuleType:
    """Import mpi4py and initialize MPI, once per process.

    Raises:
        TransportUnavailableError: if mpi4py or an MPI library is missing.
        CommunicatorError: if MPI is of no use to several threads, or has been finalized.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise TransportUnavailableError(
            f"transport='mpi' needs mpi4py and an MPI library ({error}). Run: pip install 'sparkdl[mpi]'"
        ) from error
    if MPI.Is_finalized():
        raise CommunicatorError("MPI was finalized in this process and cannot be started again")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CommunicatorError(
            f"{MPI.Get_library_version().splitlines()[0]} was not initialized for several threads"
            " (MPI_THREAD_MULTIPLE). Let sparkdl initialize it, or use a build that supports it."
        )
    return MPI


def check_places(places: list[tuple[int, int]]) -> list[int]:
    """Check that ranks stand in one MPI world; return the MPI rank of each.

    Args:
        places: MPI rank and size of the MPI world, as each rank sees them.

    Raises:
        CommunicatorError: if they do not.
    """
    members = [mpi_rank for mpi_rank, _ in places]
    sizes = sorted({size for _, size in places})
    if len(sizes) > 1 or len(set(members)) < len(members):
        raise CommunicatorError(
            f"{len(places)} ranks do not stand in one MPI world: their MPI ranks are {members},"
            f" in worlds of {', '.join(map(str, sizes))}."
            " Start them by sparkdl with transport='mpi', or by mpiexec."
        )
    return members


def _finalize() -> None:
    from mpi4py import MPI

    if not unfinished and not MPI.Is_finalized():
        MPI.Finalize()
