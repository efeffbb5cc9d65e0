"""``sparkdl bench transform``: the time to predict the rows of a DataFrame by TorchModel and Spark's predict_batch_udf.

Runs where it is called, in a Spark session of its own with ``--slots`` slots. All contenders score the same cached
DataFrame with the same network in the same session, in turn; Spark discards the predictions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contest import announce, take_turns
from sparkdl.bench.libraries import names_of, require
from sparkdl.bench.options import add_common_arguments, check_common_arguments
from sparkdl.bench.report import MEASURED, SPARKDL_IS, Columns, row_of, show, time_of
from sparkdl.cli.local_session import start_session
from sparkdl.errors import ParamError
from sparkdl.spark.jobs import jobs_of, named_jobs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


CASES = ("28 columns", "array of 28", "images")

_CONTENDER = "SPARKDL_BENCH_CONTENDER"
_TOLERANCE = 1e-3

_LEGEND = (
    "A network 28-64-64-1 on doubles in 28 columns or in one column of arrays, and two convolutions on images of\n"
    "3 x 32 x 32 bytes. One thread per task, the same cached DataFrame, all its columns kept. predict_batch_udf gets\n"
    "28 columns as F.array, which it stacks, or as F.struct, in batches of 10,000, in which it was fastest.\n"
    "mapInArrow hands all columns back with the module's outputs as one more, and checks nothing.\n"
    "Each contender has Python workers of its own. processor: time of all threads of Spark and its workers.\n"
    "sparkdl is 0.50x: it takes half as long."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "--cases",
        default=",".join(CASES),
        help="what to score, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--slots", type=int, default=2, help="tasks that run at once, a thread each (default: %(default)s)"
    )
    add_common_arguments(parser, "seconds", "scale", "json", seconds=20.0)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report that was asked for.

    Raises:
        ParamError: if an option has a value that cannot work, or a library is missing.
    """
    check_common_arguments(arguments, slots=1)
    names = names_of(arguments.cases, CASES, "--cases", least=1)
    require("transform", "spark", "torch")
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="sparkdl-bench-") as folder,
        start_session(
            "sparkdl bench transform", f"local[{arguments.slots}]", Path(folder), driver_memory="4g"
        ) as spark,
    ):
        for name in names:
            announce(f"measuring {name}")
            with jobs_of("bench transform"), named_jobs(spark, name):
                rows += measure_case(spark, name, arguments)
    show("transform", rows, COLUMNS, arguments, legend=_LEGEND, missing={})
    return 0


def measure_case(spark: SparkSession, name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all contenders at a case, and return one row per contender.

    Raises:
        ParamError: if the predictions of contenders differ.
    """
    from sparkdl.bench.contenders.transform import TASKS

    task = TASKS[name]
    num_rows = max(1, round(task.num_rows * arguments.scale))
    frame = task.table(spark, num_rows, 2 * arguments.slots).cache()
    try:
        frame.count()
        scored = {
            contender: in_own_workers(spark, contender, partial(transform, frame))
            for contender, transform in task.contenders().items()
        }
        check_alike(name, {contender: _total(frame) for contender, frame in scored.items()})
        writers = {
            contender: frame.write.format("noop").mode("overwrite") for contender, frame in scored.items()
        }
        times, spent = take_turns(
            {contender: writer.save for contender, writer in writers.items()}, arguments.seconds
        )
    finally:
        frame.unpersist()
    return make_rows(name, num_rows, times, spent)


def in_own_workers(spark: SparkSession, contender: str, transform: Callable[[], DataFrame]) -> DataFrame:
    """Return the scored DataFrame of a contender, whose functions run in Python workers of their own.

    Spark reuses Python workers among functions with the same environment. pyspark records the environment when a
    function is first applied, within ``transform``. So changes that a contender makes to its process affect no other.
    """
    environment: dict[str, str] = spark.sparkContext.environment
    environment[_CONTENDER] = contender
    try:
        return transform()
    finally:
        del environment[_CONTENDER]


def _total(scored: DataFrame) -> float:
    from pyspark.sql import functions as F

    (row,) = scored.agg(F.sum("prediction")).collect()
    return float(row[0])


def check_alike(name: str, totals: Mapping[str, float]) -> None:
    """Check that all contenders have computed the same predictions.

    Raises:
        ParamError: if the sums of their predictions differ.
    """
    first, *others = totals.values()
    if any(abs(other - first) > _TOLERANCE * max(1.0, abs(first)) for other in others):
        raise ParamError(f"{name}: the predictions of contenders add up to different sums: {dict(totals)}.")


def make_rows(
    name: str, num_rows: int, times: Mapping[str, Sequence[float]], spent: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """Return one row per contender; ``processor_s`` is the time of all threads of Spark and its Python workers."""
    return [
        {
            **(row := row_of(name, contender, times)),
            "rows": num_rows,
            "rows_per_s": num_rows / row["median_s"],
            "processor_s": statistics.median(spent[contender]),
        }
        for contender in times
    ]


COLUMNS: Columns = (
    *MEASURED,
    ("rows/s", lambda row: f"{row['rows_per_s']:,.0f}"),
    ("processor", time_of("processor_s")),
    SPARKDL_IS,
)
