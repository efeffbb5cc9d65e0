"""Checks of the values of a fit, on the *driver* before any rank starts.

All checks raise :class:`sparkdl.errors.DataError` with the column, what was found and what to do. Checks of the
footers of the files cost nothing; checks of the lengths of arrays take one aggregation over the written files.
NaN is accepted as a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.data.spark.columns import quote
from sparkdl.errors import ColumnMismatchError, DataError, EmptyDatasetError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from pyspark.sql import Column, DataFrame

    from sparkdl.data.dataset.dataset import ParquetDataset
    from sparkdl.data.spark.writing import ColumnCensus


_EXAMPLE_CHARACTERS = 200


def describe_row(row: Mapping[str, Any]) -> str:
    """Return a row as text, cut if it is long."""
    text = ", ".join(f"{key}={value!r}" for key, value in row.items())
    return f"({text[:_EXAMPLE_CHARACTERS]}...)" if len(text) > _EXAMPLE_CHARACTERS else f"({text})"


def check_shapes(
    df: DataFrame, depths: Mapping[str, int], *, allow_ragged: bool = False
) -> dict[str, tuple[int | None, ...]]:
    """Return the length at every level that is common to all rows of each array column, with one aggregation.

    Args:
        df: DataFrame of the rows.
        depths: number of arrays that are nested around the elements of each column, by name.
        allow_ragged: whether lengths may differ or be 0; None stands for such a length in the result.

    Raises:
        DataError: if there are no rows, or arrays of one column differ in length or are empty.
    """
    from pyspark.sql import functions as F

    lengths = {name: list(_lengths(F.col(quote(name)), depth)) for name, depth in depths.items() if depth}
    aggregates = [F.count(F.lit(1))]
    for levels in lengths.values():
        aggregates += [aggregate for level in levels for aggregate in level]
    named = [aggregate.alias(f"_{index}") for index, aggregate in enumerate(aggregates)]
    num_rows, *lengths_of_all = df.agg(*named).collect()[0]
    if not num_rows:
        raise no_rows_error()
    values = iter(lengths_of_all)
    return {
        name: tuple(
            common_length(name, next(values), next(values), allow_ragged=allow_ragged) for _ in levels
        )
        for name, levels in lengths.items()
    }


def no_rows_error() -> DataError:
    """Return the error for a DataFrame without rows."""
    return EmptyDatasetError("The DataFrame has no rows; there is nothing to train on.")


def check_census(census: Mapping[str, ColumnCensus], num_rows: int, nullable: Collection[str] = ()) -> None:
    """Check the census that was taken while the rows were written.

    Raises:
        DataError: if columns that are not ``nullable`` have nulls, or arrays with null elements; the message names all
            of them, says how many rows have nulls, and shows the first such row of each.
    """
    faults = [
        _nulls_of_rows(name, column.num_null_rows, num_rows, column.first)
        if column.num_null_rows
        else _nulls_of_elements(name, column.num_rows_with_null_elements, num_rows, column.first)
        for name, column in census.items()
        if name not in nullable and (column.num_null_rows or column.num_rows_with_null_elements)
    ]
    if faults:
        raise _nulls_error(faults)


def check_no_nulls(df: DataFrame, dataset: ParquetDataset, nullable: Collection[str] = ()) -> None:
    """Check the null counts that the footers of a dataset hold.

    Footers count an empty array as a null, too: if they count nulls in columns, one job checks the rows.

    Args:
        df: DataFrame of the written rows, which is read only if the footers count nulls.
        dataset: the dataset.
        nullable: names of columns that may have nulls.

    Raises:
        DataError: if other columns have nulls, or arrays with null elements; the message names all of them, says how
            many rows have nulls, and shows the first such row of each.
    """
    suspects = [column for column in dataset.columns if column.num_nulls and column.name not in nullable]
    if not suspects:
        return
    from pyspark.sql import functions as F

    row = F.struct(*[F.col(quote(name)) for name in df.columns])
    aggregates = []
    for index, column in enumerate(suspects):
        values, depth = F.col(quote(column.name)), len(column.lengths or column.shape)
        has_null = _has_null_elements(values, depth) if depth else F.lit(False)
        for condition in (values.isNull(), F.coalesce(has_null, F.lit(False))):
            first = F.first(F.when(condition, row), ignorenulls=True) if index < _MOST_SHOWN else F.lit(None)
            aggregates += [F.count_if(condition), first]
    named = [aggregate.alias(f"_{index}") for index, aggregate in enumerate(aggregates)]
    found = iter(df.agg(*named).collect()[0])
    faults = []
    for column, of_rows, first_row, of_elements, first_elements in zip(suspects, *[found] * 4, strict=True):
        if of_rows:
            faults.append(_nulls_of_rows(column.name, of_rows, dataset.num_rows, _describe(first_row)))
        elif of_elements:
            faults.append(
                _nulls_of_elements(column.name, of_elements, dataset.num_rows, _describe(first_elements))
            )
    if faults:
        raise _nulls_error(faults)


def _describe(row: Any) -> str:
    return "" if row is None else describe_row(row.asDict())


def _lengths(column: Column, depth: int) -> Iterator[tuple[Column, Column]]:
    """Yield the smallest and the largest length at each level, from the outermost array inwards."""
    from pyspark.sql import functions as F

    size = F.when(
        column.isNotNull(), F.size(column)
    )  # without the condition size(null) is -1 or null, depending on Spark's configuration
    yield F.min(size), F.max(size)
    for _ in range(depth - 1):
        sizes = F.transform(column, lambda inner: F.when(inner.isNotNull(), F.size(inner)))
        yield F.min(F.array_min(sizes)), F.max(F.array_max(sizes))
        column = F.flatten(column)


def common_length(
    name: str, least: int | None, greatest: int | None, *, allow_ragged: bool = False
) -> int | None:
    """Return the common length of a column's arrays. With ``allow_ragged``, None if lengths differ or are 0.

    Raises:
        DataError: if it differs, is 0 or is null and ``allow_ragged`` is not set.
    """
    if allow_ragged and (least is None or least != greatest or not greatest):
        return None
    if least is None or greatest is None:
        raise DataError(f"Column {name!r} is null in every row.")
    if least != greatest:
        raise ColumnMismatchError(
            f"Column {name!r} has arrays of {least} to {greatest} elements; all must have the same length. "
            "Set paddingValue, or pad or cut them before."
        )
    if not greatest:
        raise DataError(f"The arrays in column {name!r} are empty.")
    return int(greatest)


def _has_null_elements(column: Column, depth: int) -> Column:
    """Whether an array holds nulls at one of its levels; null for an array that is null."""
    from pyspark.sql import functions as F

    has_null = F.exists(column, lambda element: element.isNull())
    if depth == 1:
        return has_null
    # flatten returns null if one of the arrays is null, which the level above has found.
    return has_null | _has_null_elements(F.flatten(column), depth - 1)


@dataclass(frozen=True)
class _Nulls:
    """A column with nulls.

    Attributes:
        column: its name.
        text: clause that says how many rows have nulls, and shows the first one.
        in_rows: whether the column is null in rows, and not only elements of its arrays.
    """

    column: str
    text: str
    in_rows: bool


def _nulls_of_rows(name: str, num_null_rows: int, num_rows: int, first: str) -> _Nulls:
    return _Nulls(
        name, f"Column {name!r} is null in {num_null_rows} of {num_rows} rows, first in {first}.", True
    )


def _nulls_of_elements(name: str, num_null_rows: int, num_rows: int, first: str) -> _Nulls:
    text = f"Column {name!r} has arrays with null elements in {num_null_rows} of {num_rows} rows, first in {first}."
    return _Nulls(name, text, False)


def _nulls_error(faults: Sequence[_Nulls]) -> DataError:
    texts = [fault.text for fault in faults[:_MOST_SHOWN]]
    if len(faults) > _MOST_SHOWN:
        texts.append(f"{len(faults) - _MOST_SHOWN} more columns have nulls.")
    names = [fault.column for fault in faults if fault.in_rows]
    if not names:
        texts.append("Fill them, or leave the rows out.")
    elif len(names) > _MOST_SHOWN:
        texts.append("Fill those values, or leave the rows out with df.dropna().")
    else:
        texts.append(f"Fill those values, or leave the rows out with df.dropna(subset={names!r}).")
    return DataError(" ".join(texts))


_MOST_SHOWN = 10
"""Maximum number of columns that an error describes."""
