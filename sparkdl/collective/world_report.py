"""The communication reports of all ranks side by side, and which ranks the others waited for. Runs on ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.collective.byte_exchange import gather_bytes
from sparkdl.collective.clock_offset import SharedClock, measure_offset
from sparkdl.collective.report import (
    CommunicationReport,
    LateRank,
    OperationReport,
    format_columns,
    format_late_ranks,
    make_report,
)
from sparkdl.collective.telemetry import Place, label_places

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.observation import Observed

_HEADER = ("process set", "operation", "count", "ms", "waiting", "least", "most", "exposed")


@dataclass(frozen=True, kw_only=True)
class WorldReport:
    """What all ranks saw. ``str()`` gives :meth:`as_table`.

    Attributes:
        reports: by rank.
        late_ranks: the ranks that came last, worst first: for how many operations, and for how long each other rank
            waited for it on average. Inside a host this is about all operations; where a process set spans hosts,
            or uses MPI, about the latest 1,024.
    """

    reports: tuple[CommunicationReport, ...]
    late_ranks: tuple[LateRank, ...]

    def as_dict(self) -> dict[str, Any]:
        """The reports by rank, and the late ranks."""
        return {
            "ranks": [report.as_dict() for report in self.reports],
            "late_ranks": [asdict(late) for late in self.late_ranks],
        }

    def as_table(self) -> str:
        """Lines for people: a row per process set and operation, and who came last."""
        rows: defaultdict[tuple[Place, str], list[tuple[int, OperationReport]]] = defaultdict(list)
        for report in self.reports:
            for row in report.operations:
                rows[row.place, row.operation].append((report.rank, row))
        labels = label_places(place for place, _ in rows)
        cells = [_cells(seen, labels[place]) for (place, _), seen in rows.items()]
        lines = [f"Communication of {len(self.reports)} ranks", format_columns(_HEADER, cells)]
        return "\n".join(lines + format_late_ranks(self.late_ranks, labels))

    __str__ = as_table


def gather_world_report(communicator: Observed, aside: Communicator) -> WorldReport | None:
    """The reports of all ranks, on rank 0; None on the others. Collective.

    Args:
        communicator: whose telemetry tells.
        aside: a communicator of the same ranks, so that the report is not about itself.
    """
    measured, seconds = communicator.telemetry.measure()
    offset = measure_offset(aside)
    clock = SharedClock(first=offset, last=offset)
    mine = {
        "report": asdict(make_report(communicator.world_ranks[communicator.rank], measured, seconds)),
        "clock_error_ns": clock.error_ns,
        "arrivals": [
            {
                "place": found.place,
                "times_ns": {
                    str(arrival.sequence): clock.to_shared(arrival.time_ns) for arrival in found.arrivals
                },
            }
            for found in measured
            if found.arrivals
        ],
    }
    gathered = gather_bytes(aside, json.dumps(mine).encode(), root=0, name="communication report")
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
    """What ranks of one host saw of each other."""
    seen: defaultdict[tuple[Place, int], list[LateRank]] = defaultdict(list)
    for report in reports:
        for late in report.late_ranks:
            seen[late.place, late.rank].append(late)
    return [
        LateRank(
            process_set=place.name,
            ranks=place.ranks,
            rank=rank,
            count=max(late.count for late in sightings),
            waited_s=sum(late.waited_s for late in sightings) / len(sightings),
        )
        for (place, rank), sightings in seen.items()
    ]


def _from_arrivals(seen: Sequence[Mapping[str, Any]]) -> list[LateRank]:
    """Who came last to the operations that all ranks of a process set remember, by the shared clock."""
    error_ns = max(part["clock_error_ns"] for part in seen)
    places: defaultdict[Place, dict[int, dict[str, int]]] = defaultdict(dict)
    for part in seen:
        for arrivals in part["arrivals"]:
            name, ranks = arrivals["place"]
            places[Place(name, tuple(ranks))][part["report"]["rank"]] = arrivals["times_ns"]
    counts: defaultdict[tuple[Place, int], list[float]] = defaultdict(list)
    for place, by_rank in places.items():
        if len(by_rank) < max(2, len(place.ranks)):
            continue
        for sequence in set.intersection(*map(set, by_rank.values())):
            times = sorted((times_ns[sequence], rank) for rank, times_ns in by_rank.items())
            (last_ns, last), others = times[-1], times[:-1]
            if last_ns - others[-1][0] > error_ns:
                waits = [last_ns - time_ns for time_ns, _ in others]
                counts[place, last].append(sum(waits) / len(waits) / 1e9)
    return [
        LateRank(process_set=place.name, ranks=place.ranks, rank=rank, count=len(waits), waited_s=sum(waits))
        for (place, rank), waits in counts.items()
    ]


def _cells(seen: Sequence[tuple[int, OperationReport]], label: str) -> tuple[str, ...]:
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
