"""``sparkdl bench fit``: the time that each contender takes from a cached DataFrame to a trained model.

Runs on the *driver*, in a local Spark session of its own with one slot per rank. The session is started before the
measurement. A first fit of every contender on a few rows does the imports of the driver, and is not measured either.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contenders.fit import CONTENDERS, NUM_READERS
from sparkdl.bench.contenders.fit_task import PHASES, FitSize, Fitted, judged_rows, loss_of, make_frame
from sparkdl.bench.contest import Case, announce, hold, in_turn
from sparkdl.bench.libraries import names_of, require, split_missing
from sparkdl.bench.options import add_common_arguments, check_common_arguments
from sparkdl.bench.report import MEASURED, SPARKDL_IS, Columns, Row, row_of, show
from sparkdl.cli.local_session import start_session
from sparkdl.errors import ParamError, TrainingError
from sparkdl.launch.rank.environment import ALLOCATOR_VARIABLES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from pyspark.sql import SparkSession

LIBRARIES = {
    "sparkdl": "fit",
    "distributor": "fit of pyspark",
    "distributor-local": "fit of pyspark",
    "horovod": "fit of horovod",
}
"""Library that each contender needs, by contender."""

OTHERS = [name for name in LIBRARIES if name != "sparkdl"]

ARITHMETIC = "arithmetic"
NUM_ROWS = 1_000_000

_DEFAULT_AGAINST = "distributor,horovod"
_STEPS_OF_OPERATION = 50
_ARITHMETIC_SECONDS = 4.0
_WARM_UP_SHARE = 0.01

_LOSS_TOLERANCE = 1.5
"""Largest accepted ratio of a contender's loss to the best loss: the orders of rows differ."""

