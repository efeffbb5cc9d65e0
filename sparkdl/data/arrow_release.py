"""Has Arrow's allocator give back what it keeps, where that is mimalloc. Runs on the reader threads of every *rank*.

What one thread decoded and another one has freed, mimalloc keeps for the thread that decoded it. Lists of 784 floats
under a bound of 128 MiB took up to 410 MiB so, and 266 to 306 where the readers have it collect after every 64 MiB, for
15 to 20 % more of the processor's time. jemalloc, with which ranks begin, needs none of it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY_BYTES = 64 << 20
_ALLOCATOR = "mimalloc"


class ArrowRelease:
    """Counts what is decoded, in all threads together.

    Args:
        every_bytes: how much is decoded between one release and the next.
        find_pool: returns the pool that is decoded into.
    """

    def __init__(
        self, every_bytes: int = EVERY_BYTES, find_pool: Callable[[], Any] = pa.default_memory_pool
    ) -> None:
        self._every_bytes, self._find_pool = every_bytes, find_pool
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Say that so much was decoded; the thread that says so at the time gives back what is not in use."""
        with self._lock:
            self._num_bytes += num_bytes
            is_due = self._num_bytes >= self._every_bytes
            if is_due:
                self._num_bytes = 0
        if is_due and (pool := self._find_pool()).backend_name == _ALLOCATOR:
            pool.release_unused()


ARROW_RELEASE = ArrowRelease()
"""That of this process: its allocator is one for all feeds."""
