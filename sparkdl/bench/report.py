"""The report that every benchmark writes: one JSON object with the machine, and one row per case and contender.

The description of the machine contains neither host name nor user.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkdl.versions import package_versions

_PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "horovod", "pyspark", "petastorm", "pyarrow")


def describe_machine() -> dict[str, object]:
    """Return the usable cores, memory, processor, GPU, and the versions of Python and of the compared packages."""
    return {
        "cores": len(os.sched_getaffinity(0)),
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
