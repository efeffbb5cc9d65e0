"""Finds where ranks wait for different operations under one name: pure, so that all ranks find the same.

The name by which a request is matched begins with its operation, so that ``allreduce(name="m")`` and
``allgather(name="m")`` may be outstanding at once, on any thread. Where a thread of every rank waits for one of them
and none can run, some rank has called the wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.horovod.torch.engine.description import Description
from sparkdl.horovod.torch.engine.mismatches import find_mismatch
from sparkdl.horovod.torch.engine.plan import Step, joins
from sparkdl.horovod.torch.engine.report import Report


def find_clashes(reports: Sequence[Report | None]) -> dict[str, list[Step]]:
    """The requests that wait for each other under one name, as steps in which they fail.

    Args:
        reports: of the ranks; None for one that has joined.

    Returns:
        The steps by what callers gave as the name, of which every rank that has not joined waits for a request.
    """
    awaited = {
        rank: _awaited_by_given_name(report)
        for rank, report in enumerate(reports)
        if report is not None and not joins(report.requests)
    }
    common = set.intersection(*(set(named) for named in awaited.values())) if awaited else set()
    clashes = {}
    for given in sorted(common):
        requests = {rank: named[given] for rank, named in awaited.items()}
        by_name = {request.name: request for request in requests.values()}
        if len(by_name) > 1:
            error = find_mismatch(requests)
            clashes[given] = [Step(request, error) for request in by_name.values()]
    return clashes


def _awaited_by_given_name(report: Report) -> dict[str, Description]:
    """The oldest request that a thread of this rank waits for, by what its caller called it."""
    named: dict[str, Description] = {}
    for request in report.requests:
        if request.name in report.awaited and request.given_name is not None:
            named.setdefault(request.given_name, request)
    return named
