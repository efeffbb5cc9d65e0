"""Runs programs on a rank and compares their results with NumPy. Runs on ranks."""

from __future__ import annotations

import threading
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdl.errors import MismatchError
from tests.collective.checks.prepared_messages import PreparedMessages
from tests.collective.checks.prepared_operation import PreparedOperation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Communicator
    from sparkdl.collective.communicator import Handle
    from tests.collective.checks.element_types import Array
    from tests.collective.scenes.programs import Operation, Program, Step, Strand

_PAGE = 4096
_TAKE_PART_WHEN_JOINED = (
    *("allreduce", "allreduce_group", "reduce_scatter", "reduce_scatter_group"),
    *("allgather", "allgather_group", "barrier"),
)


@dataclass
class Outcome:
    """The outcome of a program on one rank.

    Attributes:
        failures: descriptions of the failures.
        shared: values that must be equal on all ranks that have them: messages of mismatches and checksums of results,
            by strand and step.
        is_usable: whether the ranks are still in step, so that further programs can be run.
    """

    failures: list[str] = field(default_factory=list)
    shared: dict[tuple[int, int], str] = field(default_factory=dict)
    is_usable: bool = True


def run_program(
    communicator: Communicator, program: Program, arena: Array | None, *, is_order_fixed: bool
) -> Outcome:
    """Run this rank's strands, each in its own thread if there are several.

    Args:
        communicator: communicator of all ranks.
        program: program to run.
        arena: memory from the communicator's ``allocate``, or None.
        is_order_fixed: whether reductions are exact to the bit, or only up to rounding.
    """
    outcome = Outcome()
    mine = [
        number
        for number, strand in enumerate(program)
        if strand.ranks is None or communicator.rank in strand.ranks
    ]

    def run(number: int) -> None:
        try:
            hosts, steps = _run_strand(communicator, program[number], number, arena)
        except Exception:
            outcome.is_usable = False
            outcome.failures.append(traceback.format_exc())
            return
        joins = program[number].joins
        for position, step in enumerate(steps):
            try:
                told = step.check(joins, position, hosts, is_order_fixed=is_order_fixed)
            except AssertionError as error:
                outcome.failures.append(str(error))
                continue
            if told:
                outcome.shared[number, position] = told

    if len(mine) == 1:
        run(mine[0])
        return outcome
    threads = [threading.Thread(target=run, args=(number,)) for number in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def _run_strand(
    communicator: Communicator, strand: Strand, number: int, arena: Array | None
) -> tuple[Sequence[int], list[StartedStep]]:
    if strand.ranks is None:
        return hosts_of_core(communicator), run_steps(communicator, strand, arena)
    # Process sets are opened and closed while other strands run.
    process_set = communicator.split(strand.ranks, f"strand {number}")
    with process_set:
        return hosts_of_core(process_set), run_steps(process_set, strand)


def hosts_of_core(communicator: Communicator) -> Sequence[int]:
    """The host of each rank by the memory that ranks share, which is how the core defines hosts."""
    if communicator.requested_transport == "tcp":
        return range(communicator.world_size)
    return communicator.topology.host_of_rank


def run_steps(communicator: Communicator, strand: Strand, arena: Array | None = None) -> list[StartedStep]:
    """Call the operations of a strand, join where it says so, and wait for all of them."""
    rank, world_size = communicator.rank, communicator.world_size
    joins = strand.joins or (len(strand.steps),) * world_size
    share = 0 if arena is None else arena.size // len(strand.steps) // _PAGE * _PAGE
    steps = [
        StartedStep(step, communicator, None if arena is None else arena[share * number :][:share])
        for number, step in enumerate(strand.steps[: joins[rank]])
    ]
    for step in steps:
        step.start(communicator)
    if strand.joins is not None:
        last = communicator.join()
        expected = max(other for other in range(world_size) if joins[other] == max(joins))
        assert last == expected, f"{strand}: join returned {last}, and not {expected}"
    for step in reversed(steps) if strand.waits_backwards else steps:
        step.wait()
    # Dropped operations complete before this one.
    communicator.barrier()
    return steps


class StartedStep:
    """One step of a strand on this rank."""

    def __init__(self, step: Step, communicator: Communicator, room: Array | None) -> None:
        self._step = step
        self._rank = communicator.rank
        self._world_size = communicator.world_size
        self._operation = step.operation_of(communicator.rank)
        self._prepared: PreparedOperation | PreparedMessages = (
            PreparedMessages(step, self._rank, self._world_size)
            if self._operation.kind == "messages"
            else PreparedOperation(
                self._operation, self._rank, self._world_size, room if self._rank in step.in_arena else None
            )
        )
        self._handles: list[Handle] = []
        self._mismatches: list[str] = []
        self._is_dropped = False

    def start(self, communicator: Communicator) -> None:
        """Call the operation."""
        asynchronous = self._rank in self._step.asynchronous
        try:
            for handle in self._prepared.call(communicator, asynchronous=asynchronous):
                self._handles.append(handle)
        except MismatchError as error:
            self._mismatches.append(str(error))
        if not asynchronous:
            self.wait()
        elif self._rank in self._step.dropped:
            self._handles = []
            self._is_dropped = True

    def wait(self) -> None:
        """Wait for the end of the operation."""
        handles, self._handles = self._handles, []
        for handle in handles:
            try:
                handle.wait()
            except MismatchError as error:
                self._mismatches.append(str(error))
            assert handle.done()

    def check(
        self, joins: Sequence[int] | None, position: int, host_of_rank: Sequence[int], *, is_order_fixed: bool
    ) -> str:
        """Assert that the step succeeded; return what must be equal on all ranks, or an empty text."""
        if isinstance(self._prepared, PreparedMessages):
            self._prepared.check(self._mismatches)
            return ""
        ranks = range(self._world_size)
        joined = [rank for rank in ranks if joins is not None and joins[rank] <= position]
        said: dict[Operation, list[int]] = {}
        for rank in ranks:
            if rank not in joined:
                said.setdefault(self._step.operation_of(rank), []).append(rank)
        agrees = len(said) == 1 and (
            not joined
            or (self._operation.kind in _TAKE_PART_WHEN_JOINED and not self._operation.has_uneven_blocks)
        )
        if agrees:
            assert not self._mismatches, f"{self._step}: {self._mismatches}"
            checksum = self._prepared.check(host_of_rank, joined, is_order_fixed=is_order_fixed)
            return f"checksum {checksum}" if checksum else ""
        self._prepared.check_untouched()
        if self._is_dropped:
            return ""
        assert self._mismatches, f"rank {self._rank}: {self._step}: no error, though ranks {said} disagree"
        (message,) = self._mismatches
        missing = [word for word in ("disagree", *(["join"] if joined else [])) if word not in message]
        assert not missing, f"{self._step}: {message!r} lacks {missing}"
        return message
