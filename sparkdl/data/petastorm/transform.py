"""Applies Petastorm's ``TransformSpec`` and predicates in the feed, on the reader threads of every *rank*.

As with Petastorm's own readers, the function of the spec takes a pandas DataFrame of a row group if the files are plain
Parquet (``make_batch_reader``), and a dict of one decoded row if they are a Unischema dataset (``make_reader``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from sparkdl.data.dataset.arrow import to_arrow, to_numpy
from sparkdl.data.dataset.dataset import Preparation
from sparkdl.data.dataset.row_choice import RowFilter
from sparkdl.data.petastorm.containment import install
from sparkdl.data.petastorm.fields import columns_of, schema_of
from sparkdl.errors import DataError, list_names
from sparkdl.foreign_errors import errors_as

install()
from petastorm.transform import transform_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.data.dataset.dataset import Column
    from sparkdl.data.dataset.row_choice import Values


def prepare_frames(columns: Sequence[Column], spec: Any) -> Preparation:
    """Return the preparation that applies a ``TransformSpec`` to plain Parquet columns.

    The function of the spec takes all of ``columns``; an array is a cell with its shape. The function must not change
    the number or order of the rows, which ranks rely on; a ``row_filter`` leaves rows out before they are counted.
    """
    results, unusable = columns_of(transform_schema(schema_of(columns), spec), find_unedited(columns, spec))

    def apply(table: pa.Table, names: Sequence[str]) -> pa.Table:
        cells: dict[str, Any] = {}
        for column in columns:
            values = to_numpy(table.column(column.name), column)
            cells[column.name] = list(values) if column.shape else values
        frame = pd.DataFrame(cells)
        if spec.func is not None:
            frame = call_function(spec.func, frame)
        if not isinstance(frame, pd.DataFrame) or len(frame) != table.num_rows:
            actual = f"{len(frame)} rows" if isinstance(frame, pd.DataFrame) else type(frame).__name__
            raise DataError(
                f"the function of the TransformSpec returned {actual} for a DataFrame of {table.num_rows} rows; "
                "leave rows out with row_filter"
            )
        missing = [name for name in names if name not in frame.columns]
        if missing:
            raise missing_result_error(missing[0], list(frame.columns))
        by_name = {column.name: column for column in results}
        return pa.table({name: to_arrow(frame[name].to_numpy(), by_name[name]) for name in names})

    return Preparation(
        source_names=tuple(column.name for column in columns), columns=results, unusable=unusable, apply=apply
    )


def find_unedited(columns: Sequence[Column], spec: Any) -> list[Column]:
    """Return the columns that the ``edit_fields`` of a ``TransformSpec`` do not describe again."""
    edited = {field[0] for field in spec.edit_fields}
    return [column for column in columns if column.name not in edited]


def call_function(function: Any, argument: Any) -> Any:
    """Call the function of a ``TransformSpec``.

    Raises:
        DataError: if the function raises; the message has the class and text of its exception.
    """
    with errors_as(DataError, "the function of the TransformSpec failed"):
        return function(argument)


def missing_result_error(name: str, returned: Sequence[Any]) -> DataError:
    """Return the error for a column that is missing from the result of the function."""
    return DataError(
        f"the function of the TransformSpec returned no column {name!r}, only {list_names(map(str, returned))}; list "
        "the columns that it removes in removed_fields"
    )


def filter_of(predicate: Any) -> RowFilter:
    """Return a filter that calls a predicate (``in_lambda``, ``in_set``, ...) for each row."""
    columns = sorted(predicate.get_fields())

    def keep(values: Values) -> npt.NDArray[np.bool_]:
        rows = zip(*(values[name] for name in columns), strict=True)
        answers = (predicate.do_include(dict(zip(columns, row, strict=True))) for row in rows)
        return np.fromiter((bool(answer) for answer in answers), np.bool_)

    return RowFilter(columns, keep)
