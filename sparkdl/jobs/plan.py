"""The plan of a job: rows, shards, steps, memory, ranks per host, and the text that ``--dry-run`` prints.

:func:`open_rows` returns the DataFrame of a job; :func:`count_rows` counts its rows and samples their size.
``--dry-run`` counts the rows and starts all ranks once, without training, so that what it says of hosts was measured,
not computed. :func:`plan_text` writes one fact a line.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.data.dataset.shards import rows_per_rank, steps_per_epoch
from sparkdl.data.files.threads import READ_AHEAD_BYTES
from sparkdl.data.spark.columns import check_types, is_vector, quoted
from sparkdl.data.spark.jobs import jobs_of, spark_job
from sparkdl.data.spark.plan import lasting_key
from sparkdl.errors import DataError, JobFileError
from sparkdl.estimators.fit.split import validation_column
from sparkdl.launch import run_on_ranks
from sparkdl.training.update import updates_per_epoch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.jobs.job import Job
    from sparkdl.jobs.make_estimator import ModelSize
    from sparkdl.launch import RankContext


_SAMPLE_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """How many rows there are, and how large they are in memory.

    Attributes:
        num_rows: all of them.
        num_marked: those in which the column is true that marks rows to validate on; None where there is none.
        bytes_per_row: of the columns that are read, on average over the first rows.
    """

    num_rows: int
    num_marked: int | None
    bytes_per_row: float


def open_rows(job: Job, spark: SparkSession) -> DataFrame:
    """Return the DataFrame of a job.

    Raises:
        JobFileError: naming the line, if Spark cannot find it or does not understand the query.
    """
    source = job.data
    try:
        with spark_job(spark, "opening the rows"):
            if source.kind == "table":
                frame = spark.table(str(source.value))
            elif source.kind == "parquet":
                frame = spark.read.parquet(*source.value)
            else:
                frame = spark.sql(str(source.value))
            frame.columns  # noqa: B018 - has Spark Connect look at it
    except Exception as error:
        if type(error).__name__ not in ("AnalysisException", "ParseException"):
            raise
        what = str(error).strip().split("\n")[0].rstrip(".;")
        raise JobFileError(f"{source.place}: data.{source.kind}: Spark cannot read it: {what}.") from error
    return frame


def key_of_rows(frame: DataFrame, columns: Sequence[str]) -> str | None:
    """Return what tells rows from others, also in another application; None where Spark cannot tell."""
    return lasting_key(frame.select(*map(quoted, columns)))


def count_rows(frame: DataFrame, columns: Sequence[str], indicator: str | None) -> RowCounts:
    """Count rows and sample how large they are.

    Args:
        frame: the rows.
        columns: that a fit reads.
        indicator: column of booleans that marks the rows to validate on, if there is one.

    Raises:
        DataError: if a column cannot be read by a fit, or there are no rows.
    """
    from pyspark.sql import functions as F

    check_types(frame.schema, columns)
    counts = [F.count(F.lit(1))]
    if indicator is not None:
        if frame.schema[indicator].dataType.typeName() != "boolean":
            raise DataError(f"Column {indicator!r} has to say true or false of each row.")
        counts.append(F.count_if(F.col(quoted(indicator))))
    with spark_job(frame.sparkSession, "counting rows"):
        (row,) = frame.agg(*counts).collect()
    if not row[0]:
        raise DataError("There are no rows.")
    return RowCounts(
        num_rows=row[0],
        num_marked=row[1] if indicator is not None else None,
        bytes_per_row=_bytes_per_row(frame, columns),
    )


def _bytes_per_row(frame: DataFrame, columns: Sequence[str]) -> float:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    plain = [
        vector_to_array(F.col(quoted(name)))
        if is_vector(frame.schema[name].dataType)
        else F.col(quoted(name))
        for name in columns
    ]
    # Numbered, as mapInArrow of classic Spark trips over dots in names.
    sample = frame.limit(_SAMPLE_ROWS).select(*[each.alias(f"c{index}") for index, each in enumerate(plain)])
    with spark_job(frame.sparkSession, "measuring rows"):
        sizes: Any = sample.mapInArrow(_measure, "num_rows long, num_bytes long").collect()
    return float(sum(each["num_bytes"] for each in sizes) / sum(each["num_rows"] for each in sizes))


def _measure(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """How many rows and bytes a task has; runs on an executor."""
    import pyarrow as pa

    for batch in batches:
        yield pa.RecordBatch.from_pydict({"num_rows": [batch.num_rows], "num_bytes": [batch.nbytes]})


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host on which ranks were started.

    Attributes:
        name: that it calls itself by.
        ranks: their numbers.
        available_bytes: memory that was free there while they ran; None where Linux does not tell.
        num_cores: that each of them may use.
    """

    name: str
    ranks: tuple[int, ...]
    available_bytes: int | None
    num_cores: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a job will do.

    Attributes:
        rows: counts of the rows.
        num_training: rows that are trained on.
        is_exact: whether that is certain; rows that are drawn by lot come out a little more or fewer.
        shards: rows of each rank.
        steps: of an epoch.
        updates: of the weights, in an epoch.
        epochs: of the fit.
        batch_size: rows of a rank in a step.
        model: what the model takes on each rank; None for one that is made of the rows.
        hosts: on which the ranks were started.
    """

    rows: RowCounts
    num_training: int
    is_exact: bool
    shards: tuple[int, ...]
    steps: int
    updates: int
    epochs: int
    batch_size: int
    model: ModelSize | None
    hosts: tuple[Host, ...]

    @property
    def rows_bytes(self) -> int:
        """What all rows take, decoded."""
        return round(self.rows.num_rows * self.rows.bytes_per_row)

    @property
    def read_ahead_bytes(self) -> int:
        """What a rank holds of them at most: each row group counts twice while it is decoded."""
        return min(2 * self.rows_bytes, READ_AHEAD_BYTES)

    @property
    def rank_bytes(self) -> int:
        """What a rank takes, as far as that is known before it trains."""
        return self.read_ahead_bytes + (self.model.total if self.model else 0)


def make_plan(estimator: Any, frame: DataFrame, columns: list[str], model: ModelSize | None) -> Plan:
    """Return the plan of a fit.

    Args:
        estimator: with checked Params.
        frame: the rows.
        columns: that the fit reads.
        model: what the model takes on each rank, where there is one already.

    Raises:
        DataError: if the rows cannot be used.
        ShardingError: if there are fewer of them than ranks.
        LaunchError: if the ranks cannot be started.
    """
    params = estimator.params_of_fit()
    fraction = params.getValidationFraction()
    rows = count_rows(frame, columns, validation_column(params))
    left_out = rows.num_marked or round(rows.num_rows * (fraction or 0.0))
    num_training, num_ranks = rows.num_rows - left_out, params.getNumWorkers()
    steps = steps_per_epoch(num_training, num_ranks, params.getBatchSize())
    return Plan(
        rows=rows,
        num_training=num_training,
        is_exact=fraction is None,
        shards=tuple(rows_per_rank(num_training, num_ranks)),
        steps=steps,
        updates=updates_per_epoch(steps, params.getGradientAccumulationSteps()),
        epochs=params.getEpochs(),
        batch_size=params.getBatchSize(),
        model=model,
        hosts=_start_ranks(params, frame),
    )


def _start_ranks(params: Any, frame: DataFrame) -> tuple[Host, ...]:
    with jobs_of("looking at hosts"):
        told = run_on_ranks(
            _describe_place,
            num_ranks=params.getNumWorkers(),
            spark=frame.sparkSession,
            transport=params.getTransport(),
            wire=params.getWire(),
            gpus_per_rank=params.getGpusPerWorker(),
        )
    hosts = []
    for index in sorted({place["host"] for place in told}):
        ranks = tuple(rank for rank, place in enumerate(told) if place["host"] == index)
        first = told[ranks[0]]
        known = [told[rank]["available_bytes"] for rank in ranks if told[rank]["available_bytes"] is not None]
        hosts.append(
            Host(
                name=first["name"],
                ranks=ranks,
                available_bytes=min(known) if known else None,
                num_cores=first["num_cores"],
            )
        )
    return tuple(hosts)


def _describe_place(context: RankContext) -> dict[str, Any]:
    """What a rank sees of its host; runs on a rank."""
    return {
        "host": context.topology.host,
        "name": socket.gethostname(),
        "available_bytes": _available_bytes(),
        "num_cores": len(os.sched_getaffinity(0)),
    }


def _available_bytes() -> int | None:
    """Memory that is free for programs, also within the limit of a container."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass  # no such file outside of a container with limits, or before cgroup v2
    return min(found) if found else None


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plan_text(job: Job, plan: Plan, columns: list[str], state: str) -> str:
    """Return what ``--dry-run`` prints.

    Args:
        job: the job.
        plan: what it will do.
        columns: that the fit reads.
        state: of the output, in words.
    """
    lines = [
        ("job", f"{job.file.name}: {job.estimator}"),
        ("rows", f"{plan.rows.num_rows:,} of {job.data}; {_training(plan)}"),
        ("columns", f"{', '.join(columns)}: {in_bytes(plan.rows_bytes)} when decoded"),
        ("ranks", f"{len(plan.shards)}, {plan.batch_size} rows each in a step"),
        ("shards", f"{_span(plan.shards)} rows for each rank and epoch"),
        ("steps", _steps(plan)),
        ("model", _model(plan)),
        ("memory", _memory(plan)),
        *(("host", _host(plan, index)) for index in range(len(plan.hosts))),
        ("output", state),
    ]
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


