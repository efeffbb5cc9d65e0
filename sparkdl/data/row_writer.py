"""Writes the rows of one Spark partition as a Parquet file whose row groups have the size that the feed wants.

Runs in the Python workers of the *executors*, inside ``mapInArrow``. Nothing but pyarrow and fsspec takes part, so
that rows reach every Store that Python reaches, row groups are measured in decoded bytes, and nulls and lengths
of arrays are counted as the rows go by.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data.filesystems import open_location
from sparkdl.data.store_failures import describe_failure
from sparkdl.data.value_census import ColumnCensus, count_values, has_nulls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPORT_SCHEMA = "report string"
"""Schema of what :func:`write_partition` yields, as Spark spells it."""


@dataclass(kw_only=True)
class WrittenFile:
    """What a task did: one file, or the reason why there is none.

    Attributes:
        path: path of the file inside the folder; empty if nothing was written.
        order: number by which files are put in the order of the rows.
        row_group_bytes: decoded bytes of every row group.
        num_rows: rows of the partition; where there are no nulls, of the file.
        columns: by name what was seen of the values.
        failure: why the Store did not take the rows; empty if it did.
    """

    path: str = ""
    order: int = 0
    row_group_bytes: list[int] = field(default_factory=list)
    num_rows: int = 0
    columns: dict[str, ColumnCensus] = field(default_factory=dict)
    failure: str = ""

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WrittenFile:
        """Return what :meth:`to_json` wrote."""
        content: dict[str, Any] = json.loads(text)
        columns = {name: ColumnCensus(**census) for name, census in content.pop("columns").items()}
        return cls(**content, columns=columns)


def write_partition(
    batches: Iterator[pa.RecordBatch],
    url: str,
    names: list[str],
    row_group_bytes: int,
    begin: Callable[[int], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Write the rows of a partition to a new file in the folder at ``url`` and yield one report.

    The columns get the ``names``, in their order. ``begin`` is called before that with the partition's number.

    An empty partition has no file. A failure of the Store that trying again cannot mend is reported, any other
    one raised, so that Spark tries the task again.
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
                    named = _renamed(batch, names)
                    count_values(report.columns, named)
                    report.num_rows += named.num_rows
                    # Rows with nulls are refused in the end: they are counted, and no longer written.
                    if not has_nulls(report.columns):
                        writer.write(named)
        report.path = writer.path
        report.row_group_bytes = writer.written_bytes
    except Exception as error:
        report.failure = describe_failure(error)
        if not report.failure:
            raise
    if report.num_rows or report.failure:
        yield pa.RecordBatch.from_pydict({"report": [report.to_json()]})


def _renamed(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    """``RecordBatch.rename_columns``, which pyarrow has since version 16."""
    fields = [field.with_name(name) for field, name in zip(batch.schema, names, strict=True)]
    return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields))


class RowGroupWriter:
    """One Parquet file, begun with its first rows; a context manager that leaves no file behind when it fails.

    Args:
        url: URL of the folder.
        number: by which files are sorted.
        row_group_bytes: decoded bytes at which a row group ends.

    Attributes:
        path: path inside the folder; empty as long as there were no rows.
        num_rows: rows written.
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

    def __enter__(self) -> RowGroupWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        try:
            if error is None:
                self._flush()
                self._close()
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
        # Numbers are read faster when they are stored as they are than through a dictionary.
        texts = [each.name for each in schema if pa.types.is_string(each.type)]
        self._writer = pq.ParquetWriter(self._file, schema, use_dictionary=texts or False)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._file.close()

    def _abandon(self) -> None:
        if self._file is None:
            return
        with suppress(Exception):
            discard = getattr(self._file, "discard", None)
            if discard is not None:  # an upload in parts, which closing would complete
                discard()
            self._file.close()
        with suppress(Exception):
            self._location.filesystem.rm(f"{self._location.path}/{self.path}")
