"""``sparkdl bench launch``: the time to start ranks, open their communicator and end them, with and without Spark.

Runs where it is called. Every launch is warm: a forkserver has imported torch, and Spark's Python workers run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contest import announce, take_turns
from sparkdl.bench.libraries import require, split_missing
from sparkdl.bench.options import add_common_arguments, check_common_arguments, parse_counts
from sparkdl.bench.report import MEASURED, Columns, format_time, row_of, show, time_of
from sparkdl.cli.local_session import start_session
from sparkdl.errors import count_of
from sparkdl.launch import run_on_local_ranks, run_on_ranks

if TYPE_CHECKING:
    from sparkdl.launch import RankContext

Launch = Callable[..., list[Any]]

_LEGEND = (
    "From the call to the values of all ranks, which open the communicator and meet in a barrier, by run_on_ranks on\n"
    "Spark and run_on_local_ranks without. A rank has one thread and is forked from a process that imported torch.\n"
    "processor: time of this process and all its descendants, with Spark's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "--ranks", default="2,8,32", help="numbers of ranks, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--master", help="URL of Spark's master (default: local, with a slot for each rank)")
    add_common_arguments(parser, "seconds", "json", seconds=10.0)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report that was asked for.

    Raises:
        ParamError: if an option has a value that cannot work, or torch is missing.
        SlotsMissingError: if the cluster of ``--master`` has too few slots.
    """
    check_common_arguments(arguments)
    counts = parse_counts(arguments.ranks)
    require("launch", "torch")
    present, missing = split_missing({"without Spark": "torch", "on Spark": "spark"})
    launches: dict[str, Launch] = {"without Spark": run_on_local_ranks}
    rows = []
    with ExitStack() as stack:
        if "on Spark" in present:
            master = arguments.master or f"local[{counts[-1]}]"
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparkdl-bench-")))
            session = stack.enter_context(start_session("sparkdl bench launch", master, folder))
            launches["on Spark"] = partial(run_on_ranks, spark=session)
        for num_ranks in counts:
            announce(f"launching {num_ranks} ranks")
            rows += measure(launches, num_ranks, arguments.seconds)
    show("launch", rows, COLUMNS, arguments, legend=_LEGEND, missing=missing)
    return 0


def measure(launches: Mapping[str, Launch], num_ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Launch in each way in turn, and return one row per way."""

    def meet(context: RankContext) -> None:  # pickled with its code, so that a rank imports no module for it
        context.communicator.barrier()

    def launch(run: Launch) -> None:
        run(meet, num_ranks=num_ranks, threads_per_rank=1, modules=("torch",))

    times, spent = take_turns({name: partial(launch, run) for name, run in launches.items()}, seconds)
    return [
        {
            **row_of(count_of(num_ranks, "rank"), name, times),
            "ranks": num_ranks,
            "processor_s": statistics.median(spent[name]),
        }
        for name in launches
    ]


COLUMNS: Columns = (
    *MEASURED,
    ("of a rank", lambda row: format_time(row["median_s"] / row["ranks"])),
    ("processor", time_of("processor_s")),
    ("of a rank", lambda row: format_time(row["processor_s"] / row["ranks"])),
)
