"""Spark jobs that read the user's files: their failures name the file, the row group and the column.

Spark does not always say which row group and column of a Parquet file are damaged, and never briefly. The driver
therefore reads the file that Spark names again, if it can.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from sparkdl.data.dataset.dataset import folder_values
from sparkdl.data.dataset.row_group_file import RowGroupFile
from sparkdl.data.files.filesystems import open_location
from sparkdl.spark.jobs import spark_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

    from sparkdl.errors import DataError


@contextmanager
def reading_job(
    spark: SparkSession, words: str, *, columns: Sequence[str] | None = None, waits_for_tasks: bool = False
) -> Iterator[None]:
    """Name the Spark jobs that a block runs, as :func:`~sparkdl.spark.jobs.spark_job`, and the files that they fail on.

    Args:
        spark: classic or Connect session.
        words: what the jobs do, such as ``writing rows``.
        columns: names of the columns that the jobs read from files; by default all.
        waits_for_tasks: whether a failing block waits until the jobs' other tasks have ended.

    Raises:
        As :func:`~sparkdl.spark.failures.spark_failures_named`.
    """
    explain_file = partial(file_error, columns=columns)
    with spark_job(spark, words, explain_file=explain_file, waits_for_tasks=waits_for_tasks):
        yield


def file_error(url: str, columns: Sequence[str] | None = None) -> DataError | None:
    """Return the error of the first row group that cannot be read; None if all can, or the driver has no access."""
    try:
        location = open_location(url)
        path, name = location.path, location.name_of(location.path)
        try:
            with location.open_file(path) as source, pq.ParquetFile(source) as file:
                num_row_groups, names = file.metadata.num_row_groups, columns or file.schema_arrow.names
        except Exception as error:
            return RowGroupFile(path, location.open_file, 0, name).error(error, [])
        for index in range(num_row_groups):
            row_group = RowGroupFile(path, location.open_file, index, name, folder_values(path))
            try:
                row_group.read(names)
            except Exception as error:
                return row_group.error(error, names)
    except Exception:  # only Spark has the plugin or the credentials for the filesystem
        return None
    return None
