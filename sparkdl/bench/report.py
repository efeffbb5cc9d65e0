"""The report of a benchmark: one JSON object with the machine, and one row per case and contender; and its picture.

The description of the machine contains neither host name nor user. Drawing needs matplotlib, which the extra ``plot``
installs.
"""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.collective.telemetry.communication_report import format_columns
from sparkdl.cores import usable_cores
from sparkdl.errors import ParamError
from sparkdl.host_memory import host_memory
from sparkdl.versions import package_versions

if TYPE_CHECKING:
    import argparse

    from matplotlib.axes import Axes

_PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "horovod", "pyspark", "petastorm", "pyarrow")


def describe_machine() -> dict[str, object]:
    """Return the usable cores, memory, processor, GPU, and the versions of Python and of the compared packages."""
    return {
        "cores": usable_cores(),
        "memory_bytes": host_memory().total_bytes,
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

Columns = Sequence[tuple[str, Callable[[Row], str]]]
"""Headers of a table, and functions that return the cell of a row."""


def show(
    benchmark: str,
    rows: Sequence[Row],
    columns: Columns,
    arguments: argparse.Namespace,
    *,
    legend: str,
    missing: Mapping[str, str],
    plot: Callable[[Sequence[Row], Path], None] | None = None,
) -> None:
    """Print the table of a run with its legend, and write the report and the picture that were asked for.

    Args:
        benchmark: name of the benchmark.
        rows: one row per case and contender.
        columns: columns of the table.
        arguments: options of the benchmark; ``json`` and ``plot`` are the files to write.
        legend: what the table means.
        missing: reasons why contenders could not run, by contender.
        plot: function that draws the rows, of a benchmark with the option ``plot``.
    """
    print(format_table(rows, columns))
    print(legend)
    for contender, reason in missing.items():
        print(f"{contender} is missing: {reason}")
    if arguments.json is not None:
        report = {
            "benchmark": benchmark,
            "command": shlex.join(["sparkdl", *sys.argv[1:]]),
            "machine": describe_machine(),
            "rows": list(rows),
            "missing": dict(missing),
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if plot is not None and arguments.plot is not None:
        plot(rows, arguments.plot)


def format_table(rows: Sequence[Row], columns: Columns) -> str:
    """Return the rows as lines with aligned cells; a column without a value is left out."""
    filled = [(header, cells) for header, cell in columns if any(cells := [cell(row) for row in rows])]
    headers, cells_of_columns = zip(*filled, strict=True)
    return format_columns(headers, list(zip(*cells_of_columns, strict=True)))


def time_of(field: str) -> Callable[[Row], str]:
    """Return the cell of a field with seconds."""
    return lambda row: format_time(row[field])


MEASURED: Columns = (
    ("case", itemgetter("case")),
    ("contender", itemgetter("contender")),
    ("median", time_of("median_s")),
    ("p90", time_of("p90_s")),
)
"""The columns of what every benchmark measures."""

SPARKDL_IS = ("sparkdl is", lambda row: f"{row['ratio'].get('sparkdl', 1.0):.2f}x")
"""The time of sparkdl as a multiple of the time of the row."""


def multiples_of(contenders: Iterable[str]) -> Columns:
    """Return columns with the time of the row as a multiple of the time of each of some contenders."""

    def multiple(contender: str, row: Row) -> str:
        if contender == row["contender"]:
            return "1.00x"
        return f"{1 / row['ratio'][contender]:.2f}x" if contender in row["ratio"] else ""

    return [(f"{contender} is", partial(multiple, contender)) for contender in contenders]


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
    median_s = medians.pop(contender)
    return {
        "case": case,
        "contender": contender,
        "repetitions": len(times[contender]),
        "median_s": median_s,
        "p90_s": percentile(times[contender], 0.9),
        "ratio": {name: median / median_s for name, median in medians.items()},
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
    "alone": "alone (no communication)",
}
"""Names of contenders in pictures."""


def plot_bandwidth(rows: Sequence[Row], path: Path) -> None:
    """Draw time and bus bandwidth over buffer size, one line per contender; the suffix of the file sets the format.

    Rows of several tensors are left out.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["tensors"] == 1]
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    times, bandwidths = figure.subplots(1, 2)
    _draw(times, rows, "bytes", lambda row: row["median_s"])
    times.yaxis.set_major_formatter(lambda value, _: format_time(value))
    times.set_ylabel("median time of one allreduce (less is better)")
    _draw(bandwidths, rows, "bytes", lambda row: row["bus_bandwidth_bytes_per_s"] / 1e9)
    bandwidths.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bandwidths.set_ylabel("bus bandwidth in GB/s (more is better)")
    for axes in (times, bandwidths):
        axes.set_xscale("log")
        axes.set_yscale("log")
        # The labels of sizes that are one power of two apart would overlap.
        sizes = sorted({row["bytes"] for row in rows})
        axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45)
        axes.minorticks_off()
        axes.set_xlabel("size of the buffer on each rank")
    figure.suptitle(f"allreduce of float32 over {rows[0]['ranks']} ranks on one machine")
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)


def plot_steps(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of a step as bars, one plot per case; the suffix of the file sets the format."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    most = max(sum(row["case"] == case for row in rows) for case in cases)
    figure = Figure(figsize=(5.5 * len(cases), max(4.0, 1.5 + 0.3 * most)), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        seconds = {row["contender"]: row["median_s"] for row in rows if row["case"] == case}
        bars = axes.barh(list(seconds), list(seconds.values()))
        axes.bar_label(bars, list(map(format_time, seconds.values())), padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: format_time(value) if value else "0")
        axes.set_xlabel("median time of one step (less is better)")
        axes.set_title(case)
    figure.suptitle(f"one training step on {rows[0]['ranks']} ranks of one machine")
    figure.savefig(path)


def plot_scaling(rows: Sequence[Row], path: Path) -> None:
    """Draw the speed-up over the number of ranks, one plot per case; the suffix of the file sets the format."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(5.5 * len(cases), 4.8), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        (one, *others) = (row for row in rows if row["case"] == case)
        counts = sorted({1, *(row["ranks"] for row in others)})
        axes.plot(counts, counts, ":", color="gray", label="ideal")
        starts = [{**one, "contender": name} for name in dict.fromkeys(row["contender"] for row in others)]
        _draw(axes, [*starts, *others], "ranks", lambda row: row["speed_up"])
        axes.set_xticks(counts)
        axes.set_xlabel("number of ranks")
        axes.set_ylabel("speed-up (more is better)")
        axes.set_title(case)
    figure.suptitle("throughput as a multiple of one rank's")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2 * len(cases))
    figure.savefig(path)


def _draw(axes: Axes, rows: Sequence[Row], x: str, y: Callable[[Row], float]) -> None:
    """Draw a line for each contender, dashed if it does not communicate."""
    for contender in dict.fromkeys(row["contender"] for row in rows):
        line = sorted((row[x], y(row)) for row in rows if row["contender"] == contender)
        style = "--" if contender in ("copy", "alone") else "-"
        axes.plot(*zip(*line, strict=True), style, marker="o", label=_LABELS.get(contender, contender))
    axes.grid(alpha=0.3)
