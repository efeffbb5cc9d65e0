"""Description of a Parquet dataset for the feed: its columns, its row groups and their files.

The objects are frozen, made on the *driver* and pickled to the ranks. This module reads no data;
:mod:`sparkdl.data.dataset.footers` describes a folder and :mod:`sparkdl.data.store.store` saves the description.

:class:`Preparation` is the function that is applied to a row group between reading and batching: it takes columns and
returns other columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from sparkdl.errors import DataError, ParamError, list_names
from sparkdl.lazy import load_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

    from sparkdl.data.dataset.row_choice import RowFilter


MANIFEST_NAME = "_sparkdl_dataset.json"
"""Name of the file that makes a folder a dataset of a Store. It is written last; a folder without it is never read."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Name, type and shape of one column, the same for every row.

    Attributes:
        name: name as in the DataFrame.
        dtype: name of the NumPy dtype of the elements as the feed yields them: ``bool``, ``int8`` to ``int64``,
            ``uint8`` to ``uint64``, ``float16`` to ``float64``; ``datetime64[D]`` for dates, ``datetime64[us]`` for
            timestamps (nanoseconds are rounded down); ``object`` for values without a NumPy dtype: ``str``, ``bytes``,
            :class:`decimal.Decimal`, and arrays whose length differs from row to row.
        shape: ``()`` for a scalar, ``(k,)`` for a vector or array of length k, longer for nested arrays. Ragged
            arrays and images are objects, with the shape ``()``.
        kind: kind of the elements: ``number`` (booleans too), ``string``, ``binary``, ``decimal``, ``date``,
            ``timestamp``, ``image`` (each a uint8 array of height, width and channels, as Spark's ``image`` source
            reads them) or ``ragged``.
        lengths: for a ragged column, the length at every level of arrays, None where it differs from row to row.
        element: for a ragged column, the kind and the dtype of its elements.
        is_utc: whether timestamps are instants, given in UTC, and not clock times without a time zone.
        value_range: smallest and largest value of an integer scalar column, if the file footers hold them.
        num_nulls: number of nulls that the footers count; for an array column also null elements and empty arrays.
        takes_nulls: whether the feed yields rows with nulls; otherwise they are an error.
        null_value: value in place of each null; None for the missing value of the dtype: NaN for numbers, which are
            then floats, NaT for dates and timestamps, None for objects.

    Values from the footers are not part of a column's identity and are left out of comparisons.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    kind: str = "number"
    lengths: tuple[int | None, ...] = ()
    element: tuple[str, str] = ("", "")
    is_utc: bool = field(default=False, compare=False)
    value_range: tuple[int, int] | None = field(default=None, compare=False)
    num_nulls: int = field(default=0, compare=False)
    object_bytes: int = field(default=0, compare=False)
    """Average bytes of an object, from the first rows and the footers; 0 for columns of other dtypes."""
    takes_nulls: bool = False
    null_value: Any = None

    def with_nulls(self, value: Any) -> Column:
        """Return the column as a feed yields it with a value in place of nulls; see ``null_value``.

        Raises:
            ParamError: if the column cannot hold the value.
            DataError: if the column holds arrays of different lengths, or images.
        """
        if self.kind in ("ragged", "image"):
            held = "images" if self.kind == "image" else "arrays that differ in length, or none at all"
            raise DataError(
                f"Column {self.name!r} holds {held}, whose nulls cannot be filled. Leave those rows out, or the column "
                "if it is null in every row."
            )
        dtype = self.dtype
        if value is None:
            if self.kind == "number" and "float" not in dtype:
                dtype = "float64"
        elif not _holds(self, value):
            held = self.dtype if self.kind == "number" else self.kind
            raise ParamError(
                f"Column {self.name!r} holds {held} values, and the value for nulls, {value!r}, is not such a value. "
                "Give a value that the column can hold, or None for NaN, NaT or None."
            )
        elif self.kind == "number":
            value = np.dtype(dtype).type(value).item()  # 0 for a boolean is False
        return replace(self, dtype=dtype, takes_nulls=True, null_value=value)

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes in memory; an average for objects."""
        if self.object_bytes:
            return self.object_bytes
        return int(np.dtype(self.dtype).itemsize) * math.prod(self.shape)


_TYPES_OF_NULL_VALUES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "binary": (bytes,),
    "decimal": (Decimal, int),
    "date": (date,),
    "timestamp": (datetime,),
}


def _holds(column: Column, value: Any) -> bool:
    """Return whether a value is one of a column's, as it is stored."""
    if column.kind != "number":
        return isinstance(value, _TYPES_OF_NULL_VALUES[column.kind])
    if not isinstance(value, bool | int | float | np.bool_ | np.number):
        return False
    if "float" in column.dtype:
        return True
    if not math.isfinite(value) or int(value) != value:
        return False
    if column.dtype == "bool":
        return value in (0, 1)
    limits = np.iinfo(column.dtype)
    return bool(limits.min <= value <= limits.max)


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """One row group of one file: the smallest part that is read at once.

    Attributes:
        path: path of the file relative to the dataset's URL.
        index: number of the row group inside the file.
        num_rows: number of rows in the row group.
    """

    path: str
    index: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class ParquetDataset:
    """A folder of Parquet files whose footers have been read.

    Attributes:
        url: URL of the folder, as :class:`sparkdl.data.Store` takes it.
        columns: the columns that can be read, in the order of the files.
        row_groups: all row groups, file by file and by index inside a file: the order of the rows without shuffling.
        versions: version of each file, by path, which changes when the file is written again, as far as the filesystem
            reports it; left out of comparisons. Datasets of a Store have none, because their files are never written
            again.
    """

    url: str
    columns: tuple[Column, ...]
    row_groups: tuple[RowGroup, ...]
    versions: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_rows(self) -> int:
        """Number of rows of all row groups together."""
        return sum(row_group.num_rows for row_group in self.row_groups)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Number of rows of every row group."""
        return tuple(row_group.num_rows for row_group in self.row_groups)

    def column(self, name: str) -> Column:
        """Return the column of that name.

        Raises:
            DataError: if it does not exist; the message lists the existing ones.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise missing_column_error(name, list(self._by_name)) from None

    def with_nulls(self, nulls: Mapping[str, Any]) -> ParquetDataset:
        """Return the dataset with columns whose nulls a feed replaces, by name; see :meth:`Column.with_nulls`.

        Raises:
            ParamError: if a column cannot hold its value.
            DataError: if a column does not exist, or its nulls cannot be replaced.
        """
        if not nulls:
            return self
        replaced = {name: self.column(name).with_nulls(value) for name, value in nulls.items()}
        return replace(self, columns=tuple(replaced.get(column.name, column) for column in self.columns))

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    def preparation(self, transform: Any, names: Sequence[str] | None) -> Preparation | None:
        """Return the function to apply to row groups between reading and batching; None if there is none.

        Args:
            transform: a ``TransformSpec`` of Petastorm, or None.
            names: names of the columns to read; None for all.

        Raises:
            DataError: if a column does not exist.
        """
        if transform is None:
            return None
        columns = self.columns if names is None else [self.column(name) for name in names]
        guest = load_entry("a TransformSpec of Petastorm")  # imports pandas and Petastorm
        preparation: Preparation = guest.prepare_frames(columns, transform)
        return preparation

    def filter_of(self, row_filter: RowFilter) -> RowFilter:
        """Return the filter of stored values that corresponds to a filter of values as users see them."""
        return row_filter


