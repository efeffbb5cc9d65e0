"""What a process holds: memory, descriptors, threads, shared memory. Runs on ranks."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Census:
    """Counts of one process.

    Attributes:
        private_bytes: resident memory that is its own.
        num_fds: open descriptors.
        num_threads: threads, those of the native core among them.
        num_segments: mappings of shared memory.
        num_keys: keys of the job's rendezvous.
    """

    private_bytes: int
    num_fds: int
    num_threads: int
    num_segments: int
    num_keys: int

    @classmethod
    def take(cls, num_keys: int) -> Census:
        """Count what this process holds once all garbage is collected."""
        gc.collect()
        # Otherwise the allocator keeps what was freed, as much of it as it happens to find useful.
        ctypes.CDLL(None).malloc_trim(0)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        maps = Path("/proc/self/maps").read_text().splitlines()
        return cls(
            private_bytes=int(status["RssAnon"].split()[0]) << 10,
            num_fds=len(os.listdir("/proc/self/fd")),
            num_threads=int(status["Threads"]),
            num_segments=sum("/dev/shm/sparkdl-" in line for line in maps),
            num_keys=num_keys,
        )

    def growth_to(self, later: Census) -> dict[str, int]:
        """By how much each count is larger later."""
        names = [field.name for field in fields(self)]
        growth = {name: getattr(later, name) - getattr(self, name) for name in names}
        return {name: more for name, more in growth.items() if more > 0}
