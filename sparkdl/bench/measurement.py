"""Timing one operation on all ranks. Runs on the *rank*.

A repetition is a handful of operations, on data that was rewritten outside the time that counts. All ranks begin it
at one time, and take the same number of repetitions.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from sparkdl.bench.sessions import Session


class Trial(Protocol):
    """One contender at one case, on one rank; made for a turn, and given up after it.

    Attributes:
        num_warm_ups: repetitions of every turn that do not count.
    """

    num_warm_ups: int

    def prepare(self, repetition: int, operations: int) -> None:
        """Rewrite what the next operations read; takes no part in the time."""

    def run(self, operations: int) -> None:
        """The operations, whose time is taken."""

    def check(self) -> None:
        """Raise an ``AssertionError`` if the operations gave a wrong result; takes no part in the time."""

    def result(self) -> dict[str, Any]:
        """What else there is to say about the turn, in JSON's terms."""


def take_turn(session: Session, trial: Trial, repetitions: int, operations: int) -> list[float]:
    """Seconds that an operation took on this rank, on average over each repetition.

    Raises:
        AssertionError: if an operation gave a wrong result.
    """
    times = []
    for repetition in range(-trial.num_warm_ups, repetitions):
        trial.prepare(repetition + trial.num_warm_ups, operations)
        session.communicator.barrier()
        start = time.perf_counter()
        trial.run(operations)
        duration_s = time.perf_counter() - start
        trial.check()
        if repetition >= 0:
            times.append(duration_s / operations)
    return times
