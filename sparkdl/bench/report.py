"""The report of a benchmark: one JSON object with the machine, and one row per case and contender; and its picture.

The description of the machine contains neither host name nor user. Drawing needs matplotlib, which the extra ``plot``
installs.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.cores import usable_cores
from sparkdl.errors import ParamError
from sparkdl.versions import package_versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "horovod", "pyspark", "petastorm", "pyarrow")


def describe_machine() -> dict[str, object]:
    """Return the usable cores, memory, processor, GPU, and the versions of Python and of the compared packages."""
    return {
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "processor": _processor(),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "versions": package_versions(_PACKAGES),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str | None:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607  # found where the user has it
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(answer.stdout.split("\n")).strip(", ") or None


Row = Mapping[str, Any]
"""A row: ``case``, ``contender``, ``repetitions``, ``median_s``, ``p90_s``, and the fields of the benchmark."""


def show(
    benchmark: str,
    rows: Sequence[Row],
    *,
    table: str,
    legend: str,
    missing: Mapping[str, str],
    path: Path | None,
) -> None:
    """Print the table of a run with its legend, and write the report if ``path`` is given.

    Args:
        benchmark: name of the benchmark.
        rows: one row per case and contender.
        table: the rows as text.
        legend: what the table means.
        missing: reasons why contenders could not run, by contender.
        path: file to write; its folder must exist.
    """
    print(table)
    print(legend)
    for contender, reason in missing.items():
        print(f"{contender} is missing: {reason}")
    if path is not None:
        write_report(path, benchmark, rows, missing)


def write_report(path: Path, benchmark: str, rows: Sequence[Row], missing: Mapping[str, str]) -> None:
    """Write the report of a run; for the arguments see :func:`show`."""
    report = {
        "benchmark": benchmark,
        "command": shlex.join(["sparkdl", *sys.argv[1:]]),
        "machine": describe_machine(),
        "rows": list(rows),
        "missing": dict(missing),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def format_time(time_s: float) -> str:
    """Format a time with three digits and a unit, such as ``"12.3 us"``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if time_s * factor >= 1.0:
            return f"{time_s * factor:.3g} {unit}"
    return f"{time_s * 1e6:.2g} us"


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least ``fraction`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def row_of(case: str, contender: str, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the part of a row that all benchmarks have, from the seconds of all contenders at the case.

    ``ratio`` holds the median of each other contender as a multiple of the median of this row.
    """
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    own = medians.pop(contender)
    return {
        "case": case,
        "contender": contender,
        "repetitions": len(times[contender]),
        "median_s": own,
        "p90_s": percentile(times[contender], 0.9),
        "ratio": {name: median / own for name, median in medians.items()},
    }


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_size(text: str) -> int:
    """Parse a size such as ``"256KiB"``, and return the number of bytes.

    Raises:
        ParamError: if the text is not a size above zero.
    """
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise ParamError(f"size {text!r} is not understood; write it as 512, 16KiB, 4MiB or 1GiB")
    return int(match[1]) * _UNITS[match[2]]


def format_size(num_bytes: int) -> str:
    """Return the shortest text for a number of bytes that :func:`parse_size` can parse."""
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}"
    return f"{num_bytes}B"


_LABELS = {
    "native": "native (sparkdl's communicator)",
    "arena": "arena (native, buffers in shared memory)",
    "torch": "torch (sparkdl under torch.distributed)",
    "gloo tuned": "gloo tuned (four connections)",
    "copy": "copy (each rank copies such a buffer, no communication)",
}


def plot_bandwidth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time and bus bandwidth over buffer size, one line per contender; the suffix of the file sets the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    times, bandwidths = figure.subplots(1, 2)
    _draw(times, [(row["contender"], row["bytes"], row["median_s"]) for row in rows])
    times.yaxis.set_major_formatter(lambda value, _: format_time(value))
    times.set_ylabel("median time of one allreduce (less is better)")
    _draw(
        bandwidths, [(row["contender"], row["bytes"], row["bus_bandwidth_bytes_per_s"] / 1e9) for row in rows]
    )
    bandwidths.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bandwidths.set_ylabel("bus bandwidth in GB/s (more is better)")
    figure.suptitle(f"allreduce of float32 over {rows[0]['ranks']} ranks on one machine")
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)


def plot_steps(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the time of a step as bars, one plot per model; the suffix of the file sets the format."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    most = max(sum(row["case"] == case for row in rows) for case in cases)
    figure = Figure(figsize=(5.5 * len(cases), max(4.0, 1.5 + 0.3 * most)), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        rows_of_case = [row for row in rows if row["case"] == case]
        bars = axes.barh(
            [row["contender"] for row in rows_of_case], [row["median_s"] for row in rows_of_case]
        )
        axes.bar_label(bars, [format_time(row["median_s"]) for row in rows_of_case], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: format_time(value) if value else "0")
        axes.set_xlabel("median time of one step (less is better)")
        axes.set_title(case)
    figure.suptitle(f"one training step on {rows[0]['ranks']} ranks of one machine")
    figure.savefig(path)


def plot_scaling(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the speed-up over the number of ranks, one plot per case; the suffix of the file sets the format."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(5.5 * len(cases), 4.8), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        rows_of_case = [row for row in rows if row["case"] == case]
        counts = sorted({row["ranks"] for row in rows_of_case})
        axes.plot(counts, counts, ":", color="gray", label="ideal")
        for contender in dict.fromkeys(row["contender"] for row in rows_of_case if row["ranks"] > 1):
            line = [(row["ranks"], row["speed_up"]) for row in rows_of_case if row["contender"] == contender]
            style = "--" if contender == "alone" else "-"
            name = "alone (no communication)" if contender == "alone" else contender
            axes.plot(*zip((1, 1.0), *line, strict=True), style, marker="o", label=name)
        axes.set_xticks(counts)
        axes.set_xlabel("number of ranks")
        axes.set_ylabel("speed-up (more is better)")
        axes.set_title(case)
        axes.grid(alpha=0.3)
    figure.suptitle("throughput as a multiple of one rank's")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2 * len(cases))
    figure.savefig(path)


def _draw(axes: Axes, points: Sequence[tuple[str, int, float]]) -> None:
    sizes = sorted({size for _, size, _ in points})
    for contender in dict.fromkeys(contender for contender, _, _ in points):
        line = sorted((size, value) for other, size, value in points if other == contender)
        style = "--" if contender == "copy" else "-"
        axes.plot(*zip(*line, strict=True), style, marker="o", label=_LABELS.get(contender, contender))
    axes.set_xscale("log")
    axes.set_yscale("log")
    # The labels of sizes that are one power of two apart would overlap.
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel("size of the buffer on each rank")
    axes.grid(alpha=0.3)
