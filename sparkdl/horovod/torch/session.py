"""The session, which ``init`` opens and ``shutdown`` closes: the engines of the process sets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.operations import device_route
from sparkdl.horovod.torch.operations.barrier_and_join import ProcessSetsRequest, make_stand_in


class Session:
    """The process sets of this job, on one rank. Process set 0 has all ranks.

    Attributes:
        world: communicator of all ranks, on which process set 0 runs.
        world_id: text that identifies this session, the same on all ranks.
        ranks_of: ranks of every process set, by its number.
    """

    def __init__(self, world: Communicator, world_id: str, process_sets: Sequence[Sequence[int]]) -> None:
        """Open the engines; all ranks call this at the same time, with the same arguments.

        Args:
            world: communicator of all ranks; owned by the session once this has succeeded.
            world_id: text that identifies this session.
            process_sets: ranks of each further process set, in ascending order.
        """
        self.world = world
        self.world_id = world_id
        self.ranks_of: dict[int, tuple[int, ...]] = {0: tuple(range(world.world_size))}
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        """Held while a process set is added or removed: ranks meet for one change at a time."""
        self._next_id = 1
        self._marks_cycles = False
        self._num_static = len(process_sets)
        self._engines = {0: self._make_engine(world)}
        try:
            for ranks in process_sets:
                self._open(self._reserve(tuple(ranks)))
        except BaseException:
            self.close()
            raise

    def static_sets(self) -> list[list[int]]:
        """The ranks of the process sets that the session was opened with and that have not been removed."""
        with self._lock:
            return [
                list(members) for number, members in self.ranks_of.items() if 1 <= number <= self._num_static
            ]

    def id_of(self, ranks: Sequence[int]) -> int | None:
        """The number of the process set with exactly these ranks, if there is one."""
        with self._lock:
            return next(
                (number for number, members in self.ranks_of.items() if members == tuple(ranks)), None
            )

    def engine(self, process_set_id: int | None, operation: str) -> Engine:
        """The engine of a process set.

        Args:
            process_set_id: number of the process set.
            operation: name of the operation, used in error messages.

        Raises:
            ValueError: if there is no such process set, or this rank is not in it.
        """
        if process_set_id not in self.ranks_of:
            raise ValueError(f"{operation}: Process set provided does not exist, or has not been registered.")
        if process_set_id not in self._engines:
            raise ValueError(
                f"{operation}: Rank {self.world.rank} is not a member of the provided process set."
            )
        return self._engines[process_set_id]

    def add(self, ranks: Sequence[int]) -> int | None:
        """Open a process set; all ranks of the job call this.

        Args:
            ranks: numbers of its members, in ascending order.

        Returns:
            The number of the process set, the same on all ranks; None if there already is one of these ranks.

        Raises:
            ValueError: if these ranks cannot form a process set.
            HorovodInternalError: on all ranks, if they disagree about the members, or some ranks have joined; nothing
                is opened then.
        """
        members = tuple(ranks)
        problem = problem_with(members, self.world.world_size)
        with self._changing:
            reserved: list[int] = []

            def reserve() -> None:
                if problem is None and self.id_of(members) is None:
                    reserved.append(self._reserve(members))

            # Even for a set that cannot be added: the other ranks may have given a valid one, and wait for this rank.
            self._meet(f"add process set {list(members)}", when_met=reserve)
            if problem is not None:
                raise ValueError(f"A process set cannot have ranks {list(members)}: {problem}.")
            if not reserved:
                return None
            self._open(reserved[0])
        return reserved[0]

    def add_nothing(self, reason: str) -> None:
        """Meet the other ranks in place of :meth:`add`, for an argument that does not specify ranks.

        Args:
            reason: description of what is wrong with the argument.

        Raises:
            HorovodInternalError: on all ranks, if some of them asked for something else.
        """
        with self._changing:
            self._meet(f"add no process set ({reason})", when_met=lambda: None)

    def remove(self, process_set_id: int) -> bool:
        """Close a process set; all ranks of the job call this. False if there is none of this number, or it is 0.

        Raises:
            HorovodInternalError: on all ranks, if they disagree about the process set, or some ranks have joined;
                nothing is closed then.
        """
        with self._changing:
            members = self.ranks_of.get(process_set_id)
            if process_set_id == 0 or members is None:
                return False
            self._meet(
                f"remove process set {process_set_id} of ranks {list(members)}",
                when_met=lambda: self._forget(process_set_id),
            )
            engine = self._engines.pop(process_set_id, None)
        if engine is not None:
            engine.close()
        return True

    def mark_cycles(self, is_wanted: bool) -> None:
        """Set whether a timeline shows where engines begin to run requests, also for process sets added later."""
        self._marks_cycles = is_wanted
        for engine in self._engines.values():
            engine.marks_cycles = is_wanted

    def check_caller(self) -> None:
        """See :meth:`Engine.check_caller`, for all process sets."""
        for engine in list(self._engines.values()):
            engine.check_caller()

    def close(self) -> None:
        """Close all process sets; the other ranks do not treat this rank as lost."""
        with ExitStack() as stack:  # all of them, the highest number first, whatever one raises
            for number in sorted(self._engines):
                stack.callback(self._engines[number].close)

    def _meet(self, about: str, when_met: Callable[[], None]) -> None:
        request = ProcessSetsRequest(about, when_met)
        self._engines[0].submit(request, will_wait=True)
        self._engines[0].wait(request)

    def _reserve(self, members: tuple[int, ...]) -> int:
        with self._lock:
            number = self._next_id
            self._next_id += 1
            self.ranks_of[number] = members
        return number

    def _forget(self, number: int) -> None:
        with self._lock:
            del self.ranks_of[number]

    def _open(self, number: int) -> None:
        members = self.ranks_of[number]
        if self.world.rank in members:
            self._engines[number] = self._make_engine(self.world.split(members, f"process set {number}"))

    def _make_engine(self, communicator: Communicator) -> Engine:
        engine = Engine(communicator, make_stand_in, device_route.routes.close)
        engine.marks_cycles = self._marks_cycles
        return engine


def problem_with(members: Sequence[int], world_size: int) -> str | None:
    """Describe why these ranks cannot form a process set in a world; None if they can."""
    if not members:
        return "there must be at least one"
    if len(set(members)) != len(members) or not all(0 <= rank < world_size for rank in members):
        return f"they must be distinct and within 0 to {world_size - 1}"
    return None
