"""Chooses from the reports of all ranks which requests run next, if the ranks have made them in different orders.

The decisions are pure functions of the reports, so that all ranks make the same ones. A report lists the requests of
one rank.

The name under which a request is matched begins with its operation, so that ``allreduce(name="m")`` and
``allgather(name="m")`` may be outstanding at once, on any thread. If a thread of every rank waits for one of them and
none can run, some rank has called the wrong one; the requests that wait for each other under one name then fail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparkdl.horovod.torch.engine.request import (
    Description,
    Kind,
    find_mismatch,
    parse_description,
    refuse_join,
)

Requests = Sequence[Description]
"""The requests of one rank that have not run, in the order of submission."""


@dataclass(frozen=True)
class Step:
    """One request that all ranks remove from their lists.

    Attributes:
        description: description of the request by the first rank that has it.
        error: reason why it fails on all ranks; None if it runs.
    """

    description: Description
    error: str | None = None


def plan_steps(outstanding: Sequence[Requests | None]) -> list[Step]:
    """Choose the requests that can run now, in the order of the first rank that has not joined.

    A request can run when all ranks that have not joined have it. A rank has joined if its list is None, or if the
    list has a request to join: it then contributes zeros to the requests of the other ranks. Its own remaining
    requests run when the other ranks have them, too.

    Args:
        outstanding: requests of each rank; None for a rank that has joined.
    """
    lists = {rank: requests for rank, requests in enumerate(outstanding) if requests is not None}
    by_name = {rank: {request.name: request for request in requests} for rank, requests in lists.items()}
    active = [rank for rank, requests in lists.items() if not joins(requests)]
    leaders = [active[0]] if active else list(lists)
    steps: dict[str, Step] = {}
    for leader in leaders:
        for request in lists[leader]:
            if request.kind is Kind.JOIN or request.name in steps:
                continue
            holders = {rank: named[request.name] for rank, named in by_name.items() if request.name in named}
            if all(rank in holders for rank in active):
                joined = [rank for rank in range(len(outstanding)) if rank not in holders]
                error = find_mismatch(holders) or refuse_join(request.kind, joined)
                steps[request.name] = Step(request, error)
    return list(steps.values())


def missing_ranks(outstanding: Sequence[Requests | None]) -> dict[str, list[int]]:
    """The ranks that lack a request and have not joined, by the name of each request that some but not all ranks have.

    Requests to join are not counted: they wait as long as other ranks have data.
    """
    lists = {
        rank: {request.name for request in requests if request.kind is not Kind.JOIN}
        for rank, requests in enumerate(outstanding)
        if requests
    }
    active = [
        rank for rank, requests in enumerate(outstanding) if requests is not None and not joins(requests)
    ]
    names = sorted(set().union(*lists.values()))
    missing = {name: [rank for rank in active if name not in lists.get(rank, ())] for name in names}
    return {name: ranks for name, ranks in missing.items() if ranks}


def joins(requests: Requests) -> bool:
    """Whether a rank with these requests has asked to join."""
    return any(request.kind is Kind.JOIN for request in requests)


@dataclass(frozen=True, kw_only=True)
class RequestReport:
    """One rank's requests, and the requests of any rank that take too long by this rank's clock.

    Clocks differ: decisions that must be the same on all ranks depend on the reports, never on a rank's own clock.

    Attributes:
        requests: requests that have not run, in the order of submission.
        awaited: names of the requests for which a thread waits.
        stalled: names of the requests that other ranks lack for too long, with the seconds that this rank allows.
        clashing: names that callers gave to different operations, for longer than the time allowed to submit further
            requests.
    """

    requests: tuple[Description, ...]
    awaited: frozenset[str] = frozenset()
    stalled: Mapping[str, float] = field(default_factory=dict)
    clashing: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """The attributes as lines of text, for :func:`parse_report`; never empty."""
        notes = [sorted(self.awaited), dict(self.stalled), sorted(self.clashing)]
        return "\n".join([json.dumps(notes), *(request.text for request in self.requests)])


def parse_report(text: str) -> RequestReport:
    """Parse the ``text`` of a report."""
    notes, *requests = text.split("\n")
    awaited, stalled, clashing = json.loads(notes)
    return RequestReport(
        requests=tuple(parse_description(request) for request in requests),
        awaited=frozenset(awaited),
        stalled=stalled,
        clashing=frozenset(clashing),
    )


def find_clashes(reports: Sequence[RequestReport | None]) -> dict[str, list[Step]]:
    """Find the requests that wait for each other under one name, and return steps that fail them.

    Args:
        reports: report of each rank; None for a rank that has joined.

    Returns:
        The steps by the name that callers gave. Every rank that has not joined waits for a request of that name.
    """
    awaited = {
        rank: _awaited_by_given_name(report)
        for rank, report in enumerate(reports)
        if report is not None and not joins(report.requests)
    }
    common = set.intersection(*(set(named) for named in awaited.values())) if awaited else set()
    clashes = {}
    for name in sorted(common):
        requests = {rank: named[name] for rank, named in awaited.items()}
        by_name = {request.name: request for request in requests.values()}
        if len(by_name) > 1:
            error = find_mismatch(requests)
            clashes[name] = [Step(request, error) for request in by_name.values()]
    return clashes


def _awaited_by_given_name(report: RequestReport) -> dict[str, Description]:
    """The oldest request that a thread of this rank waits for, for each name that callers gave."""
    named: dict[str, Description] = {}
    for request in report.requests:
        if request.name in report.awaited and request.given_name is not None:
            named.setdefault(request.given_name, request)
    return named
