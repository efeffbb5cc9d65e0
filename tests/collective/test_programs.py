"""Random programs of operations give NumPy's results, to the bit, over every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from sparkdl.collective import Deadline
from sparkdl.errors import RankError
from tests.collective.scenes.program_runner import Outcome, run_program
from tests.collective.scenes.programs import Program, Scope, programs
from tests.lasting_ranks import LastingRanks

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment

OPERATION_TIMEOUT_S = 20.0
SEARCH_S = 60.0
ARENA_BYTES = 16 << 20


@dataclass(frozen=True)
class World:
    """Where programs run: the transport, and which ranks share a host."""

    transport: str
    host_of_rank: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.host_of_rank)

    @property
    def is_order_fixed(self) -> bool:
        return self.transport != "mpi"


WORLDS = {
    "shm-1": World("shm", (0,)),
    "shm-2": World("shm", (0, 0)),
    "shm-3": World("shm", (0, 0, 0)),
    "shm-4": World("shm", (0, 0, 0, 0)),
    "tcp-2": World("tcp", (0, 0)),
    "tcp-3": World("tcp", (0, 0, 0)),
    "two-hosts-of-2-and-1": World("native", (0, 0, 1)),
    "two-hosts-of-2": World("native", (0, 1, 0, 1)),
    "three-hosts-of-2-1-and-1": World("native", (0, 1, 0, 2)),
    "mpi-1": World("mpi", (0,)),
    "mpi-2": World("mpi", (0, 0)),
    "mpi-3": World("mpi", (0, 0, 0)),
}


@contextmanager
def serve(environment: RankEnvironment, world: World) -> Iterator[Callable[[Program], Outcome]]:
    """Answer programs on a rank with their outcomes."""
    with environment.open(host_of_rank=world.host_of_rank, timeout_s=OPERATION_TIMEOUT_S) as communicator:
        arena = communicator.allocate(ARENA_BYTES)
        yield partial(run_program, communicator, arena=arena, is_order_fixed=world.is_order_fixed)


class Programs:
    """The ranks of one world, started again after a program that left them useless."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ranks: LastingRanks | None = None
        self._failures: dict[Program, AssertionError] = {}
        self._search: Deadline | None = None

    def check(self, program: Program) -> None:
        """Assert that a program succeeds on all ranks.

        The search for the smallest failing program ends before the deadline of the test would end it.
        """
        if self._search is not None and self._search.expired:
            if program in self._failures:
                raise self._failures[program]
            return
        try:
            self._run(program)
        except AssertionError as error:
            self._failures[program] = error
            self._search = self._search or Deadline(SEARCH_S)
            raise

    def _run(self, program: Program) -> None:
        if self._ranks is None:
            self._ranks = LastingRanks(self._world.size, serve, self._world, transport=self._world.transport)
        try:
            outcomes: list[Outcome] = self._ranks.call(program)
        except (RankError, TimeoutError) as error:
            self.close()
            raise AssertionError(str(error)) from error
        failures = [failure for outcome in outcomes for failure in outcome.failures]
        if not all(outcome.is_usable for outcome in outcomes):
            self.close()
        assert not failures, "\n".join(failures)
        for place in {place for outcome in outcomes for place in outcome.shared}:
            told = {outcome.shared[place] for outcome in outcomes if place in outcome.shared}
            assert len(told) == 1, f"strand {place[0]}, step {place[1]}: the ranks differ: {told}"

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


# The others differ in aspects that these cover together; programs over MPI run daily in test_mpiexec.py.
QUICK = {"shm-2", "tcp-3", "three-hosts-of-2-1-and-1"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in WORLDS],
)
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.param]


@pytest.fixture(scope="module")
def runner(world: World) -> Iterator[Programs]:
    made = Programs(world)
    yield made
    made.close()


def check_programs(world: World, runner: Programs, *, num_examples: int, is_random: bool) -> None:
    @settings(
        max_examples=num_examples,
        derandomize=not is_random,
        database=None,
        deadline=None,
        print_blob=is_random,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(programs(world.size, Scope()))
    def check(program: Program) -> None:
        runner.check(program)

    check()


def test_programs_do_what_numpy_does(world: World, runner: Programs) -> None:
    check_programs(world, runner, num_examples=60, is_random=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_programs_do_what_numpy_does(world: World, runner: Programs) -> None:
    check_programs(world, runner, num_examples=2000, is_random=True)
