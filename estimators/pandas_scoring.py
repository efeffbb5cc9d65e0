"""A function on Arrow arrays as a Spark function where Spark knows only those on pandas: before Spark 4.1.

Made on the *driver*, run in Spark's Python workers on the *executors*.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterator,
)  # at run time, as Spark reads the annotations of the functions it runs
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import Column

ScoreArrays = Callable[[Iterator[tuple[pa.Array, ...]]], Iterator[pa.Array]]


def udf_on_pandas(score_arrays: ScoreArrays, returned: str, *, num_columns: int) -> Callable[..., Column]:
    """Return what makes a column of feature columns.

    A function on pandas cannot return a struct that is null, so it returns arrays of one struct or none.

    Args:
        score_arrays: of batches of columns, the predictions of each.
        returned: Spark's type of them.
        num_columns: how many feature columns there are.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.functions import pandas_udf

    make_udf: Any = pandas_udf
    is_struct = returned.startswith("struct<")

    def score_one(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        for predictions in score_arrays((_to_arrow(column),) for column in batches):
            yield _to_pandas(predictions)

    def score(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        for predictions in score_arrays(tuple(map(_to_arrow, columns)) for columns in batches):
            yield _to_pandas(predictions)

    udf = make_udf(
        score_one if num_columns == 1 else score, f"array<{returned}>" if is_struct else returned
    ).asNondeterministic()
    if not is_struct:
        made: Callable[..., Column] = udf
        return made
    return lambda *columns: F.get(udf(*columns), F.lit(0))


def _to_arrow(column: pd.Series | pd.DataFrame) -> pa.Array:
    """A column as Arrow; Spark gives a struct as a DataFrame, and one that is null as a row of nulls."""
    if isinstance(column, pd.Series):
        return pa.Array.from_pandas(column)
    fields = [pa.Array.from_pandas(column[name]) for name in column.columns]
    is_null = column.isna().all(axis="columns").to_numpy()
    return pa.StructArray.from_arrays(fields, names=list(column.columns), mask=pa.array(is_null))


def _to_pandas(predictions: pa.Array) -> pd.Series:
    if not pa.types.is_struct(predictions.type):
        return predictions.to_pandas()
    return pd.Series([[] if row is None else [row] for row in predictions.to_pylist()], dtype=object)
