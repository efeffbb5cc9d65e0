"""``sparkdl bench allreduce``: the time of an allreduce through the communicator and through torch, against others.

Runs where it is called; the ranks are processes of this machine. Contenders run one after another, each in fresh
processes. Every time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparkdl.bench.report import format_table, format_time, write_report
from sparkdl.bench.sizes import format_size, parse_size
from sparkdl.bench.starting import Task, run_task
from sparkdl.errors import ParamError

_DEFAULT_SIZES = "1KiB,16KiB,256KiB,4MiB,64MiB,128MiB"
_TIMEOUT_S = 900.0

OURS = ("native", "torch")
AGAINST: dict[str, tuple[str, ...]] = {"gloo": ("gloo", "gloo tuned"), "mpi": ("mpi",)}
"""What can be compared with, and the contenders that it stands for."""

_LEGEND = (
    "native, torch: sparkdl by itself and under torch.distributed. copy: each rank copies such a buffer.\n"
    "native is 2.00x: that contender takes twice as long as native. bus GB/s: as nccl-tests defines it."
)

_REQUIRED_MODULES = {"torch": "torch", "gloo": "torch", "gloo tuned": "torch", "mpi": "mpi4py"}

_EXTRAS = {"torch": "torch", "mpi4py": "mpi"}

# One Gloo device per entry: with several of them it uses several connections at once.
_TUNED_GLOO = {"GLOO_SOCKET_IFNAME": "lo,lo,lo,lo"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument(
        "--sizes", default=_DEFAULT_SIZES, help="buffer sizes, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--against", default=",".join(AGAINST), help="what to compare with (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long to measure each size (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw times and bandwidths there (needs matplotlib)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report and the plot that were asked for.

    Raises:
        ParamError: if an option has a value that cannot work.
        RankError: if a contender failed.
    """
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    contenders, missing = choose_contenders(arguments.against)
    if arguments.ranks < 2:
        raise ParamError(f"--ranks {arguments.ranks} leaves nobody to reduce with; use 2 or more.")
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise ParamError("--plot needs matplotlib: pip install 'sparkdl[plot]'")
    times: dict[str, dict[int, list[float]]] = {}
    for contender in ("copy", *contenders):
        print(f"measuring {contender} ...", flush=True)
        times[contender] = run_task(_task(contender, arguments, sizes), timeout_s=_TIMEOUT_S)
    rows = make_rows(times, arguments.ranks)
    print(format_rows(rows))
    print(_LEGEND)
    for contender, reason in missing.items():
        print(f"{contender} is missing: {reason}")
    if arguments.json is not None:
        write_report(arguments.json, "allreduce", rows, missing)
    if arguments.plot is not None:
        from sparkdl.bench.plot import plot_bandwidth

        plot_bandwidth(rows, arguments.plot)
    return 0


def choose_contenders(against: str) -> tuple[list[str], dict[str, str]]:
    """The contenders that can run, ours first, and for those that cannot the reason.

    Raises:
        ParamError: if ``against`` names something unknown.
    """
    names = [name.strip() for name in against.split(",") if name.strip()]
    unknown = [name for name in names if name not in AGAINST]
    if unknown:
        raise ParamError(f"--against {','.join(unknown)} is unknown; it may be any of {', '.join(AGAINST)}.")
    wanted = [*OURS, *(contender for name in names for contender in AGAINST[name])]
    missing = {
        contender: f"{module} is not installed; pip install 'sparkdl[{_EXTRAS[module]}]' brings it"
        for contender in wanted
        if (module := _REQUIRED_MODULES.get(contender)) is not None and find_spec(module) is None
    }
    return [contender for contender in wanted if contender not in missing], missing


def make_rows(times: Mapping[str, Mapping[int, Sequence[float]]], world_size: int) -> list[dict[str, Any]]:
    """One row per size and contender, ``copy`` among them.

    Algorithm bandwidth is ``bytes / time``. Bus bandwidth is that times ``2 (n - 1) / n``, the part of the buffer
    that any allreduce has to move over each rank's link, as nccl-tests defines it. ``percent_of_copy`` is the
    time in which all ranks copy such a buffer, as part of the time of the allreduce. ``ratio`` holds, for each
    other contender, its median as a multiple of this row's.
    """
    rows = []
    for size in next(iter(times.values())):
        medians = {contender: statistics.median(by_size[size]) for contender, by_size in times.items()}
        for contender, by_size in times.items():
            median_s = medians[contender]
            rows.append(
                {
                    "case": f"allreduce {format_size(size)}",
                    "contender": contender,
                    "repetitions": len(by_size[size]),
                    "median_s": median_s,
                    "p90_s": percentile(by_size[size], 0.9),
                    "bytes": size,
                    "ranks": world_size,
                    "algorithm_bandwidth_bytes_per_s": size / median_s,
                    "bus_bandwidth_bytes_per_s": size / median_s * 2 * (world_size - 1) / world_size,
                    "percent_of_copy": 100 * medians["copy"] / median_s,
                    "ratio": {other: medians[other] / median_s for other in medians if other != contender},
                }
            )
    return rows


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table that is printed; ratios are how many times longer others take than ``native`` and ``torch``."""
    header = ("size", "contender", "median", "p90", "GB/s", "bus GB/s", "% of copy", "native is", "torch is")
    table = []
    for row in rows:
        by_contender = {other["contender"]: other for other in rows if other["bytes"] == row["bytes"]}
        ratios = [
            f"{row['median_s'] / by_contender[ours]['median_s']:.2f}x" if ours in by_contender else ""
            for ours in OURS
        ]
        table.append(
            (
                format_size(row["bytes"]),
                row["contender"],
                format_time(row["median_s"]),
                format_time(row["p90_s"]),
                f"{row['algorithm_bandwidth_bytes_per_s'] / 1e9:.3g}",
                f"{row['bus_bandwidth_bytes_per_s'] / 1e9:.3g}",
                f"{row['percent_of_copy']:.3g}",
                *ratios,
            )
        )
    return format_table(header, table)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least ``fraction`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def _task(contender: str, arguments: argparse.Namespace, sizes: Sequence[int]) -> Task:
    return Task(
        contender="gloo" if contender == "gloo tuned" else contender,
        world_size=arguments.ranks,
        sizes=sizes,
        seconds=arguments.seconds,
        mpi=contender == "mpi",
        variables=_TUNED_GLOO if contender == "gloo tuned" else {},
    )
