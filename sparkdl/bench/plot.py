"""Draws the rows of a benchmark. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkdl.bench.sizes import format_size


def plot_bandwidth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw bus bandwidth over buffer size, a line per contender; the file's ending chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    sizes = sorted({row["bytes"] for row in rows})
    for contender in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == contender]
        points = [(row["bytes"], row["bus_bandwidth_bytes_per_s"] / 1e9) for row in own]
        style = "--" if contender == "copy" else "-"
        axes.plot(*zip(*sorted(points), strict=True), style, marker="o", label=contender)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("buffer")
    axes.set_ylabel("bus bandwidth in GB/s")
    axes.set_title(f"allreduce of float32 over {rows[0]['ranks']} ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
