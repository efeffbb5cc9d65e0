"""Communication and throughput of this rank, from the counts that every communicator keeps.

Nothing here communicates. :class:`CommunicationWatch` takes the difference of two reports; ``monitor_communication``
and the sampler of a fit use it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from sparkdl.collective.current import provided_communicator
from sparkdl.errors import ParamError
from sparkdl.rendezvous.addresses import interface_addresses

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.collective.telemetry.communication_report import CommunicationReport, OperationReport
    from sparkdl.collective.telemetry.monitor import Telemetry


@dataclass(frozen=True, kw_only=True)
class CommunicationFigures:
    """Communication of this rank over some time.

    On a GPU, operations of NCCL are queued on streams, and are not part of these figures; see docs/monitoring.md.

    Attributes:
        ranks: world ranks of the process set; all ranks if it is the world.
        seconds: the time that the figures cover.
        count: number of operations that ended.
        bytes: bytes of their buffers, as nccl-tests counts them.
        exposed_s: seconds in which the program was blocked in an operation, or in waiting for one.
        waiting_s: seconds of the operations in which other ranks had not joined yet.
        bus_bandwidth: bytes per second that the links carried while all ranks took part, as nccl-tests defines it.
        link_bandwidth: bytes per second that the link can carry; None if it is not known.
    """

    ranks: tuple[int, ...]
    seconds: float = 0.0
    count: int = 0
    bytes: int = 0
    exposed_s: float = 0.0
    waiting_s: float = 0.0
    bus_bandwidth: float = 0.0
    link_bandwidth: float | None = None

    @property
    def efficiency(self) -> float:
        """Share of the time in which this rank does not wait for a collective, from 0 to 1."""
        return max(0.0, 1.0 - self.exposed_s / self.seconds) if self.seconds > 0 else 1.0

    @property
    def bandwidth_share(self) -> float | None:
        """Share of the link's bandwidth that the operations reached; None if the link's is not known."""
        return self.bus_bandwidth / self.link_bandwidth if self.link_bandwidth else None

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, including shares, as JSON can hold them."""
        shares = {"efficiency": self.efficiency, "bandwidth_share": self.bandwidth_share}
        return {**asdict(self), "ranks": list(self.ranks), **shares}


