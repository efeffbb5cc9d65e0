"""Watches a training: how fast it is, what its ranks wait for, and how much of their devices it uses.

A :class:`Monitor` samples all ranks of a fit or a run while it runs; :func:`end_step` tells it of the steps of a
training loop of your own. :func:`monitor_communication`, :func:`get_gpu_memory_stats` and :func:`compute_throughput`
return figures of the rank that calls them, at once and without communication. They are also in the Horovod API, as
``hvd.monitor_communication`` and so on. Begin with ``settings``; ``sampler`` runs on ranks, and ``board`` with its
``exports`` on the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.lazy import attributes

if TYPE_CHECKING:
    from sparkdl.monitor.communication import CommunicationFigures, compute_throughput, monitor_communication
    from sparkdl.monitor.memory import MemoryStats, get_gpu_memory_stats
    from sparkdl.monitor.sampler import end_step
    from sparkdl.monitor.settings import Monitor

__all__ = [
    "CommunicationFigures",
    "MemoryStats",
    "Monitor",
    "compute_throughput",
    "end_step",
    "get_gpu_memory_stats",
    "monitor_communication",
]

# Loaded on first use: the driver needs only some of it.
__getattr__, __dir__ = attributes(
    __name__,
    {
        "CommunicationFigures": ".communication",
        "MemoryStats": ".memory",
        "Monitor": ".settings",
        "compute_throughput": ".communication",
        "end_step": ".sampler",
        "get_gpu_memory_stats": ".memory",
        "monitor_communication": ".communication",
    },
)
