"""Joins small files of a dataset into files of well-sized row groups, as from a DataFrame of many small partitions.

Planned on the *driver*; a few small files are joined there, many by the *executors*.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data.filesystems import open_location
from sparkdl.data.row_writer import REPORT_SCHEMA, RowGroupWriter, WrittenFile
from sparkdl.data.spark_jobs import spark_job
from sparkdl.data.store_failures import describe_failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

_ON_DRIVER_BYTES = 64 << 20
_NUM_THREADS = 4


def merge_small_files(
    spark: SparkSession, url: str, files: Sequence[WrittenFile], row_group_bytes: int
) -> list[WrittenFile]:
    """Join neighbouring files of less than half a row group until none is left that has such a neighbour.

    The order of the rows stays. The small files are removed.

    Args:
        spark: session that joins them where they are many.
        url: folder of the files.
        files: the files in the order of their rows.
        row_group_bytes: decoded bytes of a row group.

    Returns:
        The files there are now, in the order of their rows.
    """
    runs = plan_runs([sum(file.row_group_bytes) for file in files], row_group_bytes)
    merges = [[files[index].path for index in run] for run in runs if len(run) > 1]
    if not merges:
        return list(files)
    numbers = [files[run[0]].order for run in runs if len(run) > 1]
    total = sum(sum(files[index].row_group_bytes) for run in runs if len(run) > 1 for index in run)
    join = partial(_merge, url=url, row_group_bytes=row_group_bytes)
    if total <= _ON_DRIVER_BYTES:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            merged = list(pool.map(join, merges, numbers))
    else:
        jobs = spark.range(0, len(merges), 1, len(merges))
        task = partial(
            _merge_partition, merges=merges, numbers=numbers, url=url, row_group_bytes=row_group_bytes
        )
        with spark_job(spark, "joining small files", outlives_no_task=True):
            rows = jobs.mapInArrow(task, REPORT_SCHEMA).collect()
        merged = [WrittenFile.from_json(row[0]) for row in rows]
    kept = [files[run[0]] for run in runs if len(run) == 1]
    if not any(file.failure for file in merged):
        location = open_location(url)
        location.filesystem.rm([f"{location.path}/{path}" for paths in merges for path in paths])
    return sorted([*kept, *merged], key=lambda file: file.order)


def plan_runs(sizes: Sequence[int], target: int) -> list[list[int]]:
    """Return runs of neighbours to be joined: of files below half the target, up to the target each."""
    runs: list[list[int]] = []
    open_bytes: int | None = None
    for index, size in enumerate(sizes):
        is_small = 2 * size < target
        if is_small and open_bytes is not None and open_bytes + size <= target:
            runs[-1].append(index)
            open_bytes += size
        else:
            runs.append([index])
            open_bytes = size if is_small else None
    return runs


def _merge_partition(
    batches: Iterator[pa.RecordBatch],
    merges: list[list[str]],
    numbers: list[int],
    url: str,
    row_group_bytes: int,
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for index in batch.column(0).to_pylist():
            file = _merge(merges[index], numbers[index], url=url, row_group_bytes=row_group_bytes)
            yield pa.RecordBatch.from_pydict({"report": [file.to_json()]})


def _merge(paths: list[str], number: int, *, url: str, row_group_bytes: int) -> WrittenFile:
    location = open_location(url)
    try:
        with RowGroupWriter(url, number, row_group_bytes) as writer:
            for path in paths:
                with location.open_file(f"{location.path}/{path}") as source, pq.ParquetFile(source) as file:
                    for batch in file.read().to_batches():
                        writer.write(batch)
    except Exception as error:
        failure = describe_failure(error)
        if not failure:
            raise
        return WrittenFile(order=number, failure=failure)
    return WrittenFile(
        path=writer.path, order=number, num_rows=writer.num_rows, row_group_bytes=writer.written_bytes
    )
