"""Failures that only MPI has, and what each rank sees of them. Runs on ranks."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective import all_gather_bytes
from sparkdl.collective.mpi.communicator import MpiCommunicator
from sparkdl.collective.mpi.library import load_mpi
from tests.collective.scenes.failure_scenes import LONG_S, Outcome, error_of

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment


def fault_of_mpi(environment: RankEnvironment) -> Outcome:
    """MPI refuses an operation on one rank, as it does when it finds a buffer invalid."""
    with environment.open(timeout_s=LONG_S) as communicator:
        assert isinstance(communicator, MpiCommunicator)
        communicator.barrier()
        if environment.rank == 1:
            communicator._agreement._comm = load_mpi().COMM_NULL
        return error_of(lambda: communicator.allreduce(np.ones(3)))


def fault_in_messages(environment: RankEnvironment) -> Outcome:
    """An error outside of MPI occurs on rank 1 while a message is under way."""
    with environment.open(timeout_s=LONG_S) as communicator:
        assert isinstance(communicator, MpiCommunicator)
        communicator.barrier()
        array = np.ones(1_000_000)  # more than MPI sends before the receive is posted
        if environment.rank == 0:
            return error_of(lambda: communicator.send(array, to=1))
        communicator._messages._written = None
        return error_of(lambda: communicator.recv(array, source=0))


def dies_while_mpi_makes_the_communicator(environment: RankEnvironment) -> Outcome:
    """Rank 1 takes part in the preceding exchange, as if it were opening the communicator too, and then dies."""
    if environment.rank == 0:
        return error_of(lambda: environment.open(name="half made", timeout_s=1.5, host_of_rank=(0, 0)))
    load_mpi()
    rendezvous = environment.rendezvous.prefix("communicator/half made/1")
    all_gather_bytes(rendezvous, key="mpi/places", rank=1, world_size=2, value=b"[1, 2]", timeout_s=10.0)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}
