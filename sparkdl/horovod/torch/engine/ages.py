"""For how long something has gone on, by this rank's clock."""

from __future__ import annotations

import time
from collections.abc import Collection


class Ages:
    """Since when each of some names has been there without a break."""

    def __init__(self) -> None:
        """Begin without any."""
        self._since: dict[str, float] = {}

    def note(self, names: Collection[str]) -> None:
        """Take note of what is there now; whatever is not begins anew when it comes again."""
        now = time.monotonic()
        self._since = {name: self._since.get(name, now) for name in names}

    def forget(self, name: str) -> None:
        """Have a name begin anew when it comes again, if it is there."""
        self._since.pop(name, None)

    def tell(self) -> dict[str, float]:
        """The seconds for which each name has been there."""
        now = time.monotonic()
        return {name: now - since for name, since in self._since.items()}

    def older_than(self, age_s: float) -> list[str]:
        """The names that have been there for so long."""
        return [name for name, seconds in self.tell().items() if seconds >= age_s]
