"""Horovod's process sets: subsets of the ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sparkdl.horovod.torch.current_session import session
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.names import HorovodInternalError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NEEDS_RANKS = (
    "ProcessSet should be initialized with a list of process ranks, a function that returns them for a number of ranks,"
    " or an mpi4py Comm object"
)


class ProcessSet:
    """A process set; usable from ``init`` or ``add_process_set`` until ``shutdown``.

    After ``shutdown`` it belongs to an earlier world, and using it raises a ``ValueError`` until it is given to
    ``init`` or ``add_process_set`` again. :func:`sparkdl.horovod.torch.elastic.run` reopens the sets given to ``init``.

    A set that is given as a rule, a function of the number of ranks, is opened again in every world of an elastic run,
    with the members that the rule has there. If these are all ranks, it is the global process set; if there are none,
    it is not usable in that world.

    Attributes:
        process_set_id: number of the process set; None while it is not usable.
        ranks: numbers of its members in ascending order; None if it was made from an mpi4py communicator or a rule, and
            is not yet usable.
        mpi_comm: mpi4py communicator that it was made from, or None.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Callable[[int], Iterable[int]] | Any) -> None:
        """Describe a process set.

        Args:
            ranks_or_comm: numbers of the members; a function that returns them for a number of ranks, such as
                ``lambda size: range(0, size, 2)``; or an mpi4py communicator of the members.

        Raises:
            ValueError: if it is neither.
        """
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        self._world_id: str | None = None
        """The world that ``process_set_id`` belongs to; None for the global process set, which every world has."""
        self._groups: dict[str, dist.ProcessGroup] = {}
        """The process group of torch.distributed, by the id of the world in which it was made."""
        self.rule: Callable[[int], Iterable[int]] | None = None
        self._shares_number = False
        """Whether the number belongs to another set that has the same members in this world."""
        if isinstance(ranks_or_comm, Iterable):
            self.ranks = _check_ranks(ranks_or_comm)
        elif callable(ranks_or_comm):
            self.rule = ranks_or_comm
        elif hasattr(ranks_or_comm, "allgather"):
            self.mpi_comm = ranks_or_comm
        else:
            raise ValueError(_NEEDS_RANKS)

    def take_up_rule(self, world_size: int) -> None:
        """Set the members to those that the rule, if there is one, has for a number of ranks.

        Raises:
            ValueError: if it does not return numbers of ranks.
        """
        if self.rule is not None:
            self.process_set_id, self.ranks = None, _check_ranks(self.rule(world_size))
            self._shares_number = False

    def size(self) -> int | None:
        """Number of members; None if the set was not given to ``init`` or ``add_process_set``, or was removed.

        Raises:
            ValueError: if it belongs to an earlier world.
        """
        if self.process_set_id is None:
            return None
        return len(self._members())

    def rank(self) -> int | None:
        """This rank's number among the members; None if :meth:`size` is None.

        Raises:
            ValueError: if this rank is not a member, or the process set belongs to an earlier world.
        """
        if self.process_set_id is None:
            return None
        members = self._members()
        if session().world.rank not in members:
            raise ValueError("Process is not part of provided process set.")
        return members.index(session().world.rank)

    def included(self) -> bool | None:
        """Whether this rank is a member; None if the members are not known yet.

        Raises:
            ValueError: if it belongs to an earlier world, in which the ranks may have had other numbers.
        """
        if self.ranks is None:
            return None
        self._check_world("ProcessSet.included")
        return session().world.rank in self.ranks

    def process_group(self) -> dist.ProcessGroup:
        """The process group of torch.distributed with the same members, for ``DeviceMesh.from_group``, DDP or FSDP2.

        The first call is collective among the members.

        Raises:
            ValueError: if torch.distributed is not initialized over all ranks, the process set is not usable, or this
                rank is not a member.
        """
        if not dist.is_initialized() or dist.get_world_size() != session().world.world_size:
            raise ValueError(
                "ProcessSet.process_group needs torch.distributed over all ranks: call "
                "sparkdl.torch.init_process_group() first."
            )
        if self.process_set_id is None:
            raise ValueError(f"{self} was not given to hvd.init() or hvd.add_process_set().")
        if self.process_set_id == 0:
            assert dist.group.WORLD is not None, "torch.distributed is initialized"
            return dist.group.WORLD
        self.rank()  # raises if this rank is not a member
        world = str(self._world_id)
        if world not in self._groups:
            self._groups = {world: dist.new_group(self.ranks, use_local_synchronization=True)}
        return self._groups[world]

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    def _check_world(self, operation: str) -> None:
        """Refuse a process set of an earlier world, as its number may belong to another set now.

        Raises:
            ValueError: if it belongs to an earlier world, or Horovod is not initialized.
        """
        if self.process_set_id in (None, 0) or self._world_id == session().world_id:
            return
        raise ValueError(
            f"{operation}: {self} was opened in a world that hvd.shutdown() has ended, and its number may be that of "
            "another set in the present one. Give it to hvd.add_process_set(), or to hvd.init(process_sets=...), again."
        )

    def _members(self) -> Sequence[int]:
        self._check_world("ProcessSet")
        members = session().ranks_of.get(self.process_set_id if self.process_set_id is not None else -1)
        if members is None:
            raise ValueError("Process set does not exist or has not been registered.")
        return members


