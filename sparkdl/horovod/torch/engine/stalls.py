"""Warns of requests that some ranks have made and others have not, where the process set goes on without them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)


class StallWatch:
    """Remembers since when requests have been missing on some ranks."""

    def __init__(self, process_set: str, warn_after_s: float | None) -> None:
        """Begin to watch.

        Args:
            process_set: what it is called in warnings.
            warn_after_s: how long a request may be missing; for ever when None.
        """
        self._process_set = process_set
        self._warn_after_s = math.inf if warn_after_s is None else warn_after_s
        self._since: dict[str, float] = {}

    def note(self, missing: Mapping[str, Sequence[int]]) -> None:
        """Take note of what is missing now, and warn of what has been for long; again after the same time.

        Args:
            missing: the ranks that have not made a request, by its name.
        """
        now = time.monotonic()
        self._since = {name: self._since.get(name, now) for name in missing}
        for name, since in self._since.items():
            if now - since >= self._warn_after_s:
                logger.warning(
                    "%s: %s has waited for ranks %s for more than %.0f s, while other requests went on.",
                    self._process_set,
                    name,
                    list(missing[name]),
                    self._warn_after_s,
                )
                self._since[name] = now
