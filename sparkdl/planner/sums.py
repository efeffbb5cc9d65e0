"""The time of sums over ranks, which gives the planner the latency and the rate of the link between them.

Ranks that choose their layout time them themselves; ``sparkdl plan`` starts ranks that do.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_FEW = 4 << 10
"""Bytes of the sum that gives the latency."""

_GROWTH = 16

_MOST = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Most bytes of the sum that gives the rate, by type of device. Sums of 16 MiB do not reach the rate of NVLink."""

_LONG_S = 0.05
"""Seconds from which a sum gives the rate, whatever its bytes."""

_SAMPLES = 3
"""Least number of times that a figure is taken, as one pause of one rank must not make it."""

_MEASURED_S = 0.1
_REPETITION_S = 1e-3
_MOST_OPERATIONS = 64
_MOST_REPETITIONS = 20


@dataclass(frozen=True, kw_only=True)
class SumTimes:
    """The time of a small and of a large sum over the ranks of a group, while all other groups have theirs.

    Attributes:
        num_bytes: bytes of both sums.
        seconds: seconds of both on the slowest of all ranks.
        cores: cores that a rank uses during the large sum, at most over all ranks.
    """

    num_bytes: tuple[int, int]
    seconds: tuple[float, float]
    cores: float


def time_sums(group: dist.ProcessGroup | None, device: torch.device) -> SumTimes:
    """Time sums over a group of ranks, or all ranks if it is None.

    Collective on all ranks: each is in one of the groups, which are equally large. The large sum is of 16 MiB on CPUs
    and 256 MiB on GPUs, or of fewer bytes, at least 64 KiB, if those take 50 ms.
    """
    import torch

    num_bytes, most = _FEW * _GROWTH, _MOST[device.type]
    small_s, _ = _measure(group, device, _FEW)
    while num_bytes < most and _begin(group, device, num_bytes)[1] < _LONG_S:
        num_bytes *= _GROWTH
    large_s, cores = _measure(group, device, num_bytes)
    if device.type == "cuda":
        # The buffers would count as memory of the training that follows.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return SumTimes(num_bytes=(_FEW, num_bytes), seconds=(small_s, large_s), cores=cores)


def _measure(group: dist.ProcessGroup | None, device: torch.device, num_bytes: int) -> tuple[float, float]:
    """Return the seconds of a sum, and the cores that it uses."""
    buffers, once_s = _begin(group, device, num_bytes)
    operations = int(min(_MOST_OPERATIONS, max(1, _REPETITION_S / once_s)))
    repetitions = int(min(_MOST_REPETITIONS, max(_SAMPLES, _MEASURED_S / (operations * once_s))))
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    times = [_run(group, buffers, operations) for _ in range(repetitions)]
    cores = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
    seconds, cores = _most_of_ranks(device, statistics.median(times), cores)
    return seconds, cores


def _begin(
    group: dist.ProcessGroup | None, device: torch.device, num_bytes: int
) -> tuple[list[torch.Tensor], float]:
    """Return buffers that take turns, and the seconds of a sum once the ranks are connected and the memory touched."""
    import torch

    buffers = [torch.zeros(num_bytes // 4, device=device) for _ in range(2)]
    _run(group, buffers, 2)
    (once_s,) = _most_of_ranks(device, min(_run(group, buffers, 1) for _ in range(_SAMPLES)))
    return buffers, once_s


def _run(group: dist.ProcessGroup | None, buffers: list[torch.Tensor], operations: int) -> float:
    """Return the average seconds of a sum, over this many of them."""
    import torch
    import torch.distributed as dist

    start = time.perf_counter()
    for index in range(operations):
        dist.all_reduce(buffers[index % len(buffers)], group=group)
    if buffers[0].is_cuda:
        torch.cuda.synchronize(buffers[0].device)
    return (time.perf_counter() - start) / operations


def _most_of_ranks(device: torch.device, *figures: float) -> list[float]:
    """Return the largest of each figure over all ranks, so that they take the same decisions."""
    import torch
    import torch.distributed as dist

    largest = torch.tensor(figures, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    most: list[float] = largest.tolist()
    return most
