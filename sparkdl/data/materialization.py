"""From a DataFrame to a Parquet dataset in a Store. Runs on the *driver*; the executors write the files.

Works on classic Spark and on Spark Connect: only the DataFrame API is used, and pyspark is imported inside
the functions, as ranks have none.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from sparkdl.data.filesystems import open_location
from sparkdl.data.footers import list_parquet_files, scan_dataset
from sparkdl.data.spark_columns import array_depth, check_types, is_vector, quoted
from sparkdl.data.validate import check_no_nulls, check_shapes
from sparkdl.errors import DataError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, Observation
    from pyspark.sql.types import StructField

    from sparkdl.data.dataset import ParquetDataset
    from sparkdl.data.store import StagedDataset, Store

logger = logging.getLogger(__name__)

_OBSERVATION_TIMEOUT_S = 60.0

ROW_GROUP_BYTES = 16 << 20
"""Size of a row group: smaller ones shuffle better, larger ones read faster; a rank holds a few at once."""


def materialize(
    df: DataFrame,
    columns: Sequence[str],
    store: Store,
    *,
    vector_dtype: str = "float64",
    row_group_bytes: int = ROW_GROUP_BYTES,
) -> ParquetDataset:
    """Write columns of a DataFrame as a Parquet dataset and check that ranks can train on it.

    The set is written aside and committed when all checks have passed; otherwise nothing of it stays.

    Args:
        df: the DataFrame, of classic Spark or Spark Connect.
        columns: names of its columns: integers, floats, booleans, vectors, arrays and nested arrays of them.
        store: where to write; executors have to reach it under the same URL.
        vector_dtype: ``float64`` or ``float32``: elements of columns of vectors.
        row_group_bytes: size at which Spark begins a new row group.

    Returns:
        The dataset. Whoever made it calls :meth:`ParquetDataset.delete` when it is no longer needed.

    Raises:
        DataError: if a column is missing, holds no numbers or nulls, or its arrays differ in length; if there
            are no rows.
        StoreError: if the Store cannot be written, or the executors write to another place than the driver
            reads.
    """
    fields = check_types(df.schema, columns)
    with store.stage_dataset("fit") as staged:
        selected = df.select(*[_as_stored(field, vector_dtype) for field in fields])
        observed = _write(selected, staged, row_group_bytes)
        if not list_parquet_files(open_location(staged.url)):
            raise _not_shared(store, "no file")
        written = df.sparkSession.read.schema(selected.schema).parquet(staged.spark_url)
        depths = {field.name: array_depth(field.dataType) for field in fields}
        shapes = check_shapes(written, depths)
        dataset = scan_dataset(staged.url, list(depths), shapes)
        if observed is not None and dataset.num_rows < observed:
            raise _not_shared(store, f"{dataset.num_rows} of {observed} rows")
        check_no_nulls(written, dataset)
        return staged.commit(dataset)


def _as_stored(field: StructField, vector_dtype: str) -> Column:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    column = F.col(quoted(field.name))
    if not is_vector(field.dataType):
        return column
    if vector_dtype not in {"float32", "float64"}:
        raise DataError(f"vector_dtype must be 'float32' or 'float64', got {vector_dtype!r}.")
    # Under a condition, as vector_to_array fails on a null, which is to be counted and reported instead.
    return F.when(column.isNotNull(), vector_to_array(column, vector_dtype)).alias(field.name)


def _write(df: DataFrame, staged: StagedDataset, row_group_bytes: int) -> int | None:
    """Write the files and return how many rows Spark wrote, where that has to be known."""
    observation = None
    if _executors_may_see_other_disks(df, staged):
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        observation = Observation()
        df = df.observe(observation, F.count(F.lit(1)).alias("rows"))
    df.write.option("parquet.block.size", row_group_bytes).parquet(staged.spark_url)
    return None if observation is None else _rows_observed(observation)


def _rows_observed(observation: Observation) -> int | None:
    """Return the rows that Spark counted while writing, or None if it does not tell in time."""
    rows: list[int] = []
    # In a thread, as `get` has no timeout and waits for ever when Spark's listener bus has dropped the event.
    thread = threading.Thread(target=lambda: rows.append(int(observation.get["rows"])), daemon=True)
    thread.start()
    thread.join(_OBSERVATION_TIMEOUT_S)
    if not rows:
        logger.warning(
            "Spark did not tell within %.0f s how many rows it wrote; whether the driver sees all of them is not "
            "checked.",
            _OBSERVATION_TIMEOUT_S,
        )
        return None
    return rows[0]


def _executors_may_see_other_disks(df: DataFrame, staged: StagedDataset) -> bool:
    import pyspark

    if not staged.spark_url.startswith("file:"):
        return False
    if type(df).__module__.startswith("pyspark.sql.connect") and int(pyspark.__version__.split(".")[0]) < 4:
        return False  # Spark Connect has Observation since 4.0
    master = df.sparkSession.conf.get("spark.master", "") or ""
    return not master.startswith("local[") and master != "local"


def _not_shared(store: Store, found: str) -> StoreError:
    return StoreError(
        f"Spark wrote the rows to {store.url}, but the driver finds {found} there: the executors have other "
        "disks. Choose a Store that all machines share, such as a mounted or an object store."
    )
