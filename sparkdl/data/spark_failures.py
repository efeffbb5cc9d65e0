"""Why a job of Spark that reads or writes rows failed, without the pages of Java that it raises. Runs on the *driver*.

Which row group and column of a Parquet file are damaged Spark does not always tell, and never in few words. The driver
therefore reads the file that Spark names once more, where it can.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow.parquet as pq

from sparkdl.data.executor_python import executor_python_problem
from sparkdl.data.filesystems import open_location
from sparkdl.data.petastorm.legacy_parquet import ParquetDatasetPiece
from sparkdl.data.petastorm.reading_errors import reading_error
from sparkdl.data.store_failures import describe_reading_words, without_paths
from sparkdl.errors import (
    CorruptFileError,
    DataError,
    FileVanishedError,
    LaunchError,
    SparkdlError,
    StoreAccessError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

_FILE = re.compile(r"Encountered error while reading file (\S+?)\.?(?:\s|$)")
_GONE = re.compile(r"SparkFileNotFoundException: File (.+?) does not exist")  # as Spark 3.5 says it
_CAUSE = re.compile(r"^Caused by: (.+)$", re.MULTILINE)
_JAVA_CLASSES = re.compile(r"^(?:[\w.$]+: )*")
# In the message of the last cause, or its class; frames below it hold the like of any failure.
_DAMAGE = (
    "could not read page",
    "is not a parquet file",
    "can not read value",
    "decoding",
    "checksum",
    "footer",
    "compress",
    "corrupt",
)


@contextmanager
def spark_failures_named(spark: SparkSession, columns: Sequence[str] | None = None) -> Iterator[None]:
    """Run a block that runs jobs of Spark, and say what was wrong where that is known.

    Args:
        spark: the session.
        columns: what is read of the files, by default all that they hold.

    Raises:
        LaunchError: if the executors' Python lacks what it takes.
        DataError: if a file cannot be read, of the class that says why.
        Exception: anything else as Spark raised it.
    """
    try:
        yield
    except SparkdlError:
        raise
    except Exception as error:
        problem = executor_python_problem(error, spark)
        if problem:
            raise LaunchError(problem) from error
        named = _FILE.search(str(error)) or _GONE.search(str(error))
        if named is not None:
            raise _file_error(unquote(named[1]), str(error), columns) from error
        raise


def _file_error(url: str, text: str, columns: Sequence[str] | None) -> DataError:
    return _read_again(url, columns) or _from_words(url, text)


def _read_again(url: str, columns: Sequence[str] | None) -> DataError | None:
    """Return the error of the first row group that cannot be read; None if all can, or there is no looking at it."""
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
    except Exception:  # of a filesystem that only Spark has the plugin or the credentials for
        return None
    return None


def _from_words(url: str, text: str) -> DataError:
    if "FILE_NOT_EXIST" in text or "File does not exist" in text or _GONE.search(text):
        return FileVanishedError(
            f"Spark cannot read {url}: the file is no longer there. Make the DataFrame anew."
        )
    causes = _CAUSE.findall(text)
    cause = causes[-1].strip() if causes else text.strip().splitlines()[0]
    of_store = describe_reading_words(cause)
    if of_store:
        return StoreAccessError(f"Spark cannot read {url}: {of_store}")
    why = _JAVA_CLASSES.sub("", cause)
    if any(word in without_paths(cause).lower() for word in _DAMAGE):
        return CorruptFileError(f"Spark cannot read {url}: {why}. The file is damaged; write it again.")
    return DataError(f"Spark cannot read {url}: {why}. See whether every executor can read it.")
