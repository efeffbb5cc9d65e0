"""Offset between this rank's clock and rank 0's: ``time.monotonic_ns()`` has a different origin on each host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator

_NUM_ROUNDS = 16


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """Offset that, added to this rank's clock, gives rank 0's.

    Attributes:
        at_ns: time of the measurement, by this rank's clock.
        offset_ns: offset to add.
        error_ns: largest possible error of the offset.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def measure_offset(
    communicator: Communicator, *, now: Callable[[], int] = time.monotonic_ns, timeout_s: float | None = None
) -> ClockOffset:
    """Measure the offset to rank 0's clock; collective over all ranks.

    Rank 0 reads its clock after a barrier of all ranks, and broadcasts the time. On every rank, this time lies between
    the beginning of the barrier and the end of the broadcast. The result is the intersection of these bounds over
    several rounds. Ranks on rank 0's host share its clock.
    """
    lowest, highest = -(2**62), 2**62
    for _ in range(_NUM_ROUNDS):
        seen = np.zeros(1, np.int64)
        begin = now()
        communicator.barrier(name="clock offset", timeout_s=timeout_s)
        if communicator.rank == 0:
            seen[0] = now()
        communicator.broadcast(seen, root=0, name="clock offset", timeout_s=timeout_s)
        end = now()
        lowest, highest = max(lowest, int(seen[0]) - end), min(highest, int(seen[0]) - begin)
    if communicator.topology.host == 0:
        return ClockOffset(at_ns=now(), offset_ns=0, error_ns=0)
    # Clocks that drift apart during the rounds may leave bounds that cross.
    return ClockOffset(at_ns=now(), offset_ns=(lowest + highest) // 2, error_ns=abs(highest - lowest) // 2)


@dataclass(frozen=True, kw_only=True)
class SharedClock:
    """Converts this rank's times to rank 0's, from the offsets at two points in time.

    Attributes:
        first: the offset at the beginning.
        last: the offset at the end; the same as ``first`` if it was not measured again.
    """

    first: ClockOffset
    last: ClockOffset

    def to_shared(self, time_ns: int) -> int:
        """Convert a time of this rank's clock to rank 0's; the drift of the clocks is assumed to be constant."""
        between_ns = self.last.at_ns - self.first.at_ns
        drift_ns = self.last.offset_ns - self.first.offset_ns
        share = (time_ns - self.first.at_ns) / between_ns if between_ns > 0 else 0.0
        return time_ns + self.first.offset_ns + round(drift_ns * share)

    @property
    def error_ns(self) -> int:
        """Largest possible error of a converted time."""
        return max(self.first.error_ns, self.last.error_ns)
