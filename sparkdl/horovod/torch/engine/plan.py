"""What ranks whose requests are in different order run next: pure, so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.horovod.torch.engine.description import Description, Kind
from sparkdl.horovod.torch.engine.mismatches import find_mismatch, refuse_join

Outstanding = Sequence[Description]
"""The requests of one rank that have not run, in its order of submission."""


@dataclass(frozen=True)
class Step:
    """One request that all ranks take off their lists.

    Attributes:
        description: what the first rank that has the request said of it.
        error: why it fails on all of them; None if it runs.
    """

    description: Description
    error: str | None = None


def plan_steps(outstanding: Sequence[Outstanding | None]) -> list[Step]:
    """Choose the requests that can run now, in the order of the first rank that has not joined.

    A request can run when all ranks that have not joined have it. A rank has joined if its list is None, or if the
    list has a request to join: it then gives zeros to what the others run, and what it still has itself runs when
    the others have that too.

    Args:
        outstanding: the list of each rank.
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


def missing_ranks(outstanding: Sequence[Outstanding | None]) -> dict[str, list[int]]:
    """The names of requests that some rank has, and for each the ranks without it that have not joined.

    Who has asked to join waits for as long as the others have data, so that nobody is missing there.
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


def joins(requests: Outstanding) -> bool:
    """Whether a rank with these requests has asked to join."""
    return any(request.kind is Kind.JOIN for request in requests)