def in_bytes(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def _training(plan: Plan) -> str:
    validation = plan.rows.num_rows - plan.num_training
    if not validation:
        return "all are trained on"
    about = "" if plan.is_exact else "about "
    return f"{about}{plan.num_training:,} to train on, {about}{validation:,} to validate on"


def _span(shards: tuple[int, ...]) -> str:
    least, most = min(shards), max(shards)
    return f"{least:,}" if least == most else f"{least:,} or {most:,}"


def _steps(plan: Plan) -> str:
    about = "" if plan.is_exact else "about "
    updates = "" if plan.updates == plan.steps else f", {plan.updates:,} updates of the weights"
    epochs = f"{plan.epochs:,} epoch{'s' if plan.epochs > 1 else ''}"
    return f"{about}{plan.steps:,} in an epoch{updates}; {about}{plan.steps * plan.epochs:,} in {epochs}"


def _model(plan: Plan) -> str:
    size = plan.model
    if size is None:
        return "is made of the rows when the fit begins, so its size is not known yet"
    optimizer = "of unknown size" if size.optimizer is None else in_bytes(size.optimizer)
    return (
        f"{size.num_parameters:,} parameters: weights {in_bytes(size.weights)}, gradients {in_bytes(size.gradients)}, "
        f"optimizer {optimizer}"
    )


def _memory(plan: Plan) -> str:
    model = (
        "the model" if plan.model is None else f"model, gradients and optimizer {in_bytes(plan.model.total)}"
    )
    return (
        f"of each rank: {model}, rows read ahead up to {in_bytes(plan.read_ahead_bytes)}; beside that Python with "
        "torch, and what layers compute for a step"
    )


def _host(plan: Plan, index: int) -> str:
    host = plan.hosts[index]
    num = len(host.ranks)
    free = "" if host.available_bytes is None else f", {in_bytes(host.available_bytes)} of memory free"
    short = ""
    if host.available_bytes is not None and num * plan.rank_bytes > host.available_bytes:
        short = f": too little for {in_bytes(num * plan.rank_bytes)}"
    numbers = ", ".join(map(str, host.ranks))
    return (
        f"{host.name}: {num} rank{'s' if num > 1 else ''} ({numbers}) on {host.num_cores} cores{free}{short}"
    )
