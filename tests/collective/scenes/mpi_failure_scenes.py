"""Failures that only MPI has, and what each rank sees of them. Runs on ranks."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from sparkdl.collective import all_gather_bytes
from sparkdl.collective.mpi.library import load_mpi
from tests.collective.scenes.failure_scenes import LONG_S, Outcome, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment


class FaultyComm:
    """An MPI communicator whose methods a test can replace."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.replaced: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return self.replaced.get(name) or getattr(self._comm, name)


def raise_type_error(*_: object) -> None:
    raise TypeError("no buffer")


class FaultyWorld:
    """``MPI.COMM_WORLD``, whose groups become communicators with methods that a test can replace."""

    def __init__(self, world: MPI.Intracomm) -> None:
        self._world = world
        self.made: list[FaultyComm] = []

    def Create_group(self, group: MPI.Group, tag: int) -> FaultyComm:
        self.made.append(FaultyComm(self._world.Create_group(group, tag)))
        return self.made[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


@contextmanager
def open_faulty(environment: RankEnvironment) -> Iterator[tuple[Communicator, FaultyComm]]:
    """Open a communicator over an MPI communicator whose methods can be replaced."""
    mpi = load_mpi()
    world = FaultyWorld(mpi.COMM_WORLD)
    with patch.object(mpi, "COMM_WORLD", world):
        opened = environment.open(timeout_s=LONG_S)
    with opened as communicator:
        communicator.barrier()
        yield communicator, world.made[-1]


def fault_of_mpi(environment: RankEnvironment) -> Outcome:
    """MPI refuses an operation on one rank, as it does when it finds a buffer invalid."""
    with open_faulty(environment) as (communicator, comm):
        if environment.rank == 1:
            comm.replaced["Iallreduce"] = load_mpi().COMM_NULL.Iallreduce
        return error_of(lambda: communicator.allreduce(np.ones(3)))


def fault_in_messages(environment: RankEnvironment) -> Outcome:
    """An error outside of MPI occurs on rank 1 while a message is under way."""
    with open_faulty(environment) as (communicator, comm):
        array = np.ones(1_000_000)  # more than MPI sends before the receive is posted
        if environment.rank == 0:
            return error_of(lambda: communicator.send(array, to=1))
        comm.replaced["Irecv"] = raise_type_error
        return error_of(lambda: communicator.recv(array, source=0))


def dies_while_mpi_makes_the_communicator(environment: RankEnvironment) -> Outcome:
    """Rank 1 takes part in the preceding exchange, as if it were opening the communicator too, and then dies."""
    if environment.rank == 0:
        return error_of(lambda: environment.open(name="half made", timeout_s=1.5, host_of_rank=(0, 0)))
    load_mpi()
    rendezvous = environment.rendezvous.view("communicator/half made/1")
    all_gather_bytes(rendezvous, key="mpi/places", rank=1, world_size=2, value=b"[1, 2]", timeout_s=10.0)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}
