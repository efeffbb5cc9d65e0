"""Samples of ranks, as the driver gets them."""

from __future__ import annotations

from typing import Any


def sample(rank: int, **changes: Any) -> dict[str, Any]:
    """A sample of two seconds in a world of two ranks; half a second each of waiting for data and for others."""
    values = {
        "kind": "monitor",
        "rank": rank,
        "world_size": 2,
        "host": f"host-{rank}",
        "seconds": 2.0,
        "steps": 10,
        "rows": 80,
        "tokens": None,
        "flops": 4e9,
        "peak_flops": 10e9,
        "reading_s": 0.5,
        "communicating_s": 0.5,
        "bus_bandwidth": 1e9,
        "link_bandwidth": 4e9,
        "processor_s": 1.5,
        "memory_bytes": 1 << 30,
        "gpu_memory_bytes": None,
        "gpu_load": None,
    }
    return {**values, **changes}


STEP = {
    "kind": "step",
    "epoch": 2,
    "epochs": 3,
    "step": 4,
    "steps": 10,
    "loss": 0.5,
    "rows_per_s": 1.0,
    "eta_s": 9.0,
}
