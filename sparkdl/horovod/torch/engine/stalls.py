"""Warns of requests that some ranks have made and others have not, and decides which of them to give up.

This rank's clock measures how long a request has been missing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence

from sparkdl.horovod.torch.engine.plan import RequestReport
from sparkdl.topology import name_ranks

logger = logging.getLogger(__name__)


class Ages:
    """Measures for how long each name has been present without interruption."""

    def __init__(self) -> None:
        """Start without names."""
        self._since: dict[str, float] = {}

    def note(self, names: Collection[str]) -> None:
        """Set the names that are present now; the age of a name that was absent starts at zero."""
        now = time.monotonic()
        self._since = {name: self._since.get(name, now) for name in names}

    def forget(self, name: str) -> None:
        """Forget a name, so that its age starts at zero when it is noted again."""
        self._since.pop(name, None)

    def older_than(self, age_s: float = 0.0) -> dict[str, float]:
        """The names that are at least this old, with their ages in seconds."""
        now = time.monotonic()
        return {name: now - since for name, since in self._since.items() if now - since >= age_s}


REMEDY = (
    "Look at what those ranks are doing: all ranks of a process set have to make the same requests, under the same"
    " names."
)
"""What to do about requests that wait for other ranks."""


class StallWatch:
    """Remembers since when requests have been missing on some ranks."""

    def __init__(
        self, process_set: str, *, warn_after_s: float | None, abort_after_s: float | None = None
    ) -> None:
        """Start watching.

        Args:
            process_set: name of the process set in warnings.
            warn_after_s: seconds that a request is missing before a warning, and between warnings; None to not warn.
            abort_after_s: seconds that a request may be missing at all; None for no limit.
        """
        self._process_set = process_set
        self._warn_after_s = math.inf if warn_after_s is None else warn_after_s
        self._abort_after_s = abort_after_s
        self._ages = Ages()
        self._warned_at: dict[str, float] = {}

    def note(self, missing: Mapping[str, Sequence[int]]) -> None:
        """Record the requests that are missing now, and warn of each whenever a further ``warn_after_s`` has passed.

        Args:
            missing: ranks that have not made a request, by the request's name.
        """
        self._ages.note(missing)
        self._warned_at = {name: age_s for name, age_s in self._warned_at.items() if name in missing}
        for name, age_s in self._ages.older_than().items():
            if age_s >= self._warned_at.get(name, 0.0) + self._warn_after_s:
                self._warned_at[name] = age_s
                logger.warning(
                    "%s has waited %.3g s on %s: %s did not ask for it. %s",
                    name,
                    age_s,
                    self._process_set,
                    name_ranks(missing[name]),
                    REMEDY,
                )

    def note_run(self, name: str) -> None:
        """Record that a request has run, so that the age of a later request of the same name starts at zero."""
        self._ages.forget(name)
        self._warned_at.pop(name, None)

    def find_stalled(self) -> dict[str, float]:
        """The requests that have been missing for too long, with the seconds that are allowed."""
        if self._abort_after_s is None:
            return {}
        return dict.fromkeys(self._ages.older_than(self._abort_after_s), self._abort_after_s)


def find_stall(
    process_set: str, reports: Sequence[RequestReport | None], missing: Mapping[str, Sequence[int]]
) -> str | None:
    """Describe the requests that have to be given up; None if there are none. Pure, so that all ranks return the same.

    Args:
        process_set: name of the process set in the text.
        reports: report of each rank, None if it has joined; a request is stalled if any of them reports it as stalled.
        missing: ranks that have not made a request, by the request's name.
    """
    allowed_s: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.stalled.items() if report is not None else ():
            allowed_s[name] = min(seconds, allowed_s.get(name, math.inf))
    stalls = [
        f"{name} stalled for {allowed_s[name]:g} s: {name_ranks(missing[name])} did not ask for it"
        for name in sorted(allowed_s)
        if name in missing
    ]
    if not stalls:
        return None
    return f"On {process_set}, {'; '.join(stalls)}. {REMEDY}"
