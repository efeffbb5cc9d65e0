"""The rows of a job: its DataFrame, how many there are and how large. Runs on the *driver*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.data.spark.columns import check_types, is_vector, quoted
from sparkdl.data.spark.jobs import spark_job
from sparkdl.data.spark.plan import lasting_key
from sparkdl.errors import DataError, JobFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.jobs.job import Job

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
