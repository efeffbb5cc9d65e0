"""The resources that a process holds: memory, descriptors, threads, shared memory. Runs on ranks."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Census:
    """Resource counts of one process.

    Attributes:
        private_bytes: resident memory that only this process uses.
        num_fds: number of open descriptors.
        num_threads: number of threads, including those of the native core.
        num_segments: number of mappings of shared memory.
        num_keys: number of keys in the job's rendezvous.
    """

    private_bytes: int
    num_fds: int
    num_threads: int
    num_segments: int
    num_keys: int

    @classmethod
    def take(cls, num_keys: int) -> Census:
        """Collect all garbage, then count what this process holds."""
        gc.collect()
        # Otherwise the allocator keeps an arbitrary part of the freed memory.
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
        """The increase of each count up to ``later``."""
        names = [field.name for field in fields(self)]
        growth = {name: getattr(later, name) - getattr(self, name) for name in names}
        return {name: more for name, more in growth.items() if more > 0}
