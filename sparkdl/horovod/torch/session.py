"""What ``init`` opens and ``shutdown`` closes: the engines of the process sets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from sparkdl.collective import Communicator
from sparkdl.errors import MismatchError
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.requests.meeting import ProcessSetsRequest
from sparkdl.horovod.torch.requests.stand_in import make_stand_in


class Session:
    """The process sets of this job, seen from one rank. Set 0 is that of all ranks.

    Attributes:
        world: the communicator of all ranks; serves process set 0.
        ranks_of: the ranks of every process set, by its number.
    """

    def __init__(self, world: Communicator, process_sets: Sequence[Sequence[int]]) -> None:
        """Open the engines; all ranks do so at once.

        Args:
            world: the communicator of all ranks; taken over once this has succeeded.
            process_sets: the ranks of further process sets, each sorted.

        Raises:
            ValueError: if the ranks gave different process sets, or one names a rank that does not exist.
        """
        self.world = world
        self.ranks_of: dict[int, tuple[int, ...]] = {0: tuple(range(world.world_size))}
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        """Held while a process set is added or removed: ranks meet for one change at a time."""
        self._next_id = 1
        self._marks_cycles = False
        for ranks in process_sets:
            self._check(ranks)
        try:
            world.barrier(name=f"process sets {[list(ranks) for ranks in process_sets]}")
        except MismatchError as error:
            raise ValueError(f"Horovod could not be initialized: {error}") from error
        self._engines = {0: Engine(world, make_stand_in)}
        try:
            for ranks in process_sets:
                self._open(self._reserve(tuple(ranks)))
        except BaseException:
            self.close()
            raise

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
            operation: who asks, for the error.

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
        """Open a process set; all ranks of the job do so.

        Args:
            ranks: its members, sorted.

        Returns:
            Its number, the same on all ranks; None if there is a process set of these ranks.

        Raises:
            ValueError: if a rank does not exist.
            HorovodInternalError: on all ranks, if they disagree about the members, or some have joined; nothing is
                opened then.
        """
        members = tuple(ranks)
        self._check(members)
        with self._changing:
            if self.id_of(members) is not None:
                return None
            reserved: list[int] = []
            self._meet(
                f"add process set {list(members)}", when_met=lambda: reserved.append(self._reserve(members))
            )
            self._open(reserved[0])
        return reserved[0]

    def remove(self, process_set_id: int) -> bool:
        """Close a process set; all ranks of the job do so. False if there is none of this number.

        Raises:
            HorovodInternalError: on all ranks, if they disagree about the process set, or some have joined; nothing
                is closed then.
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
        """Say whether a timeline shows where engines begin to run requests, those of later process sets too."""
        self._marks_cycles = is_wanted
        for engine in self._engines.values():
            engine.marks_cycles = is_wanted

    def close(self) -> None:
        """Close all process sets; the peers do not take this for a death."""
        for number in sorted(self._engines, reverse=True):
            self._engines[number].close()

    def _meet(self, about: str, when_met: Callable[[], None]) -> None:
        request = ProcessSetsRequest(about, when_met)
        self._engines[0].submit(request, will_wait=True)
        self._engines[0].wait(request)

    def _check(self, members: Sequence[int]) -> None:
        unknown = [rank for rank in members if not 0 <= rank < self.world.world_size]
        if unknown or len(set(members)) != len(members):
            raise ValueError(
                f"A process set cannot have ranks {list(members)}: they must be distinct and within"
                f" 0 to {self.world.world_size - 1}."
            )

    def _reserve(self, members: tuple[int, ...]) -> int:
        self._check(members)
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
            communicator = self.world.split(members, f"process set {number}")
            engine = Engine(communicator, make_stand_in)
            engine.marks_cycles = self._marks_cycles
            self._engines[number] = engine
