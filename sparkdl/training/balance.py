"""The speeds of the ranks: rows per rank that follow them, and ranks that are too slow for long.

Each rank measures the time that its own computations take. Every two seconds the ranks exchange their measurements. If
rows follow the speeds, all ranks compute the same new rows per rank: with these, all ranks would finish a step at the
same time. The rows of all ranks together in a step stay the same.
"""

from __future__ import annotations

import heapq
import logging
import math
import statistics
import time
from operator import mul
from typing import TYPE_CHECKING

import numpy as np
import torch

from sparkdl.training.history import blocked_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from sparkdl.collective import Communicator
    from sparkdl.data import PlannedFeed


logger = logging.getLogger(__name__)

EVERY_S = 2.0
"""Seconds between two exchanges of measurements."""

_LEAST_S = 1.0
"""Seconds that a measurement takes at least; shorter ones, at the beginning of a fit, only tell how long steps take."""

_LEAST_GAIN = 0.05
"""Minimum part of a step's time that new rows per rank must save. Measurements vary by as much from time to time, and a
rank that takes rows of another one's shard has to read that shard as well."""


def rows_by_speed(seconds_per_row: Sequence[float], num_rows: int) -> list[int]:
    """Divide rows among ranks so that the slowest rank takes as little time as possible, each with at least one row.

    Args:
        seconds_per_row: seconds that each rank takes for a row.
        num_rows: number of rows of all ranks together, at least one for each.
    """
    speeds = [1 / seconds for seconds in seconds_per_row]
    rows = [max(1, math.floor(num_rows * speed / sum(speeds))) for speed in speeds]
    paces = list(enumerate(seconds_per_row))
    while sum(rows) > num_rows:  # the single rows of very slow ranks are taken from others
        rank, _ = max((pace for pace in paces if rows[pace[0]] > 1), key=lambda pace: rows[pace[0]] * pace[1])
        rows[rank] -= 1
    waiting = [((rows[rank] + 1) * seconds, rank) for rank, seconds in paces]
    heapq.heapify(waiting)
    for _ in range(num_rows - sum(rows)):
        finished, rank = waiting[0]
        rows[rank] += 1
        heapq.heapreplace(waiting, (finished + seconds_per_row[rank], rank))
    return rows


class HostTime:
    """Computing time on the CPU: the time of the steps in which this rank was not blocked in communication.

    It is not the processor's time, which is the same on a processor that is throttled, or shared with others.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._blocked_before_s: float | None = None
        self._blocked_s = 0.0

    def begin_step(self) -> None:
        """Note that a step begins; its batch has been read."""
        if self._blocked_before_s is None:  # reading it takes 13 us
            self._blocked_before_s = blocked_s(self._communicator)

    def end_forward(self) -> None:
        """Do nothing: the whole step is measured."""

    def pause(self) -> None:
        """Note that what follows, until the next step, belongs to no step."""
        if self._blocked_before_s is not None:
            self._blocked_s += blocked_s(self._communicator) - self._blocked_before_s
            self._blocked_before_s = None

    def take_s(self, elapsed_s: float) -> float:
        """Return the seconds of computing in the steps since the last call, which took ``elapsed_s`` in all."""
        self.pause()
        computing_s, self._blocked_s = elapsed_s - self._blocked_s, 0.0
        return computing_s


class GpuTime:
    """Computing time on a GPU: that of the forward passes on the device.

    The host only queues the work, and during a backward pass gradients wait for those of other ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: torch.cuda.Event | None = None
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin_step(self) -> None:
        """Note that a step begins; its batch has been read."""
        self._begun = self._event()

    def end_forward(self) -> None:
        """Note that the loss of the step is computed."""
        if self._begun is not None:
            self._passes.append((self._begun, self._event()))
            self._begun = None

    def pause(self) -> None:
        """Do nothing: only forward passes are measured."""

    def take_s(self, elapsed_s: float) -> float:
        """Return the seconds of the forward passes since the last call, waiting for the device."""
        del elapsed_s
        passes, self._passes = self._passes, []
        if passes:
            passes[-1][1].synchronize()
        return float(sum(begun.elapsed_time(ended) for begun, ended in passes)) / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class StragglerWatch:
    """Finds ranks that are slower than the others by a factor for long.

    Args:
        factor: a rank is slow if its time per row is at least this factor times the median of the other ranks.
        seconds: how long a rank has to be slow, without interruption, before it is named.
    """

    def __init__(self, factor: float, seconds: float) -> None:
        self._factor, self._seconds = factor, seconds
        self._slow_s: dict[int, float] = {}
        self._named: set[int] = set()

    def observe(self, paces: Sequence[float], elapsed_s: float) -> dict[int, float]:
        """Take in the seconds per row of each rank, as measured for some time.

        Returns:
            For each rank that has now been slow for long enough, the ratio of its time per row to the median of the
            others.
        """
        ratios = {}
        for rank, pace in enumerate(paces):
            ratio = pace / statistics.median([*paces[:rank], *paces[rank + 1 :]])
            if ratio < self._factor:
                self._slow_s.pop(rank, None)
                self._named.discard(rank)
                continue
            self._slow_s[rank] = self._slow_s.get(rank, 0.0) + elapsed_s
            if self._slow_s[rank] >= self._seconds and rank not in self._named:
                self._named.add(rank)
                ratios[rank] = ratio
        return ratios


