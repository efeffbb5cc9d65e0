"""Writes a DataFrame's rows as Parquet files whose row groups have a size that suits the feed.

Each Spark partition is written by a Python worker of the *executors*, inside ``mapInArrow``. Only pyarrow and fsspec
are used, so that rows can be written to every Store that Python reaches and row groups are measured in decoded bytes.

Nulls and the lengths of arrays are counted while the rows are written, in a few Arrow calls per batch; the *driver*
adds up the counts.

Small files, as from a DataFrame of many small partitions, are merged into files of well-sized row groups. The
*driver* plans the merge; it merges a few small files itself and has the *executors* merge many.
"""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkdl.data.dataset.arrow import is_list
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.spark.validate import describe_row
from sparkdl.foreign_errors import describe_lasting_failure, is_disk_full
from sparkdl.spark.jobs import spark_job

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession


@dataclass(kw_only=True)
class ColumnCensus:
    """Counts of the nulls of one column, and the lengths of its arrays.

    Attributes:
        num_null_rows: number of rows in which the column is null.
        num_rows_with_null_elements: number of rows in which it is an array with null elements.
        first: first row with a null, as text.
        lengths: smallest and largest length of the arrays at every level, the outermost level first.
    """

    num_null_rows: int = 0
    num_rows_with_null_elements: int = 0
    first: str = ""
    lengths: list[list[int]] = field(default_factory=list)

    def add(self, other: ColumnCensus) -> None:
        """Add the census of later rows."""
        # Null rows are reported before null elements.
        if not self.first or (other.num_null_rows and not self.num_null_rows):
            self.first = other.first
        self.num_null_rows += other.num_null_rows
        self.num_rows_with_null_elements += other.num_rows_with_null_elements
        for level, (least, greatest) in enumerate(other.lengths):
            if level == len(self.lengths):
                self.lengths.append([least, greatest])
            else:
                mine = self.lengths[level]
                self.lengths[level] = [min(mine[0], least), max(mine[1], greatest)]


def add_up(total: dict[str, ColumnCensus], later: Mapping[str, ColumnCensus]) -> None:
    """Add the census of later rows to the total of each column."""
    for name, census in later.items():
        total.setdefault(name, ColumnCensus()).add(census)


def _count_column(column: pa.Array, batch: pa.RecordBatch) -> ColumnCensus:
    census = ColumnCensus(num_null_rows=column.null_count, lengths=_lengths(column))
    nulls = _rows_with_nulls(column)
    if nulls is not None:
        is_null = np.asarray(column.is_null())
        census.num_rows_with_null_elements = int((nulls & ~is_null).sum())
        chosen = is_null if column.null_count else nulls
        if chosen.any():
            census.first = describe_row(batch.slice(int(chosen.argmax()), 1).to_pylist()[0])
    return census


def _lengths(column: pa.Array) -> list[list[int]]:
    lengths = []
    while is_list(column.type):
        extremes = pc.min_max(pc.list_value_length(column))
        if extremes["min"].as_py() is None:
            break
        lengths.append([extremes["min"].as_py(), extremes["max"].as_py()])
        column = column.flatten()
    return lengths


