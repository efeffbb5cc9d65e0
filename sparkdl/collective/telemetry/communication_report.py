"""Communication reports of one rank and of all ranks, with the ranks that the others waited for.

The report of a rank says how much it communicated, how fast, and for how long the program was blocked by it. Bandwidths
are defined as in nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the algorithm
bandwidth is the bytes of an operation divided by its time; the bus bandwidth corrects it by the number of bytes that
the algorithm has to move, so that it can be compared with the hardware's and does not depend on the number of ranks. As
nccl-tests starts all ranks at once, the time counts from when all ranks have joined.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.collective.byte_exchange import gather_bytes
from sparkdl.collective.telemetry.clock_offset import SharedClock, measure_offset
from sparkdl.collective.telemetry.monitor import CommunicatorKey, label_communicators
from sparkdl.errors import count_of

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.telemetry.monitor import CommunicatorMeasurements


_BLOCKED = ("reduce_scatter", "allgather", "alltoall", "gather", "scatter")
"""Operations in which a rank does not transfer its own block."""

_RANK_HEADER = (
    "process set",
    "operation",
    "count",
    "MiB",
    "ms",
    "alg GB/s",
    "bus GB/s",
    "waiting",
    "exposed",
)


@dataclass(frozen=True, kw_only=True)
class _OfProcessSet:
    process_set: str
    ranks: tuple[int, ...]

    @property
    def key(self) -> CommunicatorKey:
        """Key of the process set."""
        return CommunicatorKey(self.process_set, self.ranks)


@dataclass(frozen=True, kw_only=True)
class OperationReport(_OfProcessSet):
    """The operations of one kind on one process set, as measured by one rank.

    Of the operations of up to 64 KiB that run on the caller's thread and inside a host, one in sixteen is timed and
    represents the others; long waits are counted for every operation. Failed operations count only in ``num_failed``.

    Attributes:
        process_set: name of the communicator.
        ranks: world rank of each of its ranks.
        operation: name of the communicator's method.
        count: number of operations that succeeded.
        num_failed: number of operations that failed.
        bytes: size of all buffers; if every rank has a block, of the blocks of all ranks.
        busy_s: seconds from the beginning of each operation to its end.
        waiting_s: part of ``busy_s`` spent waiting for the slowest rank to join.
        queued_s: seconds that asynchronous operations waited in the queue before they began.
        exposed_s: part of ``busy_s`` in which some thread of the program was blocked in an operation or a handle's
            wait, so that the communication was not hidden behind computation. Time in which it waited for several
            messages at once is counted for one of them.
    """

    operation: str
    count: int
    num_failed: int
    bytes: int
    busy_s: float
    waiting_s: float
    queued_s: float
    exposed_s: float

    @property
    def world_size(self) -> int:
        """Number of ranks of the process set."""
        return len(self.ranks)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second, over the time in which all ranks had joined."""
        transfer_s = self.busy_s - self.waiting_s
        return self.bytes / transfer_s if transfer_s > 0 else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that the links carry for the operations."""
        return self.algorithm_bandwidth * self.bus_factor

    @property
    def bus_factor(self) -> float:
        """Bytes that the links carry for each byte of the operations, as nccl-tests defines it."""
        others = (self.world_size - 1) / self.world_size
        if self.operation == "allreduce":
            return 2 * others
        return others if self.operation in _BLOCKED else 1.0

    @property
    def waiting_share(self) -> float:
        """``waiting_s`` over ``busy_s``."""
        return self.waiting_s / self.busy_s if self.busy_s > 0 else 0.0

    @property
    def exposed_share(self) -> float:
        """``exposed_s`` over ``busy_s``."""
        return self.exposed_s / self.busy_s if self.busy_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, including bandwidths and shares, without the process set and the operation's name."""
        values = asdict(self)
        for name in ("process_set", "ranks", "operation"):
            del values[name]
        for name in ("algorithm_bandwidth", "bus_bandwidth", "waiting_share", "exposed_share"):
            values[name] = getattr(self, name)
        return values


