"""Measures the private memory that this process allocates while a block runs; mapped files do not count."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_INTERVAL_S = 0.002


@dataclass
class Growth:
    """The result of a measurement, available once the block has ended.

    Attributes:
        peak_bytes: largest increase of private memory, in bytes.
    """

    peak_bytes: int = 0


@contextmanager
def memory_watched() -> Iterator[Growth]:
    """Sample the memory every few milliseconds; copying a hundred MiB takes longer than that."""
    gc.collect()
    found, is_over = Growth(), threading.Event()
    before = _own_bytes()

    def look() -> None:
        while True:
            found.peak_bytes = max(found.peak_bytes, _own_bytes() - before)
            if is_over.wait(_INTERVAL_S):
                return

    thread = threading.Thread(target=look, name="memory-watch")
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