def _rows_with_nulls(values: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Return for every value whether it is null or has a null inside; None if there are no nulls."""
    is_null = np.asarray(values.is_null()) if values.null_count else None
    if not is_list(values.type):
        return is_null
    inner = _rows_with_nulls(values.flatten())
    if inner is None:
        return is_null
    lengths = np.asarray(pc.fill_null(pc.list_value_length(values), 0))
    before = np.concatenate([[0], np.cumsum(inner)])
    ends = np.cumsum(lengths)
    inside: npt.NDArray[np.bool_] = before[ends] > before[ends - lengths]
    return inside if is_null is None else inside | is_null


REPORT_SCHEMA = "report string"
"""Schema of what :func:`write_partition` yields, as Spark spells it."""


@dataclass(kw_only=True)
class WrittenFile:
    """Report of a task: the file that it wrote, or the reason why there is none.

    Attributes:
        path: path of the file inside the folder; empty if nothing was written.
        order: number that sorts files into the order of the rows.
        row_group_bytes: decoded bytes of every row group.
        num_rows: number of rows of the partition, which without nulls is that of the file.
        columns: census of each column, by name.
        failure: why the rows could not be written to the Store; empty on success.
        is_store_full: whether the reason is that the disk of the Store is full.
    """

    path: str = ""
    order: int = 0
    row_group_bytes: list[int] = field(default_factory=list)
    num_rows: int = 0
    columns: dict[str, ColumnCensus] = field(default_factory=dict)
    failure: str = ""
    is_store_full: bool = False

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WrittenFile:
        """Return the report that :meth:`to_json` returned as JSON."""
        content: dict[str, Any] = json.loads(text)
        columns = {name: ColumnCensus(**census) for name, census in content.pop("columns").items()}
        return cls(**content, columns=columns)


def write_partition(
    batches: Iterator[pa.RecordBatch],
    url: str,
    names: list[str],
    row_group_bytes: int,
    begin: Callable[[int], None] | None = None,
    nullable: Collection[str] = (),
) -> Iterator[pa.RecordBatch]:
    """Write the rows of a partition to a new file in the folder at ``url`` and yield one report.

    The batches have one column of structs, whose fields get the ``names``, in their order. ``begin`` is called before
    anything is written, with the number of the partition. Columns in ``nullable`` may have nulls.

    An empty partition has no file. A failure of the Store that trying again cannot fix is reported; any other
    failure is raised, so that Spark tries the task again.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    number = 0 if context is None else context.partitionId()
    report = WrittenFile(order=number)
    if begin is not None:
        begin(number)
    try:
        with RowGroupWriter(url, number, row_group_bytes) as writer:
            for batch in batches:
                if batch.num_rows:
                    named = _columns(batch, names)
                    columns = zip(names, named.columns, strict=True)
                    add_up(report.columns, {name: _count_column(column, named) for name, column in columns})
                    report.num_rows += named.num_rows
                    # Rows with nulls are refused in the end: after a null, rows are counted but no longer written.
                    if not any(
                        census.first for name, census in report.columns.items() if name not in nullable
                    ):
                        writer.write(named)
        report.path = writer.path
        report.row_group_bytes = writer.written_bytes
    except Exception as error:
        report.failure, report.is_store_full = describe_lasting_failure(error), is_disk_full(error)
        if not report.failure:
            raise
    if report.num_rows or report.failure:
        yield pa.RecordBatch.from_pydict({"report": [report.to_json()]})


def _columns(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    """Return the fields of the only column, which has structs, under other names."""
    structs = batch.column(0)
    fields = [structs.type.field(index).with_name(name) for index, name in enumerate(names)]
    return pa.RecordBatch.from_arrays(structs.flatten(), schema=pa.schema(fields))


class RowGroupWriter(AbstractContextManager["RowGroupWriter"]):
    """Writer of one Parquet file, which is created with its first rows; a context manager that removes it on failure.

    Args:
        url: URL of the folder.
        number: number in the name of the file, which sorts the files.
        row_group_bytes: decoded bytes at which a row group ends.

    Attributes:
        path: path of the file inside the folder; empty as long as no rows were written.
        num_rows: number of rows that were written.
        written_bytes: decoded bytes of every row group.
    """

    def __init__(self, url: str, number: int, row_group_bytes: int) -> None:
        self._location = open_location(url)
        self._number, self._target = number, row_group_bytes
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._file: Any = None
        self._writer: pq.ParquetWriter | None = None
        self.path = ""
        self.num_rows = 0
        self.written_bytes: list[int] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; full row groups are written."""
        row_bytes = max(1.0, batch.nbytes / batch.num_rows)
        start = 0
        while start < batch.num_rows:
            room = max(1, int((self._target - self._waiting_bytes) / row_bytes))
            part = batch.slice(start, room)
            self._waiting.append(part)
            self._waiting_bytes += int(part.num_rows * row_bytes)
            start += part.num_rows
            if self._waiting_bytes + row_bytes > self._target:
                self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        try:
            if error is None:
                self._flush()
                if self._writer is not None:
                    self._writer.close()
                    self._file.close()
        except BaseException:
            self._abandon()
            raise
        if error is not None:
            self._abandon()

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        if self._writer is None:
            self._open(table.schema)
        assert self._writer is not None
        self._writer.write_table(table, row_group_size=table.num_rows)
        self.written_bytes.append(self._waiting_bytes)
        self.num_rows += table.num_rows
        self._waiting, self._waiting_bytes = [], 0

    def _open(self, schema: pa.Schema) -> None:
        self.path = f"part-{self._number:05d}-{uuid.uuid4().hex[:12]}.parquet"
        self._location.make_folder()
        self._file = self._location.filesystem.open(f"{self._location.path}/{self.path}", "wb")
        # Numbers are read faster if they are stored plainly rather than through a dictionary.
        texts = [field.name for field in schema if pa.types.is_string(field.type)]
        self._writer = pq.ParquetWriter(self._file, schema, use_dictionary=texts or False)

    def _abandon(self) -> None:
        if self._file is None:
            return
        with suppress(Exception):
            discard = getattr(self._file, "discard", None)
            # An upload in parts, which closing would complete. fsspec's local files have the method, but refuse it.
            if discard is not None and not self._location.is_local:
                discard()
            self._file.close()
        with suppress(Exception):
            self._location.filesystem.rm(f"{self._location.path}/{self.path}")


_ON_DRIVER_BYTES = 64 << 20
_NUM_THREADS = 4


def merge_small_files(
    spark: SparkSession, url: str, files: Sequence[WrittenFile], row_group_bytes: int
) -> list[WrittenFile]:
    """Merge neighbouring files of less than half a row group until no two of them are neighbours.

    The order of the rows does not change. The small files are removed.

    Args:
        spark: session whose executors merge the files if they are too large for the driver.
        url: URL of the files' folder.
        files: the files in the order of their rows.
        row_group_bytes: decoded bytes of a row group.

    Returns:
        The resulting files, in the order of their rows.
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
        with spark_job(spark, "joining small files", waits_for_tasks=True):
            rows = jobs.mapInArrow(task, REPORT_SCHEMA).collect()
        merged = [WrittenFile.from_json(row[0]) for row in rows]
    kept = [files[run[0]] for run in runs if len(run) == 1]
    if not any(file.failure for file in merged):
        location = open_location(url)
        location.filesystem.rm([f"{location.path}/{path}" for paths in merges for path in paths])
    return sorted([*kept, *merged], key=lambda file: file.order)


def plan_runs(sizes: Sequence[int], target: int) -> list[list[int]]:
    """Return runs of neighbours to merge: files below half the target, up to the target together; others alone."""
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
        failure = describe_lasting_failure(error)
        if not failure:
            raise
        return WrittenFile(order=number, failure=failure, is_store_full=is_disk_full(error))
    return WrittenFile(
        path=writer.path, order=number, num_rows=writer.num_rows, row_group_bytes=writer.written_bytes
    )
