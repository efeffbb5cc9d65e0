"""Horovod's process sets: some of the ranks, that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sparkdl.horovod.torch.current_session import session

_NEEDS_RANKS = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"


class ProcessSet:
    """A process set; usable once it was given to ``init`` or ``add_process_set``.

    Attributes:
        process_set_id: its number; None as long as it is not usable.
        ranks: its members in ascending order; None if it was made from an mpi4py communicator and is not yet usable.
        mpi_comm: the mpi4py communicator that it was made from, if any.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """Describe a process set.

        Args:
            ranks_or_comm: the numbers of the members, or an mpi4py communicator of them.

        Raises:
            ValueError: if it is neither.
        """
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        if isinstance(ranks_or_comm, Iterable):
            ranks = sorted(ranks_or_comm)
            if any(not isinstance(rank, int) for rank in ranks):
                raise ValueError(_NEEDS_RANKS)
            self.ranks = ranks
        elif hasattr(ranks_or_comm, "allgather"):
            self.mpi_comm = ranks_or_comm
        else:
            raise ValueError(_NEEDS_RANKS)

    def size(self) -> int | None:
        """How many members it has; None as long as it is not usable."""
        if self.process_set_id is None:
            return None
        return len(self._members())

    def rank(self) -> int | None:
        """This rank's number among the members; None as long as it is not usable.

        Raises:
            ValueError: if this rank is no member.
        """
        if self.process_set_id is None:
            return None
        members = self._members()
        if session().world.rank not in members:
            raise ValueError("Process is not part of provided process set.")
        return members.index(session().world.rank)

    def included(self) -> bool | None:
        """Whether this rank is a member; None if the members are not known yet."""
        if self.ranks is None:
            return None
        return session().world.rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    def _members(self) -> Sequence[int]:
        members = session().ranks_of.get(self.process_set_id if self.process_set_id is not None else -1)
        if members is None:
            raise ValueError("Process set does not exist or has not been registered.")
        return members


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Open a process set; all ranks call this, in the same order.

    Args:
        process_set: the process set, or the numbers of its members.

    Returns:
        The process set, usable.

    Raises:
        ValueError: if there is a process set of these ranks, or a rank does not exist.
        HorovodInternalError: on all ranks, if they did not all give these ranks, or some have joined. They can go on.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.ranks is None:
        process_set.ranks = ranks_of_comm(process_set.mpi_comm, session().world.rank)
    number = session().add(process_set.ranks)
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = number
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a process set; all ranks call this, in the same order.

    Returns:
        Whether it was removed: False if it is not usable, or is that of all ranks.

    Raises:
        HorovodInternalError: on all ranks, if they did not all give this process set, or some have joined. They can go
            on.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    is_removed = session().remove(number)
    process_set.process_set_id = None
    return is_removed


def ranks_of_comm(comm: Any, rank: int) -> list[int]:
    """The numbers that the members of an mpi4py communicator have among all ranks; its members call this.

    Args:
        comm: the mpi4py communicator.
        rank: the number that this rank has.
    """
    return sorted(comm.allgather(rank))