def missing_column_error(name: str, available: Sequence[str]) -> DataError:
    """Return the error for a column that does not exist."""
    return DataError(f"There is no column {name!r}. The columns are: {list_names(available)}.")


def row_weights_error(held: str) -> DataError:
    """Return the error for weights of rows that cannot be weights; ``held`` says what is there."""
    return DataError(
        f"Weights of rows must be finite and at least 0, but {held}. Fix those rows or leave them out."
    )


_NULL = "__HIVE_DEFAULT_PARTITION__"


def folder_values(path: str) -> dict[str, str | None]:
    """Return the values in the folder names of a path inside a dataset, by column name: text, or None for a null.

    ``partitionBy`` writes them so: ``part=7/rows.parquet``.
    """
    pairs = (folder.partition("=") for folder in path.split("/")[:-1])
    return {
        unquote(name): None if value == _NULL else unquote(value) for name, equals, value in pairs if equals
    }


_PARTS_OF_SPEC = ("func", "edit_fields", "removed_fields", "selected_fields")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A function of tables that the reader threads apply.

    Attributes:
        source_names: names of the columns in the files that the function takes.
        columns: columns that the function can return.
        unusable: reason why a column cannot be returned, by its name.
        apply: function of a table of the source columns and of names from ``columns``. It returns a table of the named
            columns with the same number of rows, in types that
            :meth:`sparkdl.data.dataset.blocks.BlockLayout.pack` takes.
    """

    source_names: tuple[str, ...]
    columns: tuple[Column, ...]
    unusable: dict[str, str]
    apply: Callable[[pa.Table, Sequence[str]], pa.Table]

    def column(self, name: str) -> Column:
        """Return the column of that name.

        Raises:
            DataError: if it does not exist, or the function cannot return it.
        """
        for column in self.columns:
            if column.name == name:
                return column
        if name in self.unusable:
            raise DataError(f"Column {name!r} cannot be fed: {self.unusable[name]}.")
        raise missing_column_error(name, [column.name for column in self.columns])


def check_transform(transform: Any) -> None:
    """Check that the ``transform`` of a feed is a ``TransformSpec`` of Petastorm, or None.

    Raises:
        ParamError: if it is something else.
    """
    if transform is None or all(hasattr(transform, part) for part in _PARTS_OF_SPEC):
        return
    example = (
        "TransformSpec(function)" if callable(transform) else "TransformSpec(function, edit_fields=[...])"
    )
    raise ParamError(
        f"transform is a {type(transform).__name__}; give a petastorm.transform.TransformSpec, such as {example}."
    )
