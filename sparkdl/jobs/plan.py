"""The plan of a job: rows, shards, steps, memory, ranks per host, and the text that ``--dry-run`` prints.

:func:`open_rows` returns the DataFrame of a source; :func:`count_rows` counts its rows and samples their size.
``--dry-run`` counts the rows and starts all ranks once without training, to measure the hosts. :func:`plan_text`
formats the plan, one fact per line.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.cores import threads_of_local_rank, usable_cores
from sparkdl.data.dataset.footers import urls_for_spark
from sparkdl.data.feed.shards import rows_per_rank, steps_per_epoch
from sparkdl.data.files.threads import READ_AHEAD_BYTES
from sparkdl.data.spark.columns import check_types, is_vector, quote
from sparkdl.data.spark.reading import reading_job
from sparkdl.data.spark.rows_key import lasting_key
from sparkdl.errors import DataError, JobFileError, count_of, list_names
from sparkdl.estimators.fit.split import RowCounts, validation_column
from sparkdl.estimators.params.training import num_readers
from sparkdl.host_memory import available_bytes, in_bytes
from sparkdl.identity import as_checksum
from sparkdl.launch import run_on_ranks
from sparkdl.spark.jobs import jobs_of
from sparkdl.training.update import updates_per_epoch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.jobs.job import DataSource, TrainingJob
    from sparkdl.jobs.make_estimator import ModelSize
    from sparkdl.launch import RankContext


_SAMPLE_ROWS = 256

PYTHON_BYTES = 512 << 20
"""Memory of a rank before it has a model: Python with torch on a CPU."""


def open_rows(source: DataSource, spark: SparkSession) -> DataFrame:
    """Return the DataFrame of a source of rows.

    Raises:
        JobFileError: if Spark cannot find the source or parse the query; names the line.
    """
    from pyspark.errors import AnalysisException, ParseException

    try:
        with reading_job(spark, "opening the rows"):
            if source.kind == "table":
                frame = spark.table(str(source.value))
            elif source.kind == "parquet":
                frame = spark.read.parquet(*(url for path in source.value for url in urls_for_spark(path)))
            else:
                frame = spark.sql(str(source.value))
            frame.columns  # noqa: B018 - makes Spark Connect analyze it
    except (AnalysisException, ParseException) as error:
        what = str(error).strip().split("\n")[0].rstrip(".;")
        raise JobFileError(
            f"{source.position}: {source.section}.{source.kind}: Spark cannot read it: {what}."
        ) from error
    return frame


def key_of_rows(source: DataSource, frame: DataFrame, columns: Sequence[str]) -> str | None:
    """Return a checksum of rows that is valid in all Spark applications; None if Spark cannot identify them."""
    values = [source.value] if isinstance(source.value, str) else list(source.value)
    key = lasting_key(frame.select(*map(quote, columns)), [source.kind, *values])
    return None if key is None else as_checksum(key)


def count_rows(frame: DataFrame, columns: Sequence[str], indicator: str | None) -> RowCounts:
    """Count rows and sample their size.

    Args:
        frame: DataFrame with the rows.
        columns: names of the columns that a fit reads.
        indicator: name of the column of booleans that marks the rows for validation; None if there is none.

    Raises:
        DataError: if a fit cannot read a column, or there are no rows.
    """
    from pyspark.sql import functions as F

    check_types(frame.schema, columns)
    counts = [F.count(F.lit(1))]
    if indicator is not None:
        if frame.schema[indicator].dataType.typeName() != "boolean":
            raise DataError(f"Column {indicator!r} must be of booleans, as it marks rows for validation.")
        counts.append(F.count_if(F.col(quote(indicator))))
    with reading_job(frame.sparkSession, "counting rows"):
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
        vector_to_array(F.col(quote(name))) if is_vector(frame.schema[name].dataType) else F.col(quote(name))
        for name in columns
    ]
    # Renamed to numbers, as mapInArrow of classic Spark fails on dots in names.
    sample = frame.limit(_SAMPLE_ROWS).select(
        *[column.alias(f"c{index}") for index, column in enumerate(plain)]
    )
    with reading_job(frame.sparkSession, "measuring rows"):
        sizes: Any = sample.mapInArrow(_measure, "num_rows long, num_bytes long").collect()
    return float(sum(row["num_bytes"] for row in sizes) / sum(row["num_rows"] for row in sizes))


def _measure(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the number of rows and bytes of each batch; runs on the executors."""
    import pyarrow as pa

    for batch in batches:
        yield pa.RecordBatch.from_pydict({"num_rows": [batch.num_rows], "num_bytes": [batch.nbytes]})


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host on which ranks were started.

    Attributes:
        name: host name.
        ranks: ranks on the host.
        available_bytes: free memory while the ranks ran; None if Linux does not report it.
        num_cores: number of cores that each rank may use.
        num_threads: number of threads in which each rank computes.
    """

    name: str
    ranks: tuple[int, ...]
    available_bytes: int | None
    num_cores: int
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The plan of a fit.

    Attributes:
        rows: counts of the rows.
        num_training: number of rows for training.
        is_exact: whether ``num_training`` is exact: rows for validation are not drawn at random, and rows are counted.
        shards: number of rows of each rank; ranks that read the same rows count as one.
        steps: number of steps per epoch.
        updates: number of updates of the weights per epoch.
        epochs: number of epochs of the fit.
        batch_size: number of rows per rank and step.
        model: memory of the model on each rank; None if the rows determine the model.
        hosts: hosts on which the ranks were started.
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
        """Bytes of all rows when decoded."""
        return round(self.rows.num_rows * self.rows.bytes_per_row)

    @property
    def read_ahead_bytes(self) -> int:
        """Maximal bytes of rows that a rank holds at once; a row group counts twice while it is decoded."""
        return min(2 * self.rows_bytes, READ_AHEAD_BYTES)


def make_plan(
    params: Any,
    frame: DataFrame,
    columns: list[str],
    model: ModelSize | None,
    rows: RowCounts | None = None,
) -> JobPlan:
    """Return the plan of a fit.

    Args:
        params: Params of the fit.
        frame: DataFrame with the rows of the job.
        columns: names of the columns that the fit reads.
        model: memory of the model on each rank; None if the rows determine the model.
        rows: counts of the rows that the fit makes from the rows of the job; None if it trains on the latter.

    Raises:
        DataError: if the rows cannot be used.
        ShardingError: if there are fewer rows than ranks.
        LaunchError: if the ranks cannot be started.
    """
    fraction = params.getValidationFraction()
    rows = rows or count_rows(frame, columns, validation_column(params))
    left_out = rows.num_marked or round(rows.num_rows * (fraction or 0.0))
    num_training, readers = rows.num_rows - left_out, num_readers(params)
    steps = steps_per_epoch(num_training, readers, params.getBatchSize())
    return JobPlan(
        rows=rows,
        num_training=num_training,
        is_exact=rows.is_exact and fraction is None,
        shards=tuple(rows_per_rank(num_training, readers)),
        steps=steps,
        updates=updates_per_epoch(steps, params.getGradientAccumulationSteps()),
        epochs=params.getEpochs(),
        batch_size=params.getBatchSize(),
        model=model,
        hosts=_start_ranks(params, frame),
    )


def _start_ranks(params: Any, frame: DataFrame) -> tuple[Host, ...]:
    with jobs_of("examining hosts"):
        descriptions = run_on_ranks(
            _describe_host,
            num_ranks=params.getNumWorkers(),
            spark=frame.sparkSession,
            transport=params.getTransport(),
            wire=params.getWire(),
            gpus_per_rank=params.getGpusPerWorker(),
            threads_per_rank=params.getThreadsPerWorker(),
        )
    hosts = []
    for index in sorted({description["host"] for description in descriptions}):
        ranks = tuple(rank for rank, description in enumerate(descriptions) if description["host"] == index)
        first = descriptions[ranks[0]]
        sizes = [descriptions[rank]["available_bytes"] for rank in ranks]
        known = [size for size in sizes if size is not None]
        hosts.append(
            Host(
                name=first["name"],
                ranks=ranks,
                available_bytes=min(known) if known else None,
                num_cores=first["num_cores"],
                num_threads=first["num_threads"],
            )
        )
    return tuple(hosts)


def _describe_host(context: RankContext) -> dict[str, Any]:
    """Describe the host of a rank; runs on the *rank*."""
    return {
        "host": context.topology.host,
        "name": socket.gethostname(),
        "available_bytes": available_bytes(),
        "num_cores": usable_cores(),
        "num_threads": threads_of_local_rank(context.topology.local_size),
    }


def plan_text(job: TrainingJob, plan: JobPlan, columns: list[str], state: str, *, what: str = "") -> str:
    """Return the text that ``--dry-run`` prints.

    Args:
        job: the job.
        plan: plan of the job.
        columns: names of the columns that the fit reads.
        state: state of the output, as text.
        what: word for rows that the fit makes from the rows of the job, such as ``packed``; empty if it makes none.
    """
    about = "" if plan.rows.is_exact else "about "
    shards = sorted({min(plan.shards), max(plan.shards)})
    lines = [
        ("job", f"{job.file.name}: {job.estimator}"),
        (
            "rows",
            f"{' '.join(filter(None, (f'{about}{plan.rows.num_rows:,}', what)))} of {job.data}; {_training(plan)}",
        ),
        *([] if job.test is None else [("test", f"rows of {job.test}, after the training")]),
        ("columns", f"{list_names(columns)}: {about}{in_bytes(plan.rows_bytes)} when decoded"),
        ("ranks", _ranks(plan)),
        ("shards", f"{about}{' or '.join(f'{size:,}' for size in shards)} rows per rank and epoch"),
        ("steps", _steps(plan)),
        ("model", _model(plan)),
        ("memory", _memory(plan)),
        *(("host", _host(plan, index)) for index in range(len(plan.hosts))),
        ("overhead", _overhead(plan)),
        ("output", state),
    ]
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


def _training(plan: JobPlan) -> str:
    validation = plan.rows.num_rows - plan.num_training
    if not validation:
        return "all for training"
    about = "" if plan.is_exact else "about "
    return f"{about}{plan.num_training:,} for training, {about}{validation:,} for validation"


def _ranks(plan: JobPlan) -> str:
    num_ranks, num_readers = sum(len(host.ranks) for host in plan.hosts), len(plan.shards)
    if num_ranks == num_readers:
        return f"{num_ranks}, with {plan.batch_size} rows each per step"
    return f"{num_ranks}, in groups of {num_ranks // num_readers} that read the same rows, {plan.batch_size} per step"


def _steps(plan: JobPlan) -> str:
    about = "" if plan.is_exact else "about "
    updates = "" if plan.updates == plan.steps else f", {plan.updates:,} updates of the weights"
    all_steps = f"{plan.steps * plan.epochs:,} in {count_of(plan.epochs, 'epoch')}"
    return f"{about}{plan.steps:,} per epoch{updates}; {about}{all_steps}"


def _model(plan: JobPlan) -> str:
    size = plan.model
    if size is None:
        return "size not known before the fit, as the rows determine the model"
    optimizer = "of unknown size" if size.optimizer is None else in_bytes(size.optimizer)
    return (
        f"{size.num_parameters:,} parameters: weights {in_bytes(size.weights)}, gradients {in_bytes(size.gradients)}, "
        f"optimizer {optimizer}"
    )


def _memory(plan: JobPlan) -> str:
    model = (
        "the model" if plan.model is None else f"model, gradients and optimizer {in_bytes(plan.model.total)}"
    )
    return (
        f"of each rank: {model}, rows read ahead up to {in_bytes(plan.read_ahead_bytes)}; in addition Python with "
        "torch, and the activations of a step"
    )


def _overhead(plan: JobPlan) -> str:
    """Return the setting for the ranks of the fullest host, by the formula of ``docs/deploy.md``."""
    num_ranks = max(len(host.ranks) for host in plan.hosts)
    of_rank = PYTHON_BYTES + plan.read_ahead_bytes + (plan.model.total if plan.model else 0)
    without = (
        "the model, " if plan.model is None else "the optimizer, " if plan.model.optimizer is None else ""
    )
    return (
        f"spark.executor.memoryOverhead={math.ceil(num_ranks * of_rank / 2**20)}m on YARN or Kubernetes, for "
        f"{count_of(num_ranks, 'rank')} of a host in one executor; in addition {without}the "
        "activations of a step, the size of /dev/shm, and Spark's own default, 10 % of spark.executor.memory and at "
        "least 384m"
    )


def _host(plan: JobPlan, index: int) -> str:
    host = plan.hosts[index]
    num = len(host.ranks)
    free = "" if host.available_bytes is None else f", {in_bytes(host.available_bytes)} of free memory"
    needed = num * (plan.read_ahead_bytes + (plan.model.total if plan.model else 0))
    short = ""
    if host.available_bytes is not None and needed > host.available_bytes:
        short = f": less than the {in_bytes(needed)} that these need"
    numbers = ", ".join(map(str, host.ranks))
    return (
        f"{host.name}: {count_of(num, 'rank')} ({numbers}) on {host.num_cores} cores, with "
        f"{count_of(host.num_threads, 'thread')}{' each' if num > 1 else ''}{free}{short}"
    )
