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
        stalled: the names of those that other ranks lack for too long, with the seconds that this rank allows.
    """

    requests: tuple[Description, ...]
    stalled: Mapping[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The attributes in lines, for :func:`parse_report`; never empty."""
        return "\n".join([json.dumps(dict(self.stalled)), *(request.text for request in self.requests)])


def parse_report(text: str) -> Report:
    """The report that a rank sent as its ``text``."""
    notes, *requests = text.split("\n")
    return Report(
        requests=tuple(parse_description(request) for request in requests),
        stalled=json.loads(notes),
    )