class RankSpeeds:
    """Measures the speeds of the ranks, changes how the rows of a step are divided, and names ranks that are slow.

    Args:
        feed: feed of this rank's rows.
        communicator: communicator of at least two ranks; if rows follow the speeds, a step has a row for each rank.
        device: device of the module.
        divides_rows: whether the rows of a step follow the speeds.
        watch: finds slow ranks; None for none.
        on_straggler: called on every rank with the number of a slow rank, and the ratio of its time per row to the
            median of the others.
        batches_ahead: number of batches that may have been taken from the feed before the step that uses them.

    Attributes:
        rows: number of rows of each rank in a full step, from the latest change on.
        time: measures the computations of this rank.
    """

    def __init__(
        self,
        feed: PlannedFeed,
        communicator: Communicator,
        device: torch.device,
        *,
        divides_rows: bool,
        watch: StragglerWatch | None,
        on_straggler: Callable[[int, float], None],
        batches_ahead: int,
    ) -> None:
        self._divides_rows, self._watch, self._on_straggler = divides_rows, watch, on_straggler
        self._feed, self._communicator, self._batches_ahead = feed, communicator, batches_ahead
        self.time = HostTime(communicator) if device.type == "cpu" else GpuTime(device)
        self.rows = feed.rows_in_step(0)
        if divides_rows:
            self.rows = rows_by_speed([1.0] * communicator.world_size, sum(self.rows))
        self._paces: npt.NDArray[np.float64] | None = None
        """Seconds per row of each rank, smoothed."""
        self._is_warm = False
        self._started = 0.0
        self._period = 1
        """Number of steps between two exchanges."""
        self._num_steps, self._num_rows, self._elapsed_s = 0, 0, 0.0

    def begin_step(self) -> None:
        """Begin to measure a step; its batch has been read."""
        self._started = time.perf_counter()
        self.time.begin_step()

    def end_step(self, num_rows: int, *, epoch: int, step: int, following: int) -> None:
        """Finish measuring a step. Collective.

        At the end of a period, the ranks exchange measurements and adjust the rows of later steps.

        Args:
            num_rows: number of rows of this rank in the step.
            epoch: number of the epoch, from 1.
            step: number of the step, from 1.
            following: number of the next step, from 0, among those that the feed has in this epoch.
        """
        self._elapsed_s += time.perf_counter() - self._started
        self._num_rows += num_rows
        self._num_steps += 1
        if self._num_steps < self._period:
            return
        world_size, num_steps = self._communicator.world_size, self._num_steps
        measured = np.empty((world_size, 3))
        measured_here = np.array([self.time.take_s(self._elapsed_s), self._num_rows, self._elapsed_s])
        self._communicator.allgather(measured_here, measured, name="speeds of ranks")
        self._num_steps, self._num_rows, self._elapsed_s = 0, 0, 0.0
        computing_s, num_rows_of_ranks, elapsed_s = measured.T
        longest_s = float(elapsed_s.max())
        was_warm, self._is_warm = self._is_warm, True
        self._period = max(1, min(4 * num_steps, round(num_steps * EVERY_S / longest_s)))
        if was_warm and longest_s >= _LEAST_S and num_rows_of_ranks.all():
            paces = np.maximum(computing_s, 1e-9) / num_rows_of_ranks
            self._paces = paces if self._paces is None else (self._paces + paces) / 2
            if self._watch is not None:
                for rank, ratio in self._watch.observe(self._paces.tolist(), longest_s).items():
                    self._on_straggler(rank, ratio)
            if self._divides_rows:
                self._balance(self._paces.tolist(), epoch, step, following)

    def _balance(self, paces: list[float], epoch: int, step: int, following: int) -> None:
        rows = rows_by_speed(paces, sum(self.rows))
        slowest_s, slowest_before_s = (max(map(mul, counts, paces)) for counts in (rows, self.rows))
        if slowest_s > (1 - _LEAST_GAIN) * slowest_before_s:
            return
        self.rows = rows
        # Until then, the ranks open the further shards that they will take rows of.
        later = max(self._batches_ahead, self._period // 4)
        self._feed.divide(rows, epoch=epoch - 1, step=following + later)
        if self._communicator.rank == 0:
            logger.info(
                "Epoch %d, step %d: the ranks take %s ms for a row. After %d more steps, they have %s of the %d rows "
                "of a step.",
                epoch,
                step,
                ", ".join(f"{1e3 * pace:.3g}" for pace in paces),
                later,
                ", ".join(map(str, rows)),
                sum(rows),
            )
