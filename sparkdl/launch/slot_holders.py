"""Which launches of this process have ranks that run, and so hold slots that others wait for. Runs on the driver.

Spark starts a barrier stage when all of its slots are free, and keeps it waiting until then. A launch whose ranks do
not start therefore asks here whether it waits for its own kind, as where ``CrossValidator`` fits models in parallel,
or for something that it should not wait for without an end.
"""

from __future__ import annotations

import threading


class SlotHolders:
    """A set of launches, by the names of their jobs, for several threads."""

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self._lock = threading.Lock()

    def add(self, job: str) -> None:
        """Note that all ranks of a launch run; doing so again does nothing."""
        with self._lock:
            self._jobs.add(job)

    def remove(self, job: str) -> None:
        """Note that a launch has ended, whether or not its ranks ever ran."""
        with self._lock:
            self._jobs.discard(job)

    def others_than(self, job: str) -> bool:
        """Whether ranks of another launch run."""
        with self._lock:
            return bool(self._jobs - {job})
