"""What a rank tells the others while they look for something that all of them can run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkdl.horovod.torch.engine.description import Description, parse_description


@dataclass(frozen=True, kw_only=True)
class Report:
    """One rank's requests, and what its clock says of those of all ranks.

    Clocks differ: what all ranks must decide alike goes by what was reported, never by a rank's own clock.

    Attributes:
        requests: that have not run, in the order of submission.
        awaited: the names of those for which a thread waits.
        stalled: the names of those that other ranks lack for too long, with the seconds that this rank allows.
        clashing: what callers gave as names of different operations, for longer than a rank is given to submit more.
    """

    requests: tuple[Description, ...]
    awaited: frozenset[str] = frozenset()
    stalled: Mapping[str, float] = field(default_factory=dict)
    clashing: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """The attributes in lines, for :func:`parse_report`; never empty."""
        notes = [sorted(self.awaited), dict(self.stalled), sorted(self.clashing)]
        return "\n".join([json.dumps(notes), *(request.text for request in self.requests)])


def parse_report(text: str) -> Report:
    """The report that a rank sent as its ``text``."""
    notes, *requests = text.split("\n")
    awaited, stalled, clashing = json.loads(notes)
    return Report(
        requests=tuple(parse_description(request) for request in requests),
        awaited=frozenset(awaited),
        stalled=stalled,
        clashing=frozenset(clashing),
    )
