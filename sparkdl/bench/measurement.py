"""Timing one operation on all ranks. Runs on the *rank*.

A repetition is a handful of operations on buffers used in rotation, which are rewritten between repetitions, outside
the time that counts. Every rank takes the same number of repetitions; the slowest rank's time is the repetition's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl.collective import Rendezvous

_ROTATED_BUFFERS = 4
_MIN_REPETITIONS = 5
_MAX_REPETITIONS = 500
_WARM_UPS = 3
_REPETITION_S = 1e-3
_MAX_OPERATIONS = 64
_EXCHANGE_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this rank stands while it measures.

    Attributes:
        rank: number of this rank.
        world_size: how many ranks measure together.
        rendezvous: where rank 0 tells the others how much to measure.
        barrier: returns once all ranks are there, by whatever means are quick.
    """

    rank: int
    world_size: int
    rendezvous: Rendezvous
    barrier: Callable[[], None]


def measure(
    ranks: Ranks,
    num_bytes: int,
    operation: Callable[[Any], None],
    wrap: Callable[[np.ndarray[Any, Any]], Any],
    *,
    seconds: float,
    sums: bool = True,
) -> list[float]:
    """Seconds that each repetition's operation took on this rank, on average over the repetition.

    Args:
        ranks: this rank among the others.
        num_bytes: size of the float32 buffers.
        operation: what to time, in place on a buffer.
        wrap: what makes of a NumPy array the buffer that ``operation`` takes, sharing its memory.
        seconds: how long to measure, about.
        sums: the operation adds up the ranks' buffers; the last result is checked.

    Raises:
        AssertionError: if the operation gave a wrong sum.
    """
    arrays = [np.empty(max(1, num_bytes // 4), dtype=np.float32) for _ in range(_ROTATED_BUFFERS)]
    buffers = [wrap(array) for array in arrays]
    duration_s = _time_one(ranks, arrays, buffers, operation)
    repetitions, operations = _agree(ranks, num_bytes, duration_s, seconds)
    times = []
    for repetition in range(repetitions):
        for array in arrays:
            array.fill(ranks.rank + 1 + repetition)
        ranks.barrier()
        start = time.perf_counter()
        for index in range(operations):
            operation(buffers[index % _ROTATED_BUFFERS])
        times.append((time.perf_counter() - start) / operations)
        if sums:
            _check(ranks, arrays, operations, repetition)
    return times


def _time_one(ranks: Ranks, arrays: list[Any], buffers: list[Any], operation: Callable[[Any], None]) -> float:
    for array in arrays:
        array.fill(0.0)
    for buffer in buffers[:_WARM_UPS]:
        operation(buffer)
    ranks.barrier()
    start = time.perf_counter()
    for buffer in buffers:
        operation(buffer)
    return (time.perf_counter() - start) / len(buffers)


def _agree(ranks: Ranks, num_bytes: int, duration_s: float, seconds: float) -> tuple[int, int]:
    """Rank 0's choice of repetitions, and of operations in each."""
    key = f"bench/{num_bytes}"
    if ranks.rank == 0:
        operations = int(min(_MAX_OPERATIONS, max(1, _REPETITION_S / duration_s)))
        repetitions = int(min(_MAX_REPETITIONS, max(_MIN_REPETITIONS, seconds / (operations * duration_s))))
        ranks.rendezvous.set(key, f"{repetitions} {operations}".encode())
    repetitions, operations = map(int, ranks.rendezvous.get(key, _EXCHANGE_TIMEOUT_S).split())
    return repetitions, operations


def _check(ranks: Ranks, arrays: list[Any], operations: int, repetition: int) -> None:
    total = sum(rank + 1 + repetition for rank in range(ranks.world_size))
    for index, array in enumerate(arrays[: min(operations, _ROTATED_BUFFERS)]):
        times = len(range(index, operations, _ROTATED_BUFFERS))
        expected = np.float32(total) * np.float32(ranks.world_size) ** (times - 1)
        if not (np.isclose(array[0], expected) and np.isclose(array[-1], expected)):
            raise AssertionError(f"the allreduce gave {array[0]} and {array[-1]} instead of {expected}")
