"""MPI library of this process: the only module that imports mpi4py (others only name its types)."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import zlib
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, TransportUnavailableError
from sparkdl.foreign_errors import how_to_install
from sparkdl.rendezvous.hosts import FOLDER

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

    from sparkdl.rendezvous.deadline import Deadline

_NUM_TAGS = 32768
"""Number of tags that every MPI library allows at least."""

unfinished: set[object] = set()
"""Communicators that are being created, are open or have failed: MPI_Finalize could hang while there is one."""


def load_mpi() -> ModuleType:
    """Import mpi4py and initialize MPI, once per process.

    Raises:
        TransportUnavailableError: if mpi4py or an MPI library is missing.
        CommunicatorError: if MPI does not support several threads, or has been finalized.
    """
    MPI = _import_mpi()  # noqa: N806  # mpi4py's usual name
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


def library_name() -> str:
    """Return the name of the MPI library, which need not be initialized.

    Raises:
        TransportUnavailableError: if mpi4py or an MPI library is missing.
    """
    # After the version, MPICH adds further lines, and Open MPI a comma and further text.
    first_line = _import_mpi().Get_library_version().split("\n")[0]
    return " ".join(first_line.split(",")[0].replace("Version:", "").split())


def check_one_world(seen: list[tuple[int, int]]) -> list[int]:
    """Check that ranks are in one MPI world; return the MPI rank of each.

    Args:
        seen: MPI rank and size of the MPI world, as each rank sees them.

    Raises:
        CommunicatorError: if they are not.
    """
    members = [mpi_rank for mpi_rank, _ in seen]
    sizes = sorted({size for _, size in seen})
    if len(sizes) > 1 or len(set(members)) < len(members):
        raise CommunicatorError(
            f"The {len(seen)} ranks are not one MPI world: their MPI ranks are {members}, and the sizes of their "
            f"worlds {', '.join(map(str, sizes))}. Start them by sparkdl with transport='mpi', or by mpiexec."
        )
    return members


def create_group(members: list[int], name: str, deadline: Deadline) -> MPI.Intracomm:
    """Create the MPI communicator of some ranks of the MPI world; all these ranks take part.

    MPI has no non-blocking form of this call, so it runs on a separate thread. If a rank dies meanwhile, that thread
    stays in MPI until the process ends, but this call fails at the deadline.

    Args:
        members: ranks of the members in the MPI world.
        name: distinguishes communicators that are created at the same time.
        deadline: deadline of the call.

    Raises:
        CommunicatorTimeoutError: if some rank does not take part in time.
        CommunicatorError: if MPI reports an error.
    """
    mpi = load_mpi()
    world: MPI.Intracomm = mpi.COMM_WORLD
    tag = zlib.crc32(name.encode()) % _NUM_TAGS
    created: Future[MPI.Intracomm] = Future()

    def create() -> None:
        try:
            all_ranks = world.Get_group()
            group = all_ranks.Incl(members)
            created.set_result(world.Create_group(group, tag))
            for used in (group, all_ranks):
                used.Free()
        except BaseException as error:
            created.set_exception(error)

    unfinished.add(created)
    threading.Thread(target=create, name="sparkdl-mpi-create", daemon=True).start()
    try:
        comm = created.result(deadline.remaining_s())
    except FutureTimeoutError:
        raise CommunicatorTimeoutError(
            f"MPI did not make communicator {name!r} within {deadline.timeout_s:g} s, though all"
            f" {len(members)} ranks had come: one of them has died or hangs. Look at the ranks' last log lines."
        ) from None
    except mpi.Exception as error:
        raise CommunicatorError(f"MPI cannot make communicator {name!r}: {error}") from error
    unfinished.discard(created)
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comm


def _import_mpi() -> ModuleType:
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise TransportUnavailableError(
            f"MPI needs mpi4py and an MPI library: {error}. {how_to_install('mpi', 'mpi4py', 'mpich')}"
        ) from error
    return MPI


def _finalize() -> None:
    from mpi4py import MPI

    # Not after an exception either: other ranks may wait for this one, and mpiexec ends them if this rank ends without
    # MPI_Finalize.
    has_failed = getattr(sys, "last_value", None) is not None
    if unfinished or has_failed:
        _remove_shared_memory()
    elif not MPI.Is_finalized():
        MPI.Finalize()


os.register_at_fork(after_in_child=partial(atexit.unregister, _finalize))  # the MPI process is the parent


def _remove_shared_memory() -> None:
    """Remove the files of the memory that MPICH shares between this world's ranks, as only MPI_Finalize would.

    Removes only files that this process has mapped itself; other processes keep their mappings.
    """
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    for path in {path for path in mapped if path.startswith(f"{FOLDER}/mpich_")}:
        Path(path).unlink(missing_ok=True)
