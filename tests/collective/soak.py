"""Many random operations on one set of ranks, and what they leave behind. Runs on ranks."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.errors import CommunicatorAbortedError, CommunicatorTimeoutError
from sparkdl.rendezvous.store import all_gather_bytes
from tests.collective.census import Census
from tests.collective.eventually import eventually
from tests.collective.program_runner import run_program
from tests.collective.programs import Scope, draw_program

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
    """What a rank reports.

    Attributes:
        warm: what it held without a communicator after half of the operations.
        wet: what it held without one at the end.
        num_operations: how many were called.
        num_process_sets: how many were opened and closed.
        num_mismatches: in how many operations the ranks disagreed.
        num_recoveries: how often a communicator failed and another was opened.
        failure: what went wrong.
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
    """Run programs until they have had so many operations; the same ones on every rank."""
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
        # MPI cannot take back what has begun.
        if is_order_fixed and random.random() < 0.01:
            del arena
            _meet(environment, f"recovery {soaked.num_recoveries}")
            _fail(communicator, environment, random)
            communicator = _open(environment, host_of_rank)
            arena = communicator.allocate(_ARENA_BYTES)
            soaked.num_recoveries += 1
        # An allocator takes long to have what it needs: half of the operations.
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


def _meet(environment: RankEnvironment, key: str) -> None:
    """Wait for all ranks, but not by the communicator: an abort overtakes what others have still to hear from it."""
    rank, world_size = environment.rank, environment.world_size
    all_gather_bytes(
        environment.rendezvous, key=key, rank=rank, world_size=world_size, value=b"", timeout_s=60.0
    )


def _fail(communicator: Communicator, environment: RankEnvironment, random: Random) -> None:
    """Have a communicator fail with operations under way on all ranks."""
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
    # Threads of communicators that failed end by themselves, and then give back what they had.
    passing = ("messages", "peer-watch")
    assert eventually(
        lambda: not any(word in thread.name for thread in threading.enumerate() for word in passing),
        timeout_s=20.0,
    )
    # Whoever leaves last deletes the keys of all, and whoever continues makes new ones.
    _meet(environment, f"before {name}")
    taken = Census.take(environment.rendezvous.num_keys())
    _meet(environment, f"after {name}")
    return taken
