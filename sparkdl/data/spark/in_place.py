"""Recognizes DataFrames that only read Parquet files, which ranks can read in place.

The optimized plan of such a DataFrame is a read of Parquet and at most a selection of its columns. For any other plan,
such as one with a filter, a cast, a cache or a table of a catalog, the rows are copied.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sparkdl.data.dataset.dataset import folder_values
from sparkdl.data.dataset.footers import scan_dataset
from sparkdl.data.spark.columns import array_depth, is_vector, stored_type, with_bytes
from sparkdl.data.spark.input_files import input_files
from sparkdl.data.spark.plans import is_parquet_read
from sparkdl.data.spark.reading import reading_job
from sparkdl.data.spark.validate import check_no_nulls, check_shapes
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField

    from sparkdl.data.dataset.dataset import ParquetDataset

logger = logging.getLogger(__name__)


def open_in_place(
    df: DataFrame, fields: Sequence[StructField], *, allow_ragged: bool, nullable: Collection[str] = ()
) -> ParquetDataset | None:
    """Return the files of a DataFrame as a dataset, checked as a copy would be; None if the rows must be copied.

    Raises:
        DataError: if there are no rows, or values that ranks cannot be fed with.
    """
    if any(is_vector(field.dataType) for field in fields):
        return None
    names = [field.name for field in fields]
    # Planned again, because a DataFrame object remembers whether it was cached when it was first run.
    if not is_parquet_read(df.select("*")):
        return None
    files = input_files(df)
    if files is None:
        return None
    # Of a column that is in the files as well, Spark takes the values of the folders.
    partitions = {name.lower() for path in files.paths for name in folder_values(f"{files.folder}/{path}")}
    if not partitions.isdisjoint(map(str.lower, names)):
        return None
    depths = {field.name: array_depth(field.dataType) for field in fields}
    unknown = {name: (None,) * depth for name, depth in depths.items() if depth}
    try:
        described = scan_dataset(files.folder, names, unknown, files.paths)
    except (
        DataError
    ) as error:  # differing types, partition columns, damaged files: Spark handles or reports them better
        logger.info("The rows are copied: %s", error)
        return None
    for field, column in zip(fields, described.columns, strict=True):
        actual = (*column.element, len(column.lengths)) if column.lengths else (column.kind, column.dtype, 0)
        if actual != stored_type(field.dataType):
            return None
    with reading_job(df.sparkSession, "checking rows in place", columns=names):
        shapes = check_shapes(df, depths, allow_ragged=allow_ragged)
        dataset = scan_dataset(files.folder, names, shapes, files.paths)
        check_no_nulls(with_bytes(df, fields), dataset, nullable)
    return dataset