class CommunicationWatch:
    """Counts of a family of communicators since the last call of :meth:`take`, or since the family was opened."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, tuple[int, ...], str], OperationReport] = {}
        self._seconds_before = 0.0
        self._period: tuple[ref[Telemetry], float] | None = None
        """The family, and the time of the last reset of its counts."""

    def take(
        self, communicator: Communicator, ranks: Sequence[int] | None = None, *, link: float | None = None
    ) -> CommunicationFigures:
        """Return the figures since the last call.

        Args:
            communicator: a communicator of the family.
            ranks: world ranks of the process set; None for all process sets of the family together.
            link: bytes per second that the link between the ranks can carry; None if it is not known.
        """
        period = ref(communicator.telemetry), communicator.telemetry.since
        report = communicator.report()
        if period != self._period or report.seconds < self._seconds_before:  # the counts were reset meanwhile
            self._before, self._seconds_before, self._period = {}, 0.0, period
        rows = [row for row in report.operations if ranks is None or sorted(row.ranks) == sorted(ranks)]
        figures = self._figures(communicator, report, rows, ranks, link)
        self._before = {(row.process_set, row.ranks, row.operation): row for row in report.operations}
        self._seconds_before = report.seconds
        return figures

    def _figures(
        self,
        communicator: Communicator,
        report: CommunicationReport,
        rows: Iterable[OperationReport],
        ranks: Sequence[int] | None,
        link: float | None,
    ) -> CommunicationFigures:
        count = num_bytes = 0
        exposed_s = waiting_s = transfer_s = bus_bytes = 0.0
        for row in rows:
            before = self._before.get((row.process_set, row.ranks, row.operation))
            count += row.count - (before.count if before else 0)
            moved = row.bytes - (before.bytes if before else 0)
            waited = row.waiting_s - (before.waiting_s if before else 0.0)
            num_bytes += moved
            waiting_s += waited
            exposed_s += row.exposed_s - (before.exposed_s if before else 0.0)
            if moved:  # an operation without bytes, such as a barrier, says nothing about the link
                transfer_s += row.busy_s - (before.busy_s if before else 0.0) - waited
                bus_bytes += moved * row.bus_factor
        return CommunicationFigures(
            ranks=communicator.world_ranks if ranks is None else tuple(ranks),
            seconds=report.seconds - self._seconds_before,
            count=count,
            bytes=num_bytes,
            exposed_s=exposed_s,
            waiting_s=waiting_s,
            bus_bandwidth=bus_bytes / transfer_s if transfer_s > 0 else 0.0,
            link_bandwidth=link,
        )


_watches: WeakKeyDictionary[Telemetry, dict[tuple[int, ...] | None, CommunicationWatch]] = WeakKeyDictionary()
"""The watches of :func:`monitor_communication`, by family of communicators and process set."""


def monitor_communication(process_set: Any = None) -> CommunicationFigures:
    """Return how this rank has communicated since the last call for the same process set. No communication.

    Args:
        process_set: a process set: an ``hvd.ProcessSet``, a communicator, a process group of torch.distributed, or the
            world ranks of its members. None for all operations of this rank.

    Raises:
        ParamError: if it is none of these.
    """
    communicator = world_communicator()
    ranks = None if process_set is None else _ranks_of(process_set, communicator)
    if communicator is None:
        return CommunicationFigures(ranks=ranks or (0,))
    watches = _watches.setdefault(communicator.telemetry, {})
    watch = watches.setdefault(ranks, CommunicationWatch())
    return watch.take(communicator, ranks, link=link_bandwidth(communicator, ranks))


def compute_throughput(batch_size: float, iteration_time: float) -> float:
    """Return the rows per second of all ranks together, if each takes this time for a batch. No communication.

    Args:
        batch_size: rows of one rank in an iteration.
        iteration_time: seconds of an iteration.

    Raises:
        ParamError: if the time is not positive, or the batch size is negative.
    """
    if not iteration_time > 0 or batch_size < 0:
        raise ParamError(
            f"compute_throughput takes rows (>= 0) and seconds (> 0), got batch_size={batch_size:g} and "
            f"iteration_time={iteration_time:g}. Measure the time of an iteration by time.perf_counter()."
        )
    communicator = world_communicator()
    return batch_size * (1 if communicator is None else communicator.world_size) / iteration_time


def world_communicator() -> Communicator | None:
    """Return the open communicator of all ranks; None in a process that has none.

    It is that of the launcher, else that of torch.distributed's default group, if its backend is ``"sparkdl"``.
    """
    communicator = provided_communicator()
    if communicator is not None:
        return communicator
    distributed = sys.modules.get("torch.distributed")  # without it, there is no group
    return None if distributed is None else getattr(distributed.group.WORLD, "communicator", None)


def _ranks_of(process_set: Any, communicator: Communicator | None) -> tuple[int, ...]:
    if hasattr(process_set, "world_ranks"):  # a communicator
        return tuple(process_set.world_ranks)
    if hasattr(process_set, "process_set_id"):  # of Horovod's API; the global one names no ranks
        process_set = process_set.ranks or (communicator.world_ranks if communicator else (0,))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(process_set, distributed.ProcessGroup):
        process_set = distributed.get_process_group_ranks(process_set)
    if isinstance(process_set, Iterable) and not isinstance(process_set, str):
        ranks = tuple(process_set)
        if ranks and all(isinstance(rank, int) for rank in ranks):
            return ranks
    raise ParamError(
        "monitor_communication takes an hvd.ProcessSet, a communicator, a process group of torch.distributed, or a "
        f"list of world ranks, got {process_set!r}."
    )


_COPY_BYTES = 32 << 20
_NUM_COPIES = 5


def link_bandwidth(
    communicator: Communicator, ranks: Sequence[int] | None = None, *, measures: bool = True
) -> float | None:
    """Return the bytes per second of the link between ranks; None if it is not known.

    Between hosts it is the rate of the fastest network interface, by the kernel, which does not know that of virtual
    ones. Inside a host it is the rate of a copy in memory, which the first call of the process measures.

    Args:
        communicator: communicator of all ranks.
        ranks: the ranks between which the link is; None for all.
        measures: whether this call may measure it. A thread beside the training must not, as a copy takes the
            processor and the memory bandwidth of the training.
    """
    members = range(communicator.world_size) if ranks is None else ranks
    if len(members) == 1:
        return None
    if len(set(communicator.topology.hosts_of(members))) > 1:
        return _interface_bandwidth()
    return _copy_bandwidth() if measures or _copy_bandwidth.cache_info().currsize else None


@cache
def _interface_bandwidth() -> float | None:
    rates = []
    for name in interface_addresses():
        try:
            rates.append(int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    fastest = max(rates, default=-1)  # in Mbit/s; -1 where it is not known
    return fastest * 1e6 / 8 if fastest > 0 else None


@cache
def _copy_bandwidth() -> float:
    """Return the bytes per second of a copy of 32 MiB."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    best_s = float("inf")
    for _ in range(_NUM_COPIES):
        began = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - began)
    return _COPY_BYTES / best_s
