"""Memory of this rank: of its process and its host, and of the GPUs that it sees."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Memory of one GPU, in bytes.

    Attributes:
        number: number of the GPU for this process.
        name: name of the GPU.
        total_bytes: memory of the GPU.
        free_bytes: memory that no process uses.
        allocated_bytes: memory of this process's tensors.
        reserved_bytes: memory that torch holds for tensors of this process.
        peak_bytes: largest ``allocated_bytes`` so far.
    """

    number: int
    name: str
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int


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


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """Memory of a rank.

    Attributes:
        gpus: memory of each GPU that the process uses; empty if it uses none.
        host: memory of its host.
    """

    gpus: tuple[GpuMemory, ...]
    host: HostMemory

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, as JSON can hold them."""
        return {"gpus": [asdict(gpu) for gpu in self.gpus], "host": asdict(self.host)}


def get_gpu_memory_stats() -> MemoryStats:
    """Return the memory of the GPUs that this process uses, and of its process and host. No communication.

    CUDA is not initialized by this call: a process that has not used a GPU yet has no GPU entries, as initializing
    takes hundreds of MiB of GPU memory.
    """
    return MemoryStats(gpus=tuple(map(_gpu_memory, used_gpus())), host=host_memory())


def used_gpus() -> tuple[int, ...]:
    """Return the GPUs on which torch holds memory of this process, without any the current one.

    Empty if the process has not initialized CUDA. To ask another GPU for its memory would initialize CUDA on it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    cuda = torch.cuda
    # The current GPU is that of the thread, and the monitor's thread has another one than the training.
    held = tuple(number for number in range(cuda.device_count()) if cuda.memory_reserved(number) > 0)
    return held or (cuda.current_device(),)


def gpu_load() -> float | None:
    """Return the load of the GPUs that this process uses, from 0 to 1; None without one, or without nvidia-ml-py.

    Raises:
        Exception: any of NVML, which measures no load for a part of a GPU (MIG).
    """
    gpus = used_gpus()
    if not gpus:
        return None
    cuda = sys.modules["torch"].cuda
    try:
        return float(sum(map(cuda.utilization, gpus))) / len(gpus) / 100
    except ModuleNotFoundError:  # nvidia-ml-py
        return None


def _gpu_memory(number: int) -> GpuMemory:
    from torch import cuda

    free, total = cuda.mem_get_info(number)
    return GpuMemory(
        number=number,
        name=cuda.get_device_name(number),
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=cuda.memory_allocated(number),
        reserved_bytes=cuda.memory_reserved(number),
        peak_bytes=cuda.max_memory_allocated(number),
    )


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
    """Return the sizes that a file of ``/proc`` has in kB, in bytes by name; empty if it cannot be read."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {parts[0].rstrip(":"): int(parts[1]) << 10 for parts in words if parts[-1:] == ["kB"]}