def _check_ranks(ranks: Iterable[int]) -> list[int]:
    listed = list(ranks) if isinstance(ranks, Iterable) else [None]
    if any(not isinstance(rank, int) for rank in listed):
        raise ValueError(_NEEDS_RANKS)
    return sorted(listed)


added_by_rule: list[ProcessSet] = []
"""The process sets that :func:`add_process_set` was given as rules for the current world."""

global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Open a process set; all ranks call this, in the same order.

    Args:
        process_set: process set, or the numbers of its members.

    Returns:
        The process set, now usable.

    Raises:
        ValueError: if all ranks gave a set that cannot be added: one of the same ranks exists, a rank does not exist,
            or it has no ranks.
        HorovodInternalError: on all ranks, if they gave different sets, or some ranks have joined. All ranks can
            continue.
    """
    current = session()
    try:
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(process_set)
        if process_set.mpi_comm is not None:
            process_set.ranks = ranks_of_comm(process_set.mpi_comm, current.world.rank)
        process_set.take_up_rule(current.world.world_size)
    except Exception as error:
        # The other ranks may have given a valid set, and wait for this rank.
        current.add_nothing(f"{type(error).__name__}: {error}")
        raise
    assert process_set.ranks is not None
    if process_set.rule is not None:
        added_by_rule.append(process_set)
        if not process_set.ranks:
            current.add_nothing("its rule has no members")
            return process_set
        if (number := current.id_of(process_set.ranks)) is not None:
            current.add_nothing("its rule has the members of another one")
            bind(process_set, number, current.world_id)
            process_set._shares_number = True
            return process_set
    number = current.add(process_set.ranks)
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    bind(process_set, number, current.world_id)
    return process_set


def process_set_of(mesh: DeviceMesh) -> ProcessSet:
    """Return the process set of this rank's group along a one-dimensional mesh, such as ``layout.mesh["tensor"]``.

    All ranks of Horovod's world call this. It opens a process set for each group along the dimension, unless there is
    one of the same ranks already.

    Args:
        mesh: one-dimensional mesh over the ranks of torch.distributed, which are the ranks of Horovod.

    Raises:
        ValueError: if the mesh has several dimensions.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"process_set_of takes a mesh of one dimension, got {mesh.ndim}; choose one, mesh['name']."
        )
    members_of_mesh = sorted(dist.get_process_group_ranks(mesh.get_group()))
    everyone = torch.empty(dist.get_world_size(), len(members_of_mesh), dtype=torch.int64, device="cpu")
    dist.all_gather(list(everyone), torch.tensor(members_of_mesh, device="cpu"))
    current = session()
    matching: ProcessSet | None = None
    for ranks in sorted({tuple(row) for row in everyone.tolist()}):
        process_set = ProcessSet(ranks)
        number = current.id_of(ranks)
        if number is None:
            number = current.add(ranks)
        assert number is not None, "there was none of these ranks"
        bind(process_set, number, current.world_id)
        if list(ranks) == members_of_mesh:
            matching = process_set
    assert matching is not None, "this rank is in its group"
    return matching


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a process set; all ranks call this, in the same order.

    Returns:
        Whether it was removed: False if it is not usable, or is the global process set.

    Raises:
        ValueError: if it belongs to an earlier world.
        HorovodInternalError: on all ranks, if they gave different process sets, or some ranks have joined. All ranks
            can continue.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    process_set._check_world("remove_process_set")
    if process_set in added_by_rule:
        added_by_rule.remove(process_set)
    is_removed = process_set._shares_number or session().remove(number)
    process_set.process_set_id = None
    return is_removed


def bind(process_set: ProcessSet, number: int, world_id: str) -> None:
    """Make a process set usable: set its number and the world that the number belongs to."""
    process_set.process_set_id = number
    process_set._world_id = None if number == 0 else world_id


def engine_of(process_set: ProcessSet, operation: str) -> Engine:
    """The engine of a process set, for an operation on tensors.

    Args:
        process_set: process set in which the operation runs.
        operation: name of the operation, used in error messages.

    Raises:
        HorovodInternalError: if ``init`` has not been called.
        ValueError: if there is no such process set, it belongs to an earlier world, or this rank is not in it.
    """
    current = session(HorovodInternalError)
    process_set._check_world(operation)
    return current.engine(process_set.process_set_id, operation)


def ranks_of_comm(comm: Any, rank: int) -> list[int]:
    """The numbers that the members of an mpi4py communicator have among all ranks; its members call this.

    Args:
        comm: mpi4py communicator.
        rank: number of this rank among all ranks.
    """
    return sorted(comm.allgather(rank))