@dataclass(frozen=True, kw_only=True)
class LateRank(_OfProcessSet):
    """A rank that joined operations last.

    Attributes:
        process_set: name of the communicator.
        ranks: world rank of each rank of the communicator.
        rank: world rank of the late rank.
        count: number of operations that it joined last.
        waited_s: seconds that the reporting rank waited for it; in a :class:`WorldReport`, the average of the others.
    """

    rank: int
    count: int
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class CommunicationReport:
    """Communication report of one rank. ``str()`` gives :meth:`as_table`.

    Attributes:
        rank: world rank of the reporting rank, its number in the communicator from which all process sets were split.
        seconds: length of the period that the report covers, in seconds.
        operations: one report per process set and operation.
        late_ranks: ranks on the same host that this rank waited for, the longest wait first.
    """

    rank: int
    seconds: float
    operations: tuple[OperationReport, ...]
    late_ranks: tuple[LateRank, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict by process set and operation; times in seconds, bandwidths in bytes per second.

        Process sets that share a name are distinguished by their ranks.
        """
        labels = self._labels()
        process_sets: dict[str, Any] = {}
        for row in self.operations:
            process_set = process_sets.setdefault(
                labels[row.key],
                {
                    "world_size": row.world_size,
                    "ranks": list(row.ranks),
                    "operations": {},
                    "late_ranks": {},
                },
            )
            process_set["operations"][row.operation] = row.as_dict()
        for late in self.late_ranks:
            counts = {"count": late.count, "waited_s": late.waited_s}
            process_sets[labels[late.key]]["late_ranks"][late.rank] = counts
        return {"rank": self.rank, "seconds": self.seconds, "process_sets": process_sets}

    def as_metrics(self, prefix: str = "communication") -> dict[str, float]:
        """Return metrics for MLflow, such as ``communication/world/allreduce/bus_gb_per_s``; all values are finite."""
        metrics: dict[str, float] = {}
        labels = self._labels()
        for row in self.operations:
            # Keep only characters that all of MLflow's stores accept; a slash groups the charts.
            key = "/".join(
                re.sub(r"[^\w.\- ]", "_", part) for part in (prefix, labels[row.key], row.operation)
            )
            metrics |= {
                f"{key}/count": float(row.count),
                f"{key}/bytes": float(row.bytes),
                f"{key}/seconds": row.busy_s,
                f"{key}/algorithm_gb_per_s": row.algorithm_bandwidth / 1e9,
                f"{key}/bus_gb_per_s": row.bus_bandwidth / 1e9,
                f"{key}/waiting_share": row.waiting_share,
                f"{key}/exposed_share": row.exposed_share,
            }
        return metrics

    def as_table(self) -> str:
        """Return a text table with a row per process set and operation, followed by the ranks that came last."""
        labels = self._labels()
        rows = [_rank_cells(row, labels[row.key]) for row in self.operations]
        busy_s = sum(row.busy_s for row in self.operations)
        exposed_s = sum(row.exposed_s for row in self.operations)
        title = f"Communication of rank {self.rank} took {busy_s:.3g} s of {self.seconds:.3g} s"
        lines = [
            f"{title}, {exposed_s:.3g} s not hidden behind computation",
            format_columns(_RANK_HEADER, rows),
        ]
        return "\n".join(lines + format_late_ranks(self.late_ranks, labels))

    __str__ = as_table

    def _labels(self) -> dict[CommunicatorKey, str]:
        return label_communicators(row.key for row in self.operations)


def make_report(
    rank: int, measured: Sequence[CommunicatorMeasurements], seconds: float
) -> CommunicationReport:
    """Make the report of a rank from its measurements over ``seconds``."""
    late_ranks = [
        LateRank(
            process_set=measurements.key.name,
            ranks=measurements.key.ranks,
            rank=measurements.key.ranks[late.rank],
            count=late.num_operations,
            waited_s=late.waited_ns / 1e9,
        )
        for measurements in measured
        for late in measurements.lateness.values()
        if late.num_operations
    ]
    return CommunicationReport(
        rank=rank,
        seconds=seconds,
        operations=tuple(
            OperationReport(
                process_set=measurements.key.name,
                ranks=measurements.key.ranks,
                operation=totals.kind,
                count=totals.num_operations,
                num_failed=totals.num_failed,
                bytes=totals.bytes,
                busy_s=totals.busy_ns / 1e9,
                waiting_s=totals.waiting_ns / 1e9,
                queued_s=totals.queued_ns / 1e9,
                exposed_s=totals.exposed_ns / 1e9,
            )
            for measurements in measured
            for totals in measurements.totals.values()
        ),
        late_ranks=tuple(sorted(late_ranks, key=lambda late: -late.waited_s)),
    )


def format_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as lines with aligned columns: the first two to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    )


def format_late_ranks(late_ranks: Sequence[LateRank], labels: Mapping[CommunicatorKey, str]) -> list[str]:
    """Format the ranks that came last as lines; empty if there are none."""
    if not late_ranks:
        return []
    rows = [
        (labels[late.key], f"rank {late.rank}", f"{late.count:,}", f"{late.waited_s * 1e3:,.1f}")
        for late in late_ranks
    ]
    return ["", format_columns(("process set", "came last", "times", "ms waited for"), rows)]


def _rank_cells(row: OperationReport, label: str) -> tuple[str, ...]:
    return (
        label,
        row.operation,
        f"{row.count:,}" if not row.num_failed else f"{row.count:,} + {row.num_failed:,} failed",
        f"{row.bytes / (1 << 20):,.3f}",
        f"{row.busy_s * 1e3:,.1f}",
        f"{row.algorithm_bandwidth / 1e9:.3f}",
        f"{row.bus_bandwidth / 1e9:.3f}",
        f"{row.waiting_share:.0%}",
        f"{row.exposed_share:.0%}",
    )


_WORLD_HEADER = ("process set", "operation", "count", "ms", "waiting", "least", "most", "exposed")


@dataclass(frozen=True, kw_only=True)
class WorldReport:
    """Communication reports of all ranks. ``str()`` gives :meth:`as_table`.

    Attributes:
        reports: reports of the ranks, in order of rank.
        late_ranks: ranks that joined last, the longest wait first; the wait is the average of the other ranks. Covers
            all operations inside a host, and the latest 1,024 of a process set that spans hosts or uses MPI.
    """

    reports: tuple[CommunicationReport, ...]
    late_ranks: tuple[LateRank, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the reports in order of rank, and the late ranks."""
        return {
            "ranks": [report.as_dict() for report in self.reports],
            "late_ranks": [asdict(late) for late in self.late_ranks],
        }

    def as_table(self) -> str:
        """Return a text table with a row per process set and operation, followed by the ranks that came last."""
        rows: defaultdict[tuple[CommunicatorKey, str], list[tuple[int, OperationReport]]] = defaultdict(list)
        for report in self.reports:
            for row in report.operations:
                rows[row.key, row.operation].append((report.rank, row))
        labels = label_communicators(key for key, _ in rows)
        cells = [_world_cells(seen, labels[key]) for (key, _), seen in rows.items()]
        lines = [
            f"Communication of {count_of(len(self.reports), 'rank')}",
            format_columns(_WORLD_HEADER, cells),
        ]
        return "\n".join(lines + format_late_ranks(self.late_ranks, labels))

    __str__ = as_table


def gather_world_report(communicator: Communicator, duplicate: Communicator) -> WorldReport | None:
    """Return the reports of all ranks on rank 0; None on the others. Collective.

    Args:
        communicator: observed communicator.
        duplicate: communicator of the same ranks for gathering the reports, so that this is not part of them.
    """
    measured, seconds = communicator.telemetry.measure()
    offset = measure_offset(duplicate)
    clock = SharedClock(first=offset, last=offset)
    mine = {
        "report": asdict(make_report(communicator.world_ranks[communicator.rank], measured, seconds)),
        "clock_error_ns": clock.error_ns,
        "arrivals": [
            {
                "key": measurements.key,
                "times_ns": {
                    str(arrival.sequence): clock.to_shared(arrival.time_ns)
                    for arrival in measurements.arrivals
                },
            }
            for measurements in measured
            if measurements.arrivals
        ],
    }
    gathered = gather_bytes(duplicate, json.dumps(mine).encode(), root=0, name="communication report")
    if not gathered:
        return None
    seen = [json.loads(part) for part in gathered]
    reports = tuple(_report_from(part["report"]) for part in seen)
    late_ranks = [*_from_waits(reports), *_from_arrivals(seen)]
    return WorldReport(reports=reports, late_ranks=tuple(sorted(late_ranks, key=lambda late: -late.waited_s)))


def _report_from(values: Mapping[str, Any]) -> CommunicationReport:
    return CommunicationReport(
        rank=values["rank"],
        seconds=values["seconds"],
        operations=tuple(
            OperationReport(**{**row, "ranks": tuple(row["ranks"])}) for row in values["operations"]
        ),
        late_ranks=tuple(
            LateRank(**{**late, "ranks": tuple(late["ranks"])}) for late in values["late_ranks"]
        ),
    )


def _from_waits(reports: Sequence[CommunicationReport]) -> list[LateRank]:
    """Return the late ranks that other ranks on their host noticed."""
    seen: defaultdict[tuple[CommunicatorKey, int], list[LateRank]] = defaultdict(list)
    for report in reports:
        for late in report.late_ranks:
            seen[late.key, late.rank].append(late)
    return [
        LateRank(
            process_set=key.name,
            ranks=key.ranks,
            rank=rank,
            count=max(late.count for late in sightings),
            waited_s=sum(late.waited_s for late in sightings) / len(sightings),
        )
        for (key, rank), sightings in seen.items()
    ]


def _from_arrivals(seen: Sequence[Mapping[str, Any]]) -> list[LateRank]:
    """Return the late ranks of the operations whose arrivals all ranks of a process set have, by the shared clock."""
    error_ns = max(part["clock_error_ns"] for part in seen)
    keys: defaultdict[CommunicatorKey, dict[int, dict[str, int]]] = defaultdict(dict)
    for part in seen:
        for arrivals in part["arrivals"]:
            name, ranks = arrivals["key"]
            keys[CommunicatorKey(name, tuple(ranks))][part["report"]["rank"]] = arrivals["times_ns"]
    counts: defaultdict[tuple[CommunicatorKey, int], list[float]] = defaultdict(list)
    for key, by_rank in keys.items():
        if len(by_rank) < max(2, len(key.ranks)):
            continue
        for sequence in set.intersection(*map(set, by_rank.values())):
            times = sorted((times_ns[sequence], rank) for rank, times_ns in by_rank.items())
            (last_ns, last), others = times[-1], times[:-1]
            if last_ns - others[-1][0] > error_ns:
                waits = [last_ns - time_ns for time_ns, _ in others]
                counts[key, last].append(sum(waits) / len(waits) / 1e9)
    return [
        LateRank(process_set=key.name, ranks=key.ranks, rank=rank, count=len(waits), waited_s=sum(waits))
        for (key, rank), waits in counts.items()
    ]


def _world_cells(seen: Sequence[tuple[int, OperationReport]], label: str) -> tuple[str, ...]:
    least_rank, least = min(seen, key=lambda item: item[1].waiting_share)
    most_rank, most = max(seen, key=lambda item: item[1].waiting_share)
    rows = [row for _, row in seen]
    busy_s = sum(row.busy_s for row in rows)
    return (
        label,
        rows[0].operation,
        f"{max(row.count for row in rows):,}",
        f"{busy_s / len(rows) * 1e3:,.1f}",
        f"{sum(row.waiting_s for row in rows) / busy_s:.0%}" if busy_s else "-",
        f"{least.waiting_share:.0%} (rank {least_rank})",
        f"{most.waiting_share:.0%} (rank {most_rank})",
        f"{sum(row.exposed_s for row in rows) / busy_s:.0%}" if busy_s else "-",
    )
