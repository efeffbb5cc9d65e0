"""Samples of one rank: what it did since the last one, what it waited for, and what it used.

The training calls :meth:`RankSampler.begin_step` and :meth:`RankSampler.end_step`, which only count. A thread reads the
counts and those of the communicator, and sends them to the driver.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkdl.collective.telemetry.stalls import pending_waits
from sparkdl.monitor.communication import CommunicationWatch, link_bandwidth, world_communicator
from sparkdl.monitor.memory import get_gpu_memory_stats, gpu_load
from sparkdl.monitor.trace import StepTrace

if TYPE_CHECKING:
    from sparkdl.monitor.flops import FlopCount
    from sparkdl.monitor.settings import Monitor

_logger = logging.getLogger(__name__)

TOKEN_COLUMNS = ("tokens", "input_ids")
"""Columns of a batch that hold tokens, unless :attr:`~sparkdl.monitor.settings.Monitor.tokens` names another one."""

_LONG_WAIT_S = 1.0
"""An operation that has waited for so long counts before it ends; shorter ones may be hidden behind computation."""

_LEAST_S = 0.05
"""Shortest time of a last sample; figures of a shorter one would say nothing."""

_LAST_SAMPLE_S = 5.0
"""The training waits for so long for its last sample to be sent."""


class RankSampler:
    """Samples this rank from a thread while its context is open.

    Args:
        settings: settings of the monitor.
        rank: number of this rank.
        world_size: number of ranks.
        report: function that sends an event to the driver.
        precision: dtype of the computations; empty if it is not known.
    """

    def __init__(
        self,
        settings: Monitor,
        *,
        rank: int,
        world_size: int,
        report: Callable[[dict[str, Any]], None],
        precision: str = "",
    ) -> None:
        self._settings, self._report, self._precision = settings, report, precision
        self._rank, self._world_size, self._host = rank, world_size, socket.gethostname()
        self._steps = self._rows = self._tokens = 0
        self._reading_s = self._reading_of_epoch_s = self._flops = 0.0
        self._count: FlopCount | None = None
        self._flops_of: tuple[float, float] | None = None
        """Operations of a row, and of a step, once they are counted."""
        self._peak: float | None = None
        self._trace = None if settings.trace is None else StepTrace(*settings.trace_steps, report)
        self._number = 0
        self._communication = CommunicationWatch()
        self._pending_s = 0.0
        """Seconds of operations that had not ended at the last sample."""
        self._measures_gpu_load = True
        self._before: dict[str, float] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkdl-monitor", daemon=True)

    def __enter__(self) -> RankSampler:
        self._before = self._counts()
        if (communicator := world_communicator()) is not None:
            self._communication.take(communicator)
            link_bandwidth(communicator)  # measured before the training begins
        _samplers[:] = [self]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _samplers[:] = []
        try:
            if self._trace is not None and self._trace.is_running:
                (self._trace.end if error is None else self._trace.abandon)()
        finally:
            self._has_ended.set()
            if self._count is not None:
                self._count.end()
            self._thread.join(_LAST_SAMPLE_S)

    def begin_program(self) -> None:
        """Note that a program with its own training loop begins; the trace treats this as the beginning of step 1."""
        if self._trace is not None:
            self._trace.begin_step(1)

    def begin_step(self, number: int) -> None:
        """Note that a step begins; the operations of the first one with rows that is not traced are counted.

        Args:
            number: number of the step in the whole training, from 1.
        """
        if not self._number:
            self._peak = self._find_peak()
            if (communicator := world_communicator()) is not None:
                link_bandwidth(communicator)  # measured here if there was no communicator at the beginning
        self._number = number
        if self._trace is not None:
            self._trace.begin_step(number)
        if self._flops_of is None and not (self._trace is not None and self._trace.is_running):
            self._begin_count()

    def end_step(
        self,
        rows: int,
        *,
        batch: Mapping[str, Any] | None = None,
        tokens: int = 0,
        flops: float | None = None,
        reading_s: float = 0.0,
    ) -> None:
        """Note that a step has ended.

        Args:
            rows: rows of this rank in the step.
            batch: columns of the step, in which tokens are counted.
            tokens: tokens of this rank in the step, if there is no batch.
            flops: operations of this rank in the step; None for those that were counted in an earlier one.
            reading_s: seconds of this epoch that the rank has waited for data so far.
        """
        if self._count is not None:
            self._end_count(rows)
        if self._trace is not None:
            self._trace.end_step(self._number or 1)
        self._steps += 1
        self._rows += rows
        self._tokens += tokens if batch is None else self._tokens_of(batch)
        if flops is not None:
            self._flops_of = (0.0, 0.0)  # nothing has to be counted any more
            self._flops += flops
        elif self._flops_of is not None:
            of_row, of_step = self._flops_of
            self._flops += of_row * rows if rows else of_step
        # It is the time in the current epoch, which starts from 0 with each epoch.
        self._reading_s += reading_s - (
            self._reading_of_epoch_s if reading_s >= self._reading_of_epoch_s else 0
        )
        self._reading_of_epoch_s = reading_s

    def _find_peak(self) -> float | None:
        if self._settings.peak_tflops is not None:
            return 1e12 * self._settings.peak_tflops
        import torch

        from sparkdl.monitor.flops import peak_flops

        is_on_gpu = torch.cuda.is_initialized()
        precision = self._precision or ("bfloat16" if is_on_gpu else "float32")
        return peak_flops(torch.device("cuda" if is_on_gpu else "cpu"), precision)

    def _begin_count(self) -> None:
        from sparkdl.monitor.flops import FlopCount

        if self._count is None:
            self._count = FlopCount()
        self._count.begin()

    def _end_count(self, rows: int) -> None:
        assert self._count is not None
        flops = self._count.end()
        if rows or flops:
            self._count = None
            of_row = flops / rows if rows else 0.0
            self._flops_of = (of_row, flops)
            # Those of the earlier steps in the time of this sample, which were not counted.
            self._flops += of_row * (self._rows - self._before["rows"])

    def _tokens_of(self, batch: Mapping[str, Any]) -> int:
        names = TOKEN_COLUMNS if self._settings.tokens is None else (self._settings.tokens,)
        for name in names:
            if name in batch:
                shape = batch[name].shape
                return int(shape[0] * shape[1]) if len(shape) > 1 else 0
        return 0

    def _run(self) -> None:
        try:
            self._send_samples()
        except Exception as error:  # of a library or the system: none of them may disturb the training
            _logger.warning("Rank %d is no longer monitored: %s: %s", self._rank, type(error).__name__, error)

    def _send_samples(self) -> None:
        is_first = True
        while not self._has_ended.wait(self._settings.seconds):
            self._send(self._sample())
            is_first = False
        sample = self._sample()
        # After the last step there is nothing to say about the training.
        if sample["seconds"] >= _LEAST_S and (sample["steps"] or is_first):
            self._send(sample)

    def _send(self, sample: dict[str, Any]) -> None:
        try:
            self._report({"kind": "monitor", **sample})
        except OSError:
            self._has_ended.set()  # the task has ended, and with it the receiver

    def _counts(self) -> dict[str, float]:
        """Return what only grows."""
        return {
            "seconds": time.perf_counter(),
            "steps": self._steps,
            "rows": self._rows,
            "tokens": self._tokens,
            "flops": self._flops,
            "reading_s": self._reading_s,
            "processor_s": time.process_time(),
        }

    def _sample(self) -> dict[str, Any]:
        counts, before = self._counts(), self._before
        self._before = counts
        memory = get_gpu_memory_stats()
        communicator = world_communicator()
        changes: dict[str, Any] = {name: value - before[name] for name, value in counts.items()}
        for name in ("tokens", "flops"):
            if not counts[name]:  # no column of tokens; not counted yet
                changes[name] = None
        # What ends now may have begun before the last sample.
        changes["reading_s"] = min(changes["reading_s"], changes["seconds"])
        sample: dict[str, Any] = {
            "rank": self._rank,
            "world_size": self._world_size,
            "host": self._host,
            **changes,
            "peak_flops": self._peak,
            "communicating_s": 0.0,
            "bus_bandwidth": 0.0,
            "link_bandwidth": None,
            "memory_bytes": memory.host.process_bytes,
            "gpu_memory_bytes": sum(gpu.total_bytes - gpu.free_bytes for gpu in memory.gpus) or None,
            "gpu_load": self._gpu_load(),
        }
        if communicator is not None and communicator.world_size > 1:
            sample |= {
                "rank": communicator.rank,
                "world_size": communicator.world_size,
            }  # of the current world
            figures = self._communication.take(
                communicator, link=link_bandwidth(communicator, measures=False)
            )
            pending_s = max((wait.waited_s for wait in pending_waits()), default=0.0)
            pending_s = pending_s if pending_s > _LONG_WAIT_S else 0.0
            waited_s, self._pending_s = figures.exposed_s + pending_s - self._pending_s, pending_s
            sample["communicating_s"] = min(max(0.0, waited_s), changes["seconds"] - changes["reading_s"])
            sample["bus_bandwidth"] = figures.bus_bandwidth
            sample["link_bandwidth"] = figures.link_bandwidth
        return sample

    def _gpu_load(self) -> float | None:
        try:
            return gpu_load() if self._measures_gpu_load else None
        except Exception as error:  # of NVML, which measures no load for a part of a GPU (MIG)
            self._measures_gpu_load = False
            _logger.info("The load of the GPU is not monitored: %s: %s", type(error).__name__, error)
            return None


_samplers: list[RankSampler] = []
"""The sampler of this rank; empty if it is not monitored."""


def end_step(rows: int, *, tokens: int = 0, flops: float | None = None) -> None:
    """Tell the monitor of a Runner that a step of your own training loop has ended. Costs about a microsecond.

    The operations between the first and the second call are counted. In a process that is not monitored, it does
    nothing.

    Args:
        rows: rows of this rank in the step.
        tokens: tokens of this rank in the step.
        flops: floating point operations of this rank in the step; None for those that were counted.
    """
    for sampler in _samplers:
        sampler.end_step(rows, tokens=tokens, flops=flops)
        sampler.begin_step(sampler._steps + 1)
