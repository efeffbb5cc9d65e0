"""Many random operations on one set of ranks, and the resources that remain afterwards. Runs on ranks."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.errors import CommunicatorAbortedError, CommunicatorTimeoutError
from tests.collective.checks.census import Census
from tests.collective.eventually import eventually
from tests.collective.scenes.program_runner import run_program
from tests.collective.scenes.programs import Scope, draw_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment

SIZES = (0, 1, 3, 17, 1000, 5000)
_ARENA_BYTES = 1 << 20
_LATE_S = 0.05
_FAILURES = (CommunicatorTimeoutError, CommunicatorAbortedError)


@dataclass(kw_only=True)
class Soaked:
    """The report of one rank.

    Attributes:
        warm: resources held without a communicator after half of the operations.
        wet: resources held without a communicator at the end.
        num_operations: number of operations called.
        num_process_sets: number of process sets opened and closed.
        num_mismatches: number of operations in which the ranks disagreed.
        num_recoveries: number of times a communicator failed and another was opened.
        failure: description of a failure, if any.
    """

    warm: Census
    wet: Census
    num_operations: int = 0
    num_process_sets: int = 0
    num_mismatches: int = 0
    num_recoveries: int = 0
    failure: str = ""


def soak(
    environment: RankEnvironment, host_of_rank: Sequence[int], num_operations: int, scope: Scope, seed: int
) -> Soaked:
    """Run programs until they have called ``num_operations`` operations; every rank runs the same programs."""
    random = Random(seed)
    dry = _census(environment, "dry")
    soaked = Soaked(warm=dry, wet=dry)
    is_order_fixed = environment.transport != "mpi"
    communicator = _open(environment, host_of_rank)
    arena = communicator.allocate(_ARENA_BYTES)
    while soaked.num_operations < num_operations and not soaked.failure:
        program = draw_program(random, environment.world_size, scope)
        outcome = run_program(communicator, program, arena, is_order_fixed=is_order_fixed)
        soaked.failure = "\n".join(outcome.failures)
        soaked.num_operations += sum(len(strand.steps) for strand in program)
        soaked.num_process_sets += sum(strand.ranks is not None for strand in program)
        soaked.num_mismatches += sum(step.odd_rank is not None for strand in program for step in strand.steps)
        # MPI cannot cancel operations that have begun.
        if is_order_fixed and random.random() < 0.01:
            del arena
            # Without the communicator: an abort would overtake messages that others have yet to receive.
            environment.meet(f"recovery {soaked.num_recoveries}")
            _fail(communicator, environment, random)
            communicator = _open(environment, host_of_rank)
            arena = communicator.allocate(_ARENA_BYTES)
            soaked.num_recoveries += 1
        # An allocator takes half of the operations to reach its steady state.
        if soaked.warm is dry and soaked.num_operations >= num_operations // 2:
            del arena
            communicator.close()
            del communicator
            soaked.warm = _census(environment, "warm")
            communicator = _open(environment, host_of_rank)
            arena = communicator.allocate(_ARENA_BYTES)
    del arena
    communicator.close()
    del communicator
    soaked.wet = _census(environment, "wet")
    return soaked


def _open(environment: RankEnvironment, host_of_rank: Sequence[int]) -> Communicator:
    return environment.open(host_of_rank=host_of_rank, timeout_s=30.0)


def _fail(communicator: Communicator, environment: RankEnvironment, random: Random) -> None:
    """Make a communicator fail while operations run on all ranks."""
    culprit = random.randrange(environment.world_size)
    aborts, closes = random.random() < 0.5, random.random() < 0.5
    handles = [communicator.allreduce_async(np.ones(1000), name="before") for _ in range(3)]
    if environment.rank == culprit:
        if aborts:
            communicator.abort("soaked")
        assert eventually(lambda: communicator.failure is not None, timeout_s=20.0)
    else:
        with suppress(*_FAILURES):
            communicator.allreduce(np.ones(100_000), timeout_s=20.0 if aborts else _LATE_S)
        assert communicator.failure is not None
    for handle in handles:
        with suppress(*_FAILURES):
            handle.wait()
    if closes:
        communicator.close()


def _census(environment: RankEnvironment, name: str) -> Census:
    gc.collect()
    # Threads of failed communicators end on their own, and only then release their resources.
    passing = ("messages", "peer-watch")
    assert eventually(
        lambda: not any(word in thread.name for thread in threading.enumerate() for word in passing),
        timeout_s=20.0,
    )
    # The last rank to leave deletes the keys of all; a rank that continues makes new ones.
    environment.meet(f"before {name}")
    taken = Census.take(environment.rendezvous.num_keys())
    environment.meet(f"after {name}")
    return taken