_LEGEND = (
    "From the call of fit to the model: an MLP 28-256-256-1, AdamW, batches of 256 rows on a rank, which has one\n"
    "thread. Spark is up, and the DataFrame of 28 float columns cached. writing: until the rows lie in Parquet.\n"
    "launching: from then until the first batch is asked for. returning: after the last step. distributor: pyspark's\n"
    f"TorchDistributor, DistributedDataParallel on Gloo, Petastorm's BatchedDataLoader with {NUM_READERS} workers.\n"
    "distributor-local: the same with local_mode=True. horovod: its TorchEstimator. arithmetic: forward, backward and\n"
    "optimizer of all steps, with no row read and no gradient reduced. loss: on rows of the frame.\n"
    "sparkdl is 0.50x: it takes half as long."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "--against",
        default=_DEFAULT_AGAINST,
        help=f"contenders beside sparkdl, separated by commas, of {', '.join(OTHERS)} (default: %(default)s)",
    )
    add_common_arguments(parser, "ranks", "json")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="fits of each contender (default: %(default)s)")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help=f"how many times {NUM_ROWS:,} rows to fit on (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report that was asked for.

    Raises:
        ParamError: if an option has a value that cannot work.
        RankError: if a rank failed.
        TrainingError: if the models of two contenders differ.
    """
    check_common_arguments(arguments, ranks=1, epochs=1, rounds=1)
    size = FitSize(
        num_rows=round(NUM_ROWS * arguments.scale), num_ranks=arguments.ranks, epochs=arguments.epochs
    )
    if size.num_rows < size.num_ranks * size.batch_size:
        raise ParamError(
            f"--scale {arguments.scale:g} leaves {size.num_rows} rows, and a step of {size.num_ranks} ranks takes "
            f"{size.num_ranks * size.batch_size}; use more."
        )
    against = names_of(arguments.against, OTHERS, "--against")
    require("fit", "fit")
    present, missing = split_missing({name: LIBRARIES[name] for name in ("sparkdl", *against)})
    times = measure_arithmetic(size)
    # The ranks of others inherit these from this process, and keep freed memory as those of sparkdl do.
    os.environ.update({**ALLOCATOR_VARIABLES, **os.environ})
    with (
        tempfile.TemporaryDirectory(prefix="sparkdl-bench-") as folder,
        start_session("sparkdl bench fit", f"local[{size.num_ranks}]", Path(folder)) as spark,
    ):
        fits, losses = measure(spark, size, list(present), arguments.rounds, Path(folder))
    rows = make_rows(size, times, fits, losses)
    show("fit", rows, COLUMNS, arguments, legend=_LEGEND, missing=missing)
    for row in rows:
        if row["parts_s"]:
            parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in row["parts_s"].items())
            print(f"The training of {row['contender']}, on average over the ranks: {parts}.")
    return 0


def measure_arithmetic(size: FitSize) -> list[float]:
    """Return how many seconds the steps of a fit take on the ranks without reading and reducing, per repetition."""
    case = Case(name=ARITHMETIC, settings={"steps": _STEPS_OF_OPERATION, "batch_size": size.batch_size})
    measured = hold(
        "fit",
        world_size=size.num_ranks,
        libraries={ARITHMETIC: "torch"},
        cases=[case],
        seconds=_ARITHMETIC_SECONDS * min(1.0, size.num_rows / NUM_ROWS),
        num_rounds=2,
    )
    times = measured[ARITHMETIC][ARITHMETIC].times
    return [seconds * size.num_steps / _STEPS_OF_OPERATION for seconds in times]


def measure(
    spark: SparkSession,
    size: FitSize,
    contenders: Sequence[str],
    num_rounds: int,
    folder: Path,
) -> tuple[dict[str, list[Fitted]], dict[str, float]]:
    """Fit with each contender in turn, and return the fits and the loss of the last model, by contender.

    Raises:
        TrainingError: if the models of two contenders differ.
    """
    few = replace(
        size, num_rows=max(size.num_ranks * size.batch_size, round(_WARM_UP_SHARE * size.num_rows)), epochs=1
    )
    fit_in_turn(spark, few, contenders, 1, folder / "warm-up")
    fits, rows = fit_in_turn(spark, size, contenders, num_rounds, folder / "fits")
    losses = {name: loss_of(repeats[-1].weights, rows) for name, repeats in fits.items()}
    check_losses(losses)
    return fits, losses


def fit_in_turn(
    spark: SparkSession, size: FitSize, contenders: Sequence[str], num_rounds: int, folder: Path
) -> tuple[dict[str, list[Fitted]], npt.NDArray[np.float32]]:
    """Fit the same frame with each contender in turn, and return the fits and the rows to evaluate the models on."""
    frame = make_frame(spark, size)
    fits: dict[str, list[Fitted]] = {name: [] for name in contenders}
    try:
        for index in range(num_rounds):
            for name in in_turn(contenders, index):
                announce(f"fitting {size.num_rows:,} rows with {name}")
                fit_folder = folder / f"{index}-{name}"
                fit_folder.mkdir(parents=True)
                fits[name].append(CONTENDERS[name](size, frame, fit_folder))
        return fits, judged_rows(frame)
    finally:
        frame.unpersist()


def check_losses(losses: Mapping[str, float]) -> None:
    """Check that the trained models have similar losses.

    Raises:
        TrainingError: if the loss of a model is much larger than that of another one, or is NaN.
    """
    best = min(losses.values())
    for name, loss in losses.items():
        if not loss <= _LOSS_TOLERANCE * best:
            values = ", ".join(f"{other} {value:.4g}" for other, value in losses.items())
            raise TrainingError(
                f"{name} has not trained the same model: the losses are {values}. Its time cannot be compared."
            )


def make_rows(
    size: FitSize,
    arithmetic_times: Sequence[float],
    fits: Mapping[str, Sequence[Fitted]],
    losses: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return one row per contender, and one for the arithmetic.

    ``phases_s`` holds the median seconds of each phase, and ``parts_s`` those of each part of the training.
    """
    times = {ARITHMETIC: list(arithmetic_times)}
    times |= {name: [fit.seconds for fit in repeats] for name, repeats in fits.items()}
    common = [row_of(f"{size.num_rows:,} rows", name, times) for name in times]
    return [
        {
            **row,
            "rows": size.num_rows,
            "epochs": size.epochs,
            "rows_per_s": size.num_rows * size.epochs / row["median_s"],
            "phases_s": {
                phase: statistics.median(fit.phases[phase] for fit in fits[row["contender"]])
                for phase in (PHASES if row["contender"] in fits else ())
            },
            "parts_s": {
                part: statistics.median(fit.parts[part] for fit in fits[row["contender"]])
                for part in (fits[row["contender"]][0].parts if row["contender"] in fits else ())
            },
            "loss": losses.get(row["contender"]),
        }
        for row in common
    ]


def _seconds_of(phase: str) -> Callable[[Row], str]:
    return lambda row: f"{row['phases_s'][phase]:.2f} s" if row["phases_s"] else ""


COLUMNS: Columns = (
    *MEASURED[1:],
    *((phase, _seconds_of(phase)) for phase in PHASES),
    ("loss", lambda row: "" if row["loss"] is None else f"{row['loss']:.4f}"),
    SPARKDL_IS,
)
