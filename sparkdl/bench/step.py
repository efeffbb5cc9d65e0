"""``sparkdl bench step``: the time of one training step whose gradients each contender reduces.

Runs where it is called; the ranks are processes on this machine. A step is forward, backward, allreduce and
optimizer. Every time is the time of the slowest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.bench.contenders.step import MODELS
from sparkdl.bench.contest import Case, Contest, Measurements, hold
from sparkdl.bench.libraries import missing_contenders, names_of
from sparkdl.bench.options import add_common_arguments, check_common_arguments, check_gpus
from sparkdl.bench.report import format_time, plot_steps, row_of, show
from sparkdl.collective.telemetry.report import format_columns
from sparkdl.errors import CommunicatorError, ParamError

CONTENDERS = {
    "alone": "torch",
    "DataParallel": "torch",
    "DDP on sparkdl": "torch",
    "hvd of sparkdl": "drop-in",
    "DDP on gloo": "gloo",
    "DDP on gloo tuned": "gloo tuned",
    "hvd of Horovod": "horovod",
}
"""Library that the ranks of each contender open, by contender."""

GPU_CONTENDERS = {
    "alone": "torch",
    "DDP on sparkdl": "own nccl",
    "hvd of sparkdl": "drop-in",
    "DDP on nccl": "torch nccl",
    "hvd of Horovod": "horovod",
}
"""The same with ``--device cuda``."""

OURS = ("DataParallel", "DDP on sparkdl", "hvd of sparkdl")

_LEGEND = (
    "alone: all ranks train at once, and no gradient is reduced. communication: the part of the step that is not\n"
    "hidden behind computation, 1 - alone / step. X is 2.00x: that contender takes twice as long as X."
)
_LEGENDS = {
    "cpu": f"DataParallel: sparkdl.torch.DataParallel, whose gradients lie in shared memory. {_LEGEND}",
    "cuda": f"nccl: torch's own ProcessGroupNCCL. sparkdl: its own use of NCCL. {_LEGEND}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    add_common_arguments(parser, "ranks", "seconds", "device", "json", "plot", seconds=5.0)
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        help="sizes of the model in parameters, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--rows", type=int, default=2, help="rows of 16 vectors in the batch of a rank (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report and the plot that were asked for.

    Raises:
        ParamError: if an option has a value that cannot work.
        RankError: if a contender failed.
        CommunicatorError: if a contender left the ranks with different parameters.
    """
    check_common_arguments(arguments, ranks=2, rows=1)
    contenders = GPU_CONTENDERS if arguments.device == "cuda" else CONTENDERS
    missing = missing_contenders(contenders)
    if "alone" in missing:
        raise ParamError(f"sparkdl bench step: {missing['alone']}")
    if arguments.device == "cuda":
        check_gpus(arguments.ranks)
    cases = make_cases(arguments.models, arguments.rows, arguments.device)
    contest = Contest(
        benchmark="step",
        world_size=arguments.ranks,
        libraries={name: library for name, library in contenders.items() if name not in missing},
        cases=cases,
        seconds=arguments.seconds,
        num_rounds=3,
        min_repetitions=3,
    )
    rows = make_rows(cases, hold(contest), arguments.ranks)
    show(
        "step",
        rows,
        table=format_rows(rows),
        legend=_LEGENDS[arguments.device],
        missing=missing,
        path=arguments.json,
    )
    if arguments.plot is not None:
        plot_steps(rows, arguments.plot)
    return 0


def make_cases(models: str, rows: int, device: str = "cpu") -> list[Case]:
    """Return one case per model.

    Raises:
        ParamError: if a model is unknown.
    """
    names = names_of(models, list(MODELS), "--models")
    if not names:
        raise ParamError(f"--models names none; it may be any of {', '.join(MODELS)}.")
    return [
        Case(name=f"step of {name}", settings={"model": name, "rows": rows, "device": device})
        for name in names
    ]


def make_rows(
    cases: Sequence[Case], measured: Mapping[str, Mapping[str, Measurements]], world_size: int
) -> list[dict[str, Any]]:
    """Return one row per case and contender, including ``alone``.

    ``communication_share`` is the share of the step that communication adds to the time of ``alone``.

    Raises:
        CommunicatorError: if a contender left the ranks with different parameters.
    """
    rows = []
    for case in cases:
        times = {name: measure.times for name, measure in measured[case.name].items()}
        alone_s = row_of(case.name, "alone", times)["median_s"]
        for contender, measure in measured[case.name].items():
            if contender != "alone":
                _check_alike(case, contender, measure)
            result = measure.results[0][0]
            common = row_of(case.name, contender, times)
            rows.append(
                {
                    **common,
                    "bytes": result["bytes"],
                    "tensors": result["tensors"],
                    "rows": case.settings["rows"],
                    "ranks": world_size,
                    "communication_share": max(0.0, 1.0 - alone_s / common["median_s"]),
                }
            )
    return rows


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table to print; a ratio is how many times longer a contender takes than one of sparkdl."""
    header = ("case", "contender", "median", "p90", "communication")
    table = []
    for row in rows:
        medians = {other["contender"]: other["median_s"] for other in rows if other["case"] == row["case"]}
        table.append(
            (
                row["case"],
                row["contender"],
                format_time(row["median_s"]),
                format_time(row["p90_s"]),
                f"{100 * row['communication_share']:.1f}%",
                *(
                    f"{row['median_s'] / medians[contender]:.2f}x"
                    for contender in OURS
                    if contender in medians
                ),
            )
        )
    ours = [contender for contender in OURS if any(row["contender"] == contender for row in rows)]
    return format_columns((*header, *(f"{contender} is" for contender in ours)), table)


def _check_alike(case: Case, contender: str, found: Measurements) -> None:
    for results in found.results:
        if len({result["checksum"] for result in results}) > 1:
            raise CommunicatorError(
                f"{contender}, {case.name}: the ranks ended with different parameters, of sums"
                f" {[result['checksum'] for result in results]}."
            )
