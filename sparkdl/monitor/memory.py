"""Memory of this rank: of its process and its host, and of the GPUs that it sees."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

from sparkdl.host_memory import HostMemory, host_memory


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
