"""What is counted of the values of a DataFrame while they are written: nulls, and the lengths of arrays.

Runs on the *executors*, a few Arrow calls per batch; the *driver* adds up what they counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.data.arrow_columns import is_list

_EXAMPLE_CHARACTERS = 200


@dataclass(kw_only=True)
class ColumnCensus:
    """What was seen of one column.

    Attributes:
        num_null_rows: rows in which it is null.
        num_rows_with_null_elements: rows in which it is an array with null elements.
        first: the first row with a null, as text.
        lengths: for every level of arrays, from the outermost, the least and the greatest length.
    """

    num_null_rows: int = 0
    num_rows_with_null_elements: int = 0
    first: str = ""
    lengths: list[list[int]] = field(default_factory=list)

    def add(self, other: ColumnCensus) -> None:
        """Add what was seen in later rows."""
        self.first = self._first_of(other)
        self.num_null_rows += other.num_null_rows
        self.num_rows_with_null_elements += other.num_rows_with_null_elements
        for level, (least, greatest) in enumerate(other.lengths):
            if level == len(self.lengths):
                self.lengths.append([least, greatest])
            else:
                mine = self.lengths[level]
                self.lengths[level] = [min(mine[0], least), max(mine[1], greatest)]

    def _first_of(self, other: ColumnCensus) -> str:
        # Null rows are told before null elements.
        if other.num_null_rows and not self.num_null_rows:
            return other.first
        return self.first or other.first


def count_values(census: dict[str, ColumnCensus], batch: pa.RecordBatch) -> None:
    """Add the values of a batch to what was seen before."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        census.setdefault(name, ColumnCensus()).add(_count_column(column, batch))


def has_nulls(census: dict[str, ColumnCensus]) -> bool:
    """Whether a null was seen."""
    return any(column.num_null_rows or column.num_rows_with_null_elements for column in census.values())


def _count_column(column: pa.Array, batch: pa.RecordBatch) -> ColumnCensus:
    found = ColumnCensus(num_null_rows=column.null_count, lengths=_lengths(column))
    nulls = _rows_with_nulls(column)
    if nulls is not None:
        is_null = np.asarray(column.is_null())
        found.num_rows_with_null_elements = int((nulls & ~is_null).sum())
        chosen = is_null if column.null_count else nulls
        if chosen.any():
            found.first = _describe_row(batch, int(chosen.argmax()))
    return found


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
    """Return for every value whether it is null or has a null inside; None if none has."""
    own = np.asarray(values.is_null()) if values.null_count else None
    if not is_list(values.type):
        return own
    inner = _rows_with_nulls(values.flatten())
    if inner is None:
        return own
    lengths = np.asarray(pc.fill_null(pc.list_value_length(values), 0))
    before = np.concatenate([[0], np.cumsum(inner)])
    ends = np.cumsum(lengths)
    inside: npt.NDArray[np.bool_] = before[ends] > before[ends - lengths]
    return inside if own is None else inside | own


def _describe_row(batch: pa.RecordBatch, index: int) -> str:
    row = batch.slice(index, 1).to_pylist()[0]
    text = ", ".join(f"{key}={value!r}" for key, value in row.items())
    return f"({text[:_EXAMPLE_CHARACTERS]}...)" if len(text) > _EXAMPLE_CHARACTERS else f"({text})"
