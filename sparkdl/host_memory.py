"""Memory of this process and of its host, and numbers of bytes as text. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of the host, in bytes.

    Attributes:
        total_bytes: memory of the host, or the limit of the container if that is lower; 0 if it is not known.
        available_bytes: memory that programs can still use; 0 if it is not known.
        process_bytes: resident memory of this process.
        peak_bytes: largest ``process_bytes`` so far.
    """

    total_bytes: int
    available_bytes: int
    process_bytes: int
    peak_bytes: int


def host_memory() -> HostMemory:
    """Return the memory of this process and its host."""
    total = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if (limit := _container_memory()) is not None:
        total.append(limit[0])
    process = _kibibytes(Path("/proc/self/status"))
    return HostMemory(
        total_bytes=min(total),
        available_bytes=available_bytes() or 0,
        process_bytes=process.get("VmRSS", 0),
        peak_bytes=process.get("VmHWM", 0),
    )


def available_bytes() -> int | None:
    """Return the bytes of memory that programs can use, within the limit of the container; None if not known."""
    available = _kibibytes(Path("/proc/meminfo")).get("MemAvailable")
    parts = [] if available is None else [available]
    if (limit := _container_memory()) is not None:
        parts.append(limit[0] - limit[1])
    return min(parts) if parts else None


def in_bytes(count: float) -> str:
    """Format a number of bytes with a unit: ``64.0 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _container_memory(group: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Return the limit of the container's memory, and what it uses; None without a limit, or without cgroup v2.

    As in Kubernetes, cached files that have not been read lately do not count: the kernel drops them when it needs the
    memory.
    """
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else (int(limit), max(0, used - int(stat.get("inactive_file", 0))))


def _kibibytes(path: Path) -> dict[str, int]:
    """Read the sizes in a file of ``/proc``, which are in kB; return them in bytes, by name.

    Empty if the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {parts[0].rstrip(":"): int(parts[1]) << 10 for parts in words if parts[-1:] == ["kB"]}
