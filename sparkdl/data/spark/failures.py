"""Short errors for Spark jobs that failed to read or write rows, without Java stack traces.

Spark does not always say which row group and column of a Parquet file are damaged, and never briefly. The driver
therefore reads the file that Spark names again, if it can.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow.parquet as pq

from sparkdl import errors
from sparkdl.data.dataset.legacy_parquet import ParquetDatasetPiece
from sparkdl.data.dataset.reading_errors import reading_error
from sparkdl.data.files.failures import describe_java_reading_failure
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.spark.executor_python import executor_python_problem
from sparkdl.data.spark.spark_errors import (
    has_application_ended,
    spark_words,
    was_cancelled,
    were_executors_lost,
)
from sparkdl.errors import (
    ClusterLostError,
    CorruptFileError,
    DataError,
    FileVanishedError,
    LaunchCancelledError,
    LaunchError,
    SparkdlError,
    SparkJobError,
    StoreAccessError,
    StoreError,
    WorkersLostError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

_FILE = re.compile(r"Encountered error while reading file (\S+?)\.?(?:\s|$)")
_GONE = re.compile(r"SparkFileNotFoundException: File (.+?) does not exist")  # as Spark 3.5 says it
_OWN_ERROR = re.compile(r"^sparkdl\.errors\.(\w+): (.+?)\s*$", re.MULTILINE)
_CAUSE = re.compile(r"^Caused by: (.+)$", re.MULTILINE)
_JAVA_CLASSES = re.compile(r"^(?:[\w.$]+: )*")
# Classes with a colon, as at the head of an exception: the stack frames below it may name them for any failure.
_NOT_FOUND = re.compile(
    r"FAILED_READ_FILE\.FILE_NOT_EXIST|SparkFileNotFoundException:|java\.io\.FileNotFoundException:(?!.*\(Permission)"
)
_DAMAGED = (
    "FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER",
    "org.apache.parquet.io.ParquetDecodingException:",
    # Messages of Parquet and Snappy whose exceptions have no class of their own.
    "is not a Parquet file",
    "could not read page",
    "FAILED_TO_UNCOMPRESS",
    "CRC checksum",
)

_NO_CONNECTOR = re.compile(
    r"No FileSystem for scheme \W?(\w+)|Class (?:org\.apache|com\.google\.cloud)\.hadoop\.fs\.(\w+)\S+ not found"
)
_AWS, _AZURE = "org.apache.hadoop:hadoop-aws", "org.apache.hadoop:hadoop-azure"
_CONNECTORS = {
    **dict.fromkeys(("s3", "s3a", "s3n"), f"{_AWS} (URLs then begin with s3a:)"),
    **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs", "azure", "azurebfs"), _AZURE),
    **dict.fromkeys(("gs", "gcs"), "com.google.cloud.bigdataoss:gcs-connector"),
}
"""Packages with Hadoop's connectors, by the scheme of URLs or the package of the connector's class."""

# Exceptions whose class says nothing; all others of pyspark are conditions of the query that users know.
_RAW_OF_CONNECT = frozenset(
    {"SparkConnectException", "SparkConnectGrpcException", "SparkException", "UnknownException"}
)


@contextmanager
def spark_failures_named(
    spark: SparkSession, columns: Sequence[str] | None = None, *, doing: str = "sparkdl"
) -> Iterator[None]:
    """Convert failures of the Spark jobs that a block runs to errors that say what was wrong.

    Args:
        spark: the session.
        columns: names of the columns that are read from files; by default all.
        doing: purpose of the jobs, for the message.

    Raises:
        LaunchError: if the executors' Python lacks what is needed.
        DataError: if a file cannot be read, with a class that says why; or, like StoreError, if a function of sparkdl
            raised it on an executor.
        StoreError: if Spark lacks Hadoop's connector for a URL.
        WorkersLostError: if Python workers or executors were lost, more often than Spark tries a task.
        LaunchCancelledError: if the job was cancelled.
        ClusterLostError: if Spark's application ended.
        SparkJobError: if the job failed for another reason that py4j or gRPC reports.
        Exception: a condition of the query with a class of pyspark, as Spark raised it.
    """
    try:
        yield
    except SparkdlError:
        raise
    except Exception as error:
        problem = executor_python_problem(error, spark)
        if problem:
            raise LaunchError(problem) from error
        own = _own_error(error)
        if own is not None:
            raise own from error
        named = _FILE.search(str(error)) or _GONE.search(str(error))
        if named is not None:
            raise _file_error(unquote(named[1]), str(error), columns) from error
        lacking = _NO_CONNECTOR.search(str(error))
        if lacking is not None:
            raise _connector_error(lacking[1] or lacking[2], error, doing) from error
        if _is_raw(error):
            raise _job_error(error, spark, doing) from error
        raise


def _own_error(error: Exception) -> SparkdlError | None:
    """Return the error of sparkdl's function on an executor, which Spark reports as text; None for other failures."""
    if type(error).__name__ != "PythonException":
        return None
    *_, last = _OWN_ERROR.findall(str(error)) or [("", "")]
    kind = getattr(errors, last[0], None)
    if isinstance(kind, type) and issubclass(kind, (DataError, StoreError)):
        return kind(last[1])
    return None


