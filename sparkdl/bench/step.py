"""``sparkdl bench step``: the time of one training step whose gradients each contender reduces.

Runs where it is called; the ranks are processes on this machine. A step is forward, backward, allreduce and
optimizer. Every time is the time of the slowest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.bench.contenders.step import MODELS
from sparkdl.bench.contest import Case, Measurements, hold, rows_of
from sparkdl.bench.libraries import names_of, require, split_missing
from sparkdl.bench.options import add_common_arguments, check_common_arguments, check_gpus
from sparkdl.bench.report import MEASURED, Columns, multiples_of, plot_steps, show

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
    """Measure, print the table, and write the report that was asked for.

    Raises:
        ParamError: if an option has a value that cannot work.
        RankError: if a contender failed.
        CommunicatorError: if a contender left the ranks with different parameters.
    """
    check_common_arguments(arguments, ranks=2, rows=1)
    require("step", "torch")
    if arguments.device == "cuda":
        check_gpus(arguments.ranks)
    contenders, missing = split_missing(GPU_CONTENDERS if arguments.device == "cuda" else CONTENDERS)
    cases = make_cases(arguments.models, arguments.rows, arguments.device)
    measured = hold(
        "step",
        world_size=arguments.ranks,
        libraries=contenders,
        cases=cases,
        seconds=arguments.seconds,
        num_rounds=3,
        min_repetitions=3,
    )
    rows = make_rows(cases, measured, arguments.ranks)
    legend = _LEGENDS[arguments.device]
    show("step", rows, COLUMNS, arguments, legend=legend, missing=missing, plot=plot_steps)
    return 0


def make_cases(models: str, rows: int, device: str = "cpu") -> list[Case]:
    """Return one case per model.

    Raises:
        ParamError: if a model is unknown.
    """
    return [
        Case(name=f"step of {name}", settings={"model": name, "rows": rows, "device": device})
        for name in names_of(models, MODELS, "--models", least=1)
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
    for case, measurements, row in rows_of(cases, measured):
        if row["contender"] != "alone":
            measurements.check_alike(f"{row['contender']}, {case.name}")
        result = measurements.results[0][0]
        rows.append(
            {
                **row,
                "bytes": result["bytes"],
                "tensors": result["tensors"],
                "rows": case.settings["rows"],
                "ranks": world_size,
                "communication_share": max(0.0, 1.0 - row["ratio"].get("alone", 1.0)),
            }
        )
    return rows


COLUMNS: Columns = (
    *MEASURED,
    ("communication", lambda row: f"{row['communication_share']:.1%}"),
    *multiples_of(OURS),
)
