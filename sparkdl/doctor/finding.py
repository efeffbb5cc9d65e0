"""What a check has found: one line of the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GOOD, NOTE, BAD = "good", "note", "bad"
"""As it should be; works, but less well, or is missing and not always needed; will not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was checked at one place."""

    check: str
    """What was looked at: ``Java``, ``shared memory``."""

    where: str
    """``this machine``, a host, ``host-1 and host-2``, ``the cluster``."""

    status: str
    """One of :data:`GOOD`, :data:`NOTE` and :data:`BAD`."""

    found: str
    """What there is, with values."""

    advice: str = ""
    """What to do about it; empty where all is well."""


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether nothing was found that will not work."""
    return all(finding.status != BAD for finding in findings)
