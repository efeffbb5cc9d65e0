"""The figures of all ranks on the driver, from their latest samples.

A :class:`Board` takes the events of the ranks and hands a new :class:`Snapshot` to its exports once every rank has sent
another sample. What an export does with it is in :mod:`sparkdl.monitor.exports`.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sparkdl.monitor.trace import TraceFile

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Figures of one rank over the time of its latest sample. What is not known is None.

    Attributes:
        host: name of the rank's host.
        steps_per_s: steps per second.
        rows_per_s: rows of the rank per second.
        tokens_per_s: tokens of the rank per second.
        flops_per_s: floating point operations of its model per second.
        peak_flops_per_s: the most operations per second that its device can do.
        reading: share of the time in which it waited for data.
        communicating: share of the time in which it was blocked in communication.
        computing: share of all other time.
        slowness: how many times the median time of the other ranks it computes for a row.
        bandwidth: bytes per second that its links carried during operations, as nccl-tests defines it.
        bandwidth_share: ``bandwidth`` as a share of that of the link.
        processor_cores: number of cores that its process used, on average.
        memory_bytes: resident memory of its process.
        gpu_memory_bytes: used memory of its GPU.
        gpu_load: load of its GPU, from 0 to 1.
    """

    host: str
    steps_per_s: float
    rows_per_s: float
    tokens_per_s: float | None
    flops_per_s: float | None
    peak_flops_per_s: float | None
    reading: float
    communicating: float
    computing: float
    slowness: float | None
    bandwidth: float
    bandwidth_share: float | None
    processor_cores: float
    memory_bytes: int
    gpu_memory_bytes: int | None
    gpu_load: float | None

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (MFU): operations of the model as a share of the peak."""
        if not self.peak_flops_per_s or self.flops_per_s is None:
            return None
        return self.flops_per_s / self.peak_flops_per_s


_POSITION = ("epoch", "epochs", "step", "steps", "loss", "eta_s")
"""Fields of the events of a fit's progress that a snapshot has."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The latest figures of all ranks.

    Attributes:
        name: name of the fit or run.
        number: number of the snapshot, from 1.
        at: time of the snapshot, in seconds since 1970.
        began_at: time at which the monitor began.
        pid: process id of the driver.
        position: epoch, step, loss and remaining seconds of a fit; empty until its first step, and for a run.
        ranks: figures by rank.
    """

    name: str
    number: int
    at: float
    began_at: float
    pid: int = field(default_factory=os.getpid)
    position: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[int, RankFigures] = field(default_factory=dict)

    def totals(self) -> dict[str, float]:
        """Return the figures of all ranks together, by name; those that are not known are left out."""
        ranks = list(self.ranks.values())
        if not ranks:
            return {}
        totals = {}
        for name in ("rows_per_s", "tokens_per_s", "flops_per_s"):
            known = [value for rank in ranks if (value := getattr(rank, name)) is not None]
            if known:
                totals[name] = float(sum(known))
        if all(rank.utilization is not None for rank in ranks):
            totals["utilization"] = totals["flops_per_s"] / sum(rank.peak_flops_per_s or 0 for rank in ranks)
        for name in ("reading", "communicating", "computing"):
            totals[name] = statistics.fmean(getattr(rank, name) for rank in ranks)
        totals["efficiency"] = 1 - totals["communicating"]
        slowness = [rank.slowness for rank in ranks if rank.slowness is not None]
        if slowness:
            totals["slowness"] = max(slowness)
        return totals

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Snapshot:
        """Restore a snapshot from the result of ``asdict``, also after a round trip through JSON."""
        ranks = {int(rank): RankFigures(**figures) for rank, figures in fields["ranks"].items()}
        return cls(**{**fields, "ranks": ranks})


class Export(Protocol):
    """Gives snapshots away, from :meth:`show` on until it is closed."""

    def show(self, snapshot: Snapshot) -> None:
        """Take a new snapshot."""

    def close(self) -> None:
        """Release what the export holds."""


class Board:
    """Takes the events of the ranks of a fit or run on the driver; a context manager that closes the exports.

    Args:
        name: name of the fit or run.
        exports: what snapshots are given to.
        trace: file for a trace of some steps; None for none.
    """

    def __init__(self, name: str, exports: Sequence[Export], trace: TraceFile | None = None) -> None:
        self._name, self._exports, self._trace = name, list(exports), trace
        self._stack = ExitStack()
        self._samples: dict[int, Mapping[str, Any]] = {}
        self._news: set[int] = set()
        self._position: dict[str, float] = {}
        self._number = 0
        self._began_at = time.time()

    def __enter__(self) -> Board:
        for export in self._exports:
            self._stack.callback(self._succeeds, export, export.close)
        if self._trace is not None:
            self._stack.callback(self._succeeds, self._trace, self._trace.close)
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._news:
            self._show()
        self._stack.close()

    def handle(self, event: Mapping[str, Any]) -> None:
        """Take an event of a rank: a sample, or the progress of a fit. Others are ignored."""
        kind = event.get("kind")
        if kind in ("step", "epoch"):
            self._position |= {name: event[name] for name in _POSITION if event.get(name) is not None}
        elif kind == "monitor":
            self._take(event)
        elif kind == "trace" and self._trace is not None:
            trace = self._trace
            if not self._succeeds(trace, partial(trace.take, event)):
                self._trace = None

    def _take(self, sample: Mapping[str, Any]) -> None:
        rank, world_size = int(sample["rank"]), int(sample["world_size"])
        if rank in self._news:  # some other rank is late
            self._show()
        # The ranks of an elastic fit may have become fewer.
        self._samples = {other: known for other, known in self._samples.items() if other < world_size}
        self._samples[rank] = sample
        self._news.add(rank)
        if len(self._news) >= world_size:
            self._show()

    def _show(self) -> None:
        self._news.clear()
        if self._samples:
            self._number += 1
        snapshot = Snapshot(
            name=self._name,
            number=self._number,
            at=time.time(),
            began_at=self._began_at,
            position=dict(self._position),
            ranks=figures_of(self._samples),
        )
        for export in list(self._exports):
            if not self._succeeds(export, partial(export.show, snapshot)):
                self._exports.remove(export)

    def _succeeds(self, writer: Export | TraceFile, write: Callable[[], None]) -> bool:
        """Call a function of an export or the trace; log a warning and return False if it fails."""
        try:
            write()
        except Exception as error:  # of a disk or a library: none of them may end the fit
            _logger.warning(
                "The figures of %s are no longer written by %s: %s: %s",
                self._name,
                type(writer).__name__,
                type(error).__name__,
                error,
            )
            return False
        return True


def figures_of(samples: Mapping[int, Mapping[str, Any]]) -> dict[int, RankFigures]:
    """Return the figures of the ranks from their samples, in order of rank."""
    computing_s = {
        rank: max(0.0, float(sample["seconds"] - sample["reading_s"] - sample["communicating_s"]))
        for rank, sample in samples.items()
    }
    seconds_of_row = {
        rank: max(computing_s[rank], 1e-9) / sample["rows"]
        for rank, sample in samples.items()
        if sample["rows"]
    }
    slowness = {}
    for rank, seconds in seconds_of_row.items():
        others = [other for number, other in seconds_of_row.items() if number != rank]
        if others:
            slowness[rank] = seconds / statistics.median(others)
    return {rank: _figures(samples[rank], computing_s[rank], slowness.get(rank)) for rank in sorted(samples)}


def _figures(sample: Mapping[str, Any], computing_s: float, slowness: float | None) -> RankFigures:
    seconds, link = float(sample["seconds"]), sample["link_bandwidth"]
    tokens, flops = sample["tokens"], sample["flops"]
    return RankFigures(
        host=sample["host"],
        steps_per_s=sample["steps"] / seconds,
        rows_per_s=sample["rows"] / seconds,
        tokens_per_s=None if tokens is None else tokens / seconds,
        flops_per_s=None if flops is None else flops / seconds,
        peak_flops_per_s=sample["peak_flops"],
        reading=sample["reading_s"] / seconds,
        communicating=sample["communicating_s"] / seconds,
        computing=computing_s / seconds,
        slowness=slowness,
        bandwidth=sample["bus_bandwidth"],
        bandwidth_share=sample["bus_bandwidth"] / link if link else None,
        processor_cores=sample["processor_s"] / seconds,
        memory_bytes=sample["memory_bytes"],
        gpu_memory_bytes=sample["gpu_memory_bytes"],
        gpu_load=sample["gpu_load"],
    )
