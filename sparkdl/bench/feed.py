"""``sparkdl bench feed``: the time that each contender takes to read Parquet files into batches of tensors.

Runs where it is called; every contender is a process on this machine. Each run writes the files to a temporary folder,
and they are read from the file cache of the operating system.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparkdl.bench.contenders.feed import BATCH_SIZE, NUM_THREADS, READ_AHEAD_BYTES, TABLES, write_table
from sparkdl.bench.contest import Case, Measurements, announce, hold, rows_of
from sparkdl.bench.libraries import names_of, require, split_missing
from sparkdl.bench.options import add_common_arguments, check_common_arguments
from sparkdl.bench.report import MEASURED, SPARKDL_IS, Columns, show, time_of

LIBRARIES = {
    "sparkdl": "feed",
    "petastorm": "feed of petastorm",
    "arrow": "feed of arrow",
    "read_table": "feed of read_table",
    "torch": "feed of torch",
    "datasets": "feed of datasets",
    "streaming": "feed of streaming",
}
"""Library that the process of each contender opens, by contender."""

OTHERS = [name for name in LIBRARIES if name != "sparkdl"]

SHUFFLE_ROWS = 50_000

CASES = {
    "28 floats": ("28 floats", 0, False),
    "28 floats shuffled": ("28 floats", SHUFFLE_ROWS, False),
    "784 floats": ("list of 784 floats", 0, False),
    "784 floats shuffled": ("list of 784 floats", SHUFFLE_ROWS, False),
    "images": ("images", 0, False),
    "tokens": ("tokens", 0, False),
    "training": ("digits", 0, True),
}
"""Cases by name: the table, the rows of the shuffle buffer, and whether a model is trained on every batch."""

# Petastorm takes minutes per pass over shuffled lists.
DEFAULT_CASES = tuple(name for name in CASES if name != "784 floats shuffled")

_LEGEND = (
    f"Batches of {BATCH_SIZE} rows as tensors, {NUM_THREADS} reader threads, {NUM_THREADS} in Arrow's pool.\n"
    "petastorm: its BatchedDataLoader "
    "over make_batch_reader. arrow: a loop over read_row_group that fills a matrix and cuts it; it does not shuffle.\n"
    "read_table: decodes all files at once without making batches, the limit for the others. torch: DataLoader over\n"
    "rows that lie in memory before the time counts. datasets: Hugging Face's Dataset over mapped Arrow files.\n"
    f"streaming: Mosaic's StreamingDataset in a DataLoader of {NUM_THREADS} processes. Their files are made before\n"
    "the time counts. 784 floats, images (3,072 bytes), tokens (1,024 of int32): a list in one column, and a label.\n"
    "training: the demo's network on lists of 64 floats. cpu: processor time of a pass. memory: the peak above\n"
    "what the process took before it read; both leave out worker processes. waiting: the share of the time in which\n"
    "no batch was there. sparkdl is 0.50x: it takes half as long."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "--against",
        default=",".join(OTHERS),
        help="contenders beside sparkdl, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--cases",
        default=",".join(DEFAULT_CASES),
        help=f"what to read, separated by commas, of {', '.join(CASES)} (default: %(default)s)",
    )
    add_common_arguments(parser, "seconds", "scale", "json", seconds=10.0)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report that was asked for.

    Raises:
        ParamError: if an option has a value that cannot work.
        RankError: if a contender failed, or did not read every row once.
    """
    check_common_arguments(arguments)
    names = names_of(arguments.cases, CASES, "--cases", least=1)
    against = names_of(arguments.against, OTHERS, "--against")
    require("feed", "torch", "feed")
    present, missing = split_missing({name: LIBRARIES[name] for name in ("sparkdl", *against)})
    with tempfile.TemporaryDirectory(prefix="sparkdl-bench-") as folder:
        announce("writing the files")
        cases = make_cases(Path(folder), arguments.scale, names)
        measured: dict[str, dict[str, Measurements]] = {}
        for case in cases:
            # Loops over Arrow do not shuffle, and a table has no batches.
            shuffles, trains = bool(case.settings["shuffle_rows"]), case.settings["trains"]
            unfit = {"arrow": shuffles, "read_table": shuffles or trains}
            # New processes for every case: memory that a process keeps from one case must not count in the next.
            measured |= hold(
                "feed",
                world_size=1,
                libraries={name: library for name, library in present.items() if not unfit.get(name)},
                cases=[case],
                seconds=arguments.seconds,
                min_repetitions=1,
            )
    show("feed", make_rows(cases, measured), COLUMNS, arguments, legend=_LEGEND, missing=missing)
    return 0


def make_cases(folder: Path, scale: float, names: Sequence[str]) -> list[Case]:
    """Write the tables that the named cases need, and return the cases."""
    tables = dict.fromkeys(CASES[name][0] for name in names)
    settings = {
        table: write_table(folder / str(index), TABLES[table], scale) for index, table in enumerate(tables)
    }
    cases = []
    for name in names:
        table, shuffle_rows, trains = CASES[name]
        shuffle_rows = max(1, round(shuffle_rows * scale)) if shuffle_rows else 0
        cases.append(
            Case(name=name, settings={**settings[table], "shuffle_rows": shuffle_rows, "trains": trains})
        )
    return cases


def make_rows(
    cases: Sequence[Case], measured: Mapping[str, Mapping[str, Measurements]]
) -> list[dict[str, Any]]:
    """Return one row per case and contender.

    ``peak_bytes`` is the peak memory above what the process took before it read. ``bound_bytes`` is the memory that
    sparkdl was allowed. ``cpu_s`` is the median processor time of a pass, and ``data_wait_share`` the median share of
    a pass that was spent waiting for batches.
    """
    rows = []
    for case, measurements, row in rows_of(cases, measured):
        settings = case.settings
        results = [result for turn in measurements.results for result in turn]
        waits = [wait for result in results for wait in result["waited_s"]]
        value_bytes, width = np.dtype(settings["dtype"]).itemsize, settings["list_length"]
        row_bytes = 4 * settings["num_floats"] or value_bytes * width + 8  # the label is an int64
        bound_bytes = READ_AHEAD_BYTES + settings["shuffle_rows"] * row_bytes
        rows.append(
            {
                **row,
                "rows": settings["num_rows"],
                "rows_per_s": settings["num_rows"] / row["median_s"],
                "peak_bytes": max(result["peak_bytes"] for result in results),
                "bound_bytes": bound_bytes if row["contender"] == "sparkdl" else None,
                "cpu_s": statistics.median(cpu for result in results for cpu in result["cpu_s"]),
                "data_wait_share": statistics.median(
                    wait / duration for wait, duration in zip(waits, measurements.times, strict=True)
                ),
            }
        )
    return rows


COLUMNS: Columns = (
    *MEASURED,
    ("rows/s", lambda row: f"{row['rows_per_s']:,.0f}"),
    ("cpu", time_of("cpu_s")),
    ("memory", lambda row: f"{row['peak_bytes'] / 2**20:,.0f} MiB"),
    ("waiting", lambda row: f"{row['data_wait_share']:.1%}"),
    SPARKDL_IS,
)
