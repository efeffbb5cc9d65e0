"""``sparkdl bench parallel``: the time and memory of one training step under each kind of parallelism.

Runs where it is called; the ranks are processes on this machine with one thread each. The same code runs on the
backend of sparkdl and on Gloo.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.bench.contenders.parallel import ALONE, KINDS, MICROBATCHES, MODELS
from sparkdl.bench.contest import Case, Measurements, hold, rows_of
from sparkdl.bench.libraries import names_of, require
from sparkdl.bench.options import add_common_arguments, check_common_arguments
from sparkdl.bench.report import MEASURED, Columns, Row, plot_steps, show
from sparkdl.errors import CommunicatorError, ParamError

CONTENDERS = {
    **dict.fromkeys(ALONE, "torch"),
    **{f"{kind} on sparkdl": "torch" for kind in KINDS},
    **{f"{kind} on gloo": "gloo" for kind in KINDS},
}
"""Library that the ranks of each contender open, by contender."""

_LOSS_TOLERANCE = 1e-4

_LEGEND = (
    "A step is forward, backward and AdamW (fused), on one batch of rows x positions. TP (tensor), TP+SP (and\n"
    "sequence), PP (pipeline, 1F1B, 4 microbatches) and CP (context, ring attention) share the batch among the\n"
    "ranks; with FSDP2 (ZeRO-3) each rank has a batch. one rank: one process with one thread, two threads: with two;\n"
    "other ranks sleep. state: weights, gradients and AdamW's moments on the fullest rank. saved: what a forward pass\n"
    "keeps for the backward pass, without weights. of gloo: the time as a multiple of the same code's on Gloo; of one\n"
    "rank: likewise."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    add_common_arguments(parser, "ranks", "seconds", "json", "plot", seconds=10.0)
    parser.add_argument(
        "--models",
        default="23M",
        help=f"sizes of the decoder in parameters, of {', '.join(MODELS)}, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--batches",
        default="4x128,1x64",
        help="rows x positions of a batch, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        help="kinds of parallelism, separated by commas (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report that was asked for.

    Raises:
        ParamError: if an option has a value that cannot work.
        RankError: if a contender failed.
        CommunicatorError: if the loss of a contender differs from the loss of one process.
    """
    check_common_arguments(arguments, ranks=2)
    kinds = names_of(arguments.kinds, KINDS, "--kinds")
    require("parallel", "torch")
    measured: dict[str, dict[str, Measurements]] = {}
    cases = make_cases(arguments.models, arguments.batches, arguments.ranks)
    for case in cases:
        # A pipeline divides its rows into microbatches.
        fit = [kind for kind in kinds if kind != "PP" or case.settings["rows"] % MICROBATCHES == 0]
        measured |= hold(
            "parallel",
            world_size=arguments.ranks,
            libraries={
                name: library
                for name, library in CONTENDERS.items()
                if name in ALONE or name.partition(" on ")[0] in fit
            },
            cases=[case],
            seconds=arguments.seconds,
            num_rounds=3,
        )
    rows = make_rows(cases, measured, arguments.ranks)
    show("parallel", rows, COLUMNS, arguments, legend=_LEGEND, missing={}, plot=plot_steps)
    return 0


def make_cases(models: str, batches: str, ranks: int) -> list[Case]:
    """Return one case per model and batch.

    Raises:
        ParamError: if a model is unknown, a batch cannot be parsed, or its positions cannot be divided among the ranks.
    """
    cases = []
    for name in names_of(models, MODELS, "--models", least=1):
        for batch in batches.split(","):
            try:
                rows, positions = (int(number) for number in batch.strip().split("x"))
            except ValueError:
                raise ParamError(f"--batches {batch} is not rows x positions, such as 4x128.") from None
            if rows < 1 or positions < 1 or positions % (2 * ranks):
                raise ParamError(
                    f"--batches {batch}: it needs rows, and a number of positions that {2 * ranks} divides."
                )
            settings = {"model": name, "rows": rows, "positions": positions}
            cases.append(Case(name=f"{name}, {rows} x {positions}", settings=settings, max_operations=1))
    return cases


def make_rows(
    cases: Sequence[Case], measured: Mapping[str, Mapping[str, Measurements]], world_size: int
) -> list[dict[str, Any]]:
    """Return one row per case and contender.

    Raises:
        CommunicatorError: if the loss of a contender differs from the loss of one process.
    """
    rows = []
    for case, measurements, row in rows_of(cases, measured):
        results = [result for result in measurements.results[0] if not math.isnan(result["loss"])]
        losses = [result["loss"] for result in results]
        if row["contender"].startswith(
            "CP "
        ):  # the ranks have parts of the sequences, and the losses of these
            losses = [statistics.fmean(losses)]
        expected = measured[case.name]["one rank"].results[0][0]["loss"]
        if not all(math.isclose(loss, expected, rel_tol=_LOSS_TOLERANCE) for loss in losses):
            raise CommunicatorError(
                f"{row['contender']}, {case.name}: the losses are {losses}, and {expected} in one process."
            )
        rows.append(
            {
                **row,
                "state_bytes": max(result["state_bytes"] for result in results),
                "saved_bytes": max(result["saved_bytes"] for result in results),
                "ranks": world_size,
            }
        )
    return rows


def _of_gloo(row: Row) -> str:
    on_gloo = row["ratio"].get(row["contender"].replace(" on sparkdl", " on gloo"))
    return f"{1 / on_gloo:.2f}x" if on_gloo else ""


COLUMNS: Columns = (
    *MEASURED,
    ("of gloo", _of_gloo),
    ("of one rank", lambda row: f"{1 / row['ratio'].get('one rank', 1.0):.2f}x"),
    ("state", lambda row: f"{row['state_bytes'] / 2**20:.0f} MiB"),
    ("saved", lambda row: f"{row['saved_bytes'] / 2**20:.1f} MiB"),
)
