"""This process among the ranks, as Horovod names it: init, shutdown, rank, size and their local and cross forms.

Runs on the *rank*. The communicator that the launcher opened stays the launcher's; ``init`` opens others for itself.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import sparkdl.torch  # noqa: F401  # makes current_communicator understand torchrun's variables
from sparkdl.collective import Communicator, StallCheck, all_gather_bytes, current_communicator
from sparkdl.errors import LaunchError
from sparkdl.horovod.torch.current_session import begin_session, end_session, has_session, session
from sparkdl.horovod.torch.handles import forget_handles
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set, ranks_of_comm
from sparkdl.horovod.torch.session import Session
from sparkdl.horovod.torch.timeline import start_timeline_of


def init(comm: Iterable[int] | Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the ranks that the launcher started. Doing it again changes nothing.

    Horovod's variables for the stall inspector count on every rank; ``HOROVOD_TIMELINE`` of rank 0 starts a timeline
    that ``shutdown`` ends, unless it is ``DYNAMIC``.

    Args:
        comm: the numbers of the ranks that take part, or an mpi4py communicator of them; all of them if None.
        process_sets: process sets to open, the same on all ranks; or ``"dynamic"``, with which Horovod allows
            ``add_process_set`` later, as is allowed here in any case.

    Raises:
        LaunchError: if this process is no rank: nothing opened a communicator for it.
        ValueError: if process sets occur twice, name ranks that do not exist, or differ between ranks, or if the
            timeline cannot be written. Nothing is left open then.
    """
    wanted = _list_process_sets(process_sets)
    if not has_session():
        world = _open_world(comm)
        try:
            by_comm = _gather_by_comm(world, [ps for ps in wanted if ps.ranks is None])
            by_ranks = [ps.ranks for ps in wanted if ps.ranks is not None and ps.mpi_comm is None]
            _check_distinct(world, wanted)
            begin_session(Session(world, [*by_comm, *by_ranks]))
            start_timeline_of(os.environ)
        except BaseException:
            end_session()
            world.close()
            raise
        atexit.register(shutdown)
    global_process_set.ranks = list(session().ranks_of[0])
    for process_set in wanted:
        process_set.process_set_id = session().id_of(process_set.ranks or [])
        if process_set.process_set_id is None:
            raise ValueError(
                f"Horovod runs without {process_set}; use hvd.add_process_set, or hvd.shutdown first."
            )


def shutdown() -> None:
    """Leave; ``init`` may be called again. What is outstanding fails, here and on the other ranks."""
    atexit.unregister(shutdown)
    end_session()
    forget_handles()


def is_initialized() -> bool:
    """``init`` has been called, and ``shutdown`` not since."""
    return has_session()


def rank() -> int:
    """Number of this rank."""
    return session().world.rank


def size() -> int:
    """How many ranks there are."""
    return session().world.world_size


def local_rank() -> int:
    """Position of this rank among those of its host."""
    return session().world.topology.local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return session().world.topology.local_size


def cross_rank() -> int:
    """Position of this rank's host among the hosts that have a rank of this ``local_rank``."""
    return session().world.topology.cross_rank


def cross_size() -> int:
    """How many hosts have a rank of this ``local_rank``."""
    return session().world.topology.cross_size


def is_homogeneous() -> bool:
    """All hosts have equally many ranks."""
    topology = session().world.topology
    return len({len(topology.ranks_on(host)) for host in range(topology.num_hosts)}) == 1


def _list_process_sets(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f"process_sets={process_sets!r} names no process sets; give a list of hvd.ProcessSet, or 'dynamic'."
            )
        return []
    return list(process_sets or [])


def _open_world(comm: Iterable[int] | Any) -> Communicator:
    launched = current_communicator()
    if launched is None:
        raise LaunchError(
            "hvd.init() found no communicator: this process was not started as a rank. Run the training function by"
            " sparkdl.launch.run_on_ranks, or the script by `sparkdl run`, mpiexec or torchrun."
        )
    if comm is None:
        members = list(range(launched.world_size))
    elif isinstance(comm, Iterable):
        members = list(comm) or list(range(launched.world_size))
    else:
        members = ranks_of_comm(comm, launched.rank)
    world = launched.split(members, "horovod", stall_check=StallCheck.from_environment(os.environ))
    if not world.is_member:
        raise ValueError(f"rank {launched.rank} is not one of the ranks {members} that hvd.init was given.")
    return world


def _gather_by_comm(world: Communicator, process_sets: Sequence[ProcessSet]) -> list[list[int]]:
    """The process sets that ranks made from mpi4py communicators, of which each rank knows only its own."""
    if not process_sets:
        return []
    for process_set in process_sets:
        process_set.ranks = ranks_of_comm(process_set.mpi_comm, world.rank)
    gathered = all_gather_bytes(
        world.rendezvous,
        key=f"{world.name}/process sets",
        rank=world.rank,
        world_size=world.world_size,
        value=json.dumps([process_set.ranks for process_set in process_sets]).encode(),
        timeout_s=world.timeout_s,
    )
    return [list(ranks) for ranks in sorted({tuple(ranks) for own in gathered for ranks in json.loads(own)})]


def _check_distinct(world: Communicator, process_sets: Sequence[ProcessSet]) -> None:
    seen = [list(range(world.world_size))]
    for number, process_set in enumerate(process_sets):
        if process_set.ranks in seen:
            raise ValueError(
                "Horovod could not be initialized because process_sets entry number "
                f"{number} is a duplicate: {process_set}"
            )
        seen.append(process_set.ranks or [])
