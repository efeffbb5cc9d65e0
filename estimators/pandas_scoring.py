"""A function on Arrow arrays as a Spark function where Spark knows only those on pandas: before Spark 4.1.

Made on the *driver*, run in Spark's Python workers on the *executors*.
"""

from __future__ import annotations

import operator
from collections.abc import (
    Callable,
    Iterator,
)  # at run time, as Spark reads the annotations of the functions it runs
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import Column

    from sparkdl.estimators.packed_features import Packing

ScoreArrays = Callable[[Iterator[tuple[pa.Array, ...]]], Iterator[pa.Array]]


def udf_on_pandas(score_arrays: ScoreArrays, returned: str, packing: Packing | None) -> Callable[..., Column]:
    """Return what makes a column of feature columns.

    pandas has one word for null and NaN, so that which rows have a null travels as a column of its own, and a NaN among
    features stays one. A null inside an array becomes NaN, and a prediction that is NaN becomes null, which nobody
    can tell apart there. A function on pandas cannot return a struct that is null; it returns arrays of one or none.

    Args:
        score_arrays: of batches of columns, the predictions of each.
        returned: Spark's type of them.
        packing: how all feature columns go to Python as one, if they do.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.functions import pandas_udf

    make_udf: Any = pandas_udf
    is_struct = returned.startswith("struct<")

    def score(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        for predictions in score_arrays(
            _to_arrow(columns, is_packed=packing is not None) for columns in batches
        ):
            yield _to_pandas(predictions)

    udf = make_udf(score, f"array<{returned}>" if is_struct else returned).asNondeterministic()

    def scored(*features: Column) -> Column:
        if packing is None:
            is_absent = reduce(operator.or_, (feature.isNull() for feature in features))
        else:
            (packed,) = features
            is_absent = F.exists(packed, lambda number: number.isNull())
        column: Column = udf(*features, is_absent)
        return F.get(column, F.lit(0)) if is_struct else column

    return scored


def _to_arrow(columns: tuple[pd.Series | pd.DataFrame, ...], *, is_packed: bool) -> tuple[pa.Array, ...]:
    """The feature columns of a batch; the last of what comes says which rows have a null."""
    *features, flags = columns
    absent = flags.to_numpy(dtype=bool)
    if is_packed:
        (rows,) = features
        return (_numbers_of_rows(rows, absent),)
    return tuple(_column(feature, absent) for feature in features)


def _column(column: pd.Series | pd.DataFrame, absent: npt.NDArray[np.bool_]) -> pa.Array:
    """A column with null in the rows that are absent; Spark gives a struct as a DataFrame."""
    if isinstance(column, pd.Series):
        return pa.array(column.to_numpy(), mask=absent, from_pandas=False)
    fields = [pa.Array.from_pandas(column[name]) for name in column.columns]
    return pa.StructArray.from_arrays(fields, names=list(column.columns), mask=pa.array(absent))


def _numbers_of_rows(rows: pd.Series, absent: npt.NDArray[np.bool_]) -> pa.Array:
    """Arrays of equally many numbers, which are all null in the rows that are absent."""
    matrix = np.stack(rows.to_numpy()) if len(rows) else np.zeros((0, 1))
    width = matrix.shape[1]
    numbers = pa.array(matrix.reshape(-1), mask=np.repeat(absent, width), from_pandas=False)
    return pa.ListArray.from_arrays(np.arange(0, width * len(rows) + 1, width, dtype=np.int32), numbers)


def _to_pandas(predictions: pa.Array) -> pd.Series:
    if not pa.types.is_struct(predictions.type):
        return predictions.to_pandas()
    return pd.Series([[] if row is None else [row] for row in predictions.to_pylist()], dtype=object)