def _is_raw(error: Exception) -> bool:
    library = type(error).__module__.split(".")[0]
    return library in ("py4j", "grpc") or (library == "pyspark" and type(error).__name__ in _RAW_OF_CONNECT)


def _job_error(error: Exception, spark: SparkSession, doing: str) -> SparkdlError:
    words = spark_words(error)
    if has_application_ended(error, spark):
        return ClusterLostError(f"{doing}: Spark's application ended meanwhile: {words}")
    # Checked before a cancellation, because Spark also cancels the other tasks of a job that fails.
    if were_executors_lost(error):
        once = ""
        if _is_tried_once(spark):
            once = " With the master local[N] Spark tries no task again; local[N, 4] has it tried four times."
        return WorkersLostError(
            f"{doing}: a Python worker or executor was lost: {words}. Often the machine had no memory left for it: "
            "look at the executors' logs, give them more (spark.executor.memoryOverhead) or make the DataFrame's "
            f"partitions smaller, and run it again.{once}"
        )
    if was_cancelled(error):
        return LaunchCancelledError(f"{doing}: the job was cancelled in Spark: {words}")
    return SparkJobError(
        f"{doing}: the Spark job failed: {words}. Spark's exception is the cause of this one."
    )


def _connector_error(name: str, error: Exception, doing: str) -> StoreError:
    package = _CONNECTORS.get(name, "that has it")
    return StoreError(
        f"{doing}: Spark lacks Hadoop's connector for this filesystem: {spark_words(error)}. Start Spark with the "
        f"package {package} in spark.jars.packages, in the version of Spark's Hadoop libraries."
    )


def _is_tried_once(spark: SparkSession) -> bool:
    try:
        return re.fullmatch(r"local(\[[^,]*\])?", spark.conf.get("spark.master", "") or "") is not None
    except Exception:  # the session ended; the message about the failure matters more
        return False


def _file_error(url: str, text: str, columns: Sequence[str] | None) -> DataError:
    return _read_again(url, columns) or _from_words(url, text)


def _read_again(url: str, columns: Sequence[str] | None) -> DataError | None:
    """Return the error of the first row group that cannot be read; None if all can, or the driver has no access."""
    try:
        location = open_location(url)
        path, name = location.path, location.name_of(location.path)
        try:
            with location.open_file(path) as source, pq.ParquetFile(source) as file:
                num_row_groups, names = file.metadata.num_row_groups, columns or file.schema_arrow.names
        except Exception as error:
            return reading_error(error, ParquetDatasetPiece(path, location.open_file, row_group=0), [], name)
        for index in range(num_row_groups):
            piece = ParquetDatasetPiece(path, location.open_file, row_group=index)
            try:
                piece.read(columns=names)
            except Exception as error:
                return reading_error(error, piece, names, name)
    except Exception:  # only Spark has the plugin or the credentials for the filesystem
        return None
    return None


def _from_words(url: str, text: str) -> DataError:
    causes = _CAUSE.findall(text)
    cause = causes[-1].strip() if causes else text.strip().splitlines()[0]
    if _NOT_FOUND.search(text):
        return FileVanishedError(
            f"Spark cannot read {url}: the file is no longer there. Make the DataFrame anew."
        )
    of_store = describe_java_reading_failure(cause)
    if of_store:
        return StoreAccessError(f"Spark cannot read {url}: {of_store}")
    why = _JAVA_CLASSES.sub("", cause)
    if any(sign in text for sign in _DAMAGED):
        return CorruptFileError(f"Spark cannot read {url}: {why}. The file is damaged; write it again.")
    return DataError(
        f"Spark cannot read {url}: {why}. See whether every executor can read it; if so, the file may be damaged."
    )
