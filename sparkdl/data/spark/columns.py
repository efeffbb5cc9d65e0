"""Checks that a DataFrame and its columns can be fed to ranks, from its type and schema alone.

:func:`check_frame` accepts a DataFrame of classic Spark or Spark Connect that is not a stream, and imports no pyspark.
The values become arrays in :mod:`sparkdl.data.dataset.arrow`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

from sparkdl.data.dataset.arrow import ENCODED_FIELDS, IMAGE_FIELDS
from sparkdl.data.dataset.dataset import Column, missing_column_error
from sparkdl.errors import DataError
from sparkdl.spark.session import is_session_stopped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructField, StructType


def check_types(
    schema: StructType, columns: Sequence[str], *, numbers_only: bool = False
) -> list[StructField]:
    """Return the fields of the columns, each once and in the order given.

    Args:
        schema: schema of the DataFrame.
        columns: names of its columns.
        numbers_only: whether anything but numbers, booleans, vectors and arrays of them is refused.

    Raises:
        DataError: if a column is missing, several columns have its name, or its type cannot be fed; the message says
            what to do instead.
    """
    if not columns:
        raise DataError("No columns were given; name at least one.")
    fields = {field.name: field for field in schema.fields}
    num_fields = Counter(field.name for field in schema.fields)
    for name in columns:
        if name not in fields:
            raise missing_column_error(name, list(fields))
        if num_fields[name] > 1:
            raise ambiguous_column_error(name, num_fields[name])
    chosen = [fields[name] for name in dict.fromkeys(columns)]
    faults = type_faults(chosen, numbers_only=numbers_only)
    if faults:
        raise faults_error([*faults.values()])
    return chosen


def type_faults(fields: Iterable[StructField], *, numbers_only: bool = False) -> dict[str, str]:
    """Return what is wrong with the types of columns, and what to do, by name; see :func:`check_types`."""
    faults = {}
    for field in fields:
        held = f"Column {field.name!r} holds {field.dataType.simpleString()}"
        if field.dataType.simpleString() == "void":
            faults[field.name] = (
                f"{held}: no row has a value. Cast the column to the type that it should have, or leave it out."
            )
            continue
        if not numbers_only and stored_type(field.dataType) is None:
            faults[field.name] = (
                f"{held}, which the feed has no form for. Select what is inside it as columns of their own."
            )
        if numbers_only and (remedy := _remedy(field.dataType)):
            faults[field.name] = f"{held}, not numbers. {remedy}"
    return faults


def faults_error(faults: Sequence[str]) -> DataError:
    """Return one error for the faults of several columns, each a sentence or two; ten are shown."""
    more = len(faults) - _MOST_SHOWN
    end = [f"{more} more columns have such faults."] if more > 0 else []
    return DataError(" ".join([*faults[:_MOST_SHOWN], *end]))


_MOST_SHOWN = 10


def check_case(df: DataFrame, columns: Iterable[str]) -> None:
    """Check that no other column has the name of one of ``columns`` in another case, if the session ignores case.

    Raises:
        DataError: if there are any, because Spark cannot tell which is meant.
    """
    available = df.columns
    if len({name.lower() for name in available}) == len(set(available)):
        return
    if str(df.sparkSession.conf.get("spark.sql.caseSensitive", "false")).lower() == "true":
        return
    for name in columns:
        same = sorted({other for other in available if other.lower() == name.lower()})
        if len(same) > 1:
            raise DataError(
                f"The DataFrame has the columns {', '.join(map(repr, same))}, and Spark cannot tell which is meant, as "
                "it does not distinguish upper and lower case. Drop or rename all but one of them, as with "
                "df.toDF(*names), or set spark.sql.caseSensitive to true."
            )


def ambiguous_column_error(name: str, num_columns: int) -> DataError:
    """Return the error for a name that several columns of a DataFrame have, for example after a join."""
    return DataError(
        f"The DataFrame has {num_columns} columns with the name {name!r}, and Spark cannot tell which is meant. Drop "
        "or rename all but one of them, as with df.toDF(*names)."
    )


def is_vector(data_type: DataType) -> bool:
    """Whether values of the type are vectors of pyspark.ml or pyspark.mllib."""
    # By name, as importing pyspark.mllib fails where only the Connect client is installed.
    return type(data_type).__name__ == "VectorUDT"


def is_encoded(data_type: DataType) -> bool:
    """Whether values of the type are encoded images or sounds as Hugging Face's Parquet files have them."""
    from pyspark.sql.types import BinaryType, StructType

    return (
        isinstance(data_type, StructType)
        and tuple(sorted(data_type.names)) == ENCODED_FIELDS
        and isinstance(data_type["bytes"].dataType, BinaryType)
    )


def with_bytes(df: DataFrame, fields: Sequence[StructField]) -> DataFrame:
    """Return a DataFrame with the encoded images and sounds of some columns as their bytes."""
    from pyspark.sql import functions as F

    names = [field.name for field in fields if is_encoded(field.dataType)]
    return df.withColumns({name: F.col(quote(name)).getField("bytes") for name in names}) if names else df


def array_depth(data_type: DataType) -> int:
    """Return how many arrays are nested around the numbers; a vector counts as one, a scalar as none."""
    from pyspark.sql.types import ArrayType

    depth = int(is_vector(data_type))
    while isinstance(data_type, ArrayType):
        depth, data_type = depth + 1, data_type.elementType
    return depth


def stored_type(data_type: DataType) -> tuple[str, str, int] | None:
    """Return the kind and NumPy dtype of a column's elements, and the number of arrays around them; None if unknown."""
    from pyspark.sql import types as T

    depth, element = array_depth(data_type), data_type
    if is_vector(data_type):
        return "number", "float64", depth
    while isinstance(element, T.ArrayType):
        element = element.elementType
    stored: dict[type[DataType], tuple[str, str]] = {
        T.BooleanType: ("number", "bool"),
        T.ByteType: ("number", "int8"),
        T.ShortType: ("number", "int16"),
        T.IntegerType: ("number", "int32"),
        T.LongType: ("number", "int64"),
        T.FloatType: ("number", "float32"),
        T.DoubleType: ("number", "float64"),
        T.StringType: ("string", "object"),
        T.CharType: ("string", "object"),
        T.VarcharType: ("string", "object"),
        T.BinaryType: ("binary", "object"),
        T.DecimalType: ("decimal", "object"),
        T.DateType: ("date", "datetime64[D]"),
        T.TimestampType: ("timestamp", "datetime64[us]"),
        T.TimestampNTZType: ("timestamp", "datetime64[us]"),
    }
    if type(element) in stored:
        return (*stored[type(element)], depth)
    if is_encoded(element):
        return "binary", "object", depth
    if isinstance(element, T.StructType) and tuple(element.names) == IMAGE_FIELDS and not depth:
        return "image", "object", depth
    return None


def columns_of(fields: Iterable[StructField]) -> list[Column]:
    """Return the columns that the types describe: kind, dtype and number of array levels.

    All lengths are 0, as types do not give them.
    """
    columns = []
    for field in fields:
        stored = stored_type(field.dataType)
        assert stored is not None, "types are checked before"
        kind, dtype, depth = stored
        columns.append(Column(name=field.name, kind=kind, dtype=dtype, shape=(0,) * depth))
    return columns


def without_decimals(data_type: DataType) -> DataType:
    """Return the type with decimals replaced by doubles, as Spark ML treats them, also inside arrays."""
    from pyspark.sql import types as T

    if isinstance(data_type, T.ArrayType):
        return T.ArrayType(without_decimals(data_type.elementType), data_type.containsNull)
    return T.DoubleType() if isinstance(data_type, T.DecimalType) else data_type


def with_doubles(df: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Return a DataFrame with the decimals of some columns cast to doubles; missing columns are ignored."""
    from pyspark.sql import functions as F

    names = frozenset(columns)
    wanted = [(field, without_decimals(field.dataType)) for field in df.schema.fields if field.name in names]
    casts = {
        field.name: F.expr(f"cast({quote(field.name)} as {data_type.simpleString()})")
        for field, data_type in wanted
        if data_type != field.dataType
    }
    return df.withColumns(casts) if casts else df


def check_like(field: StructField, column: Column) -> None:
    """Check that a column of a DataFrame holds the same kind of values as a dataset's column; number types may differ.

    Instants and clock times without a time zone are of different kinds.

    Raises:
        DataError: if it does not.
    """
    stored = stored_type(field.dataType)
    kind = column.element[0] if column.kind == "ragged" else column.kind
    depth = len(column.lengths or column.shape)
    if stored is None or (stored[0], stored[2]) != (kind, depth):
        arrays = "arrays of " * depth
        raise DataError(
            f"Column {field.name!r} holds {field.dataType.simpleString()}, and the model was trained on "
            f"{arrays}{kind}{'s' if kind == 'number' else ' values'}. Bring it to that type."
        )
    if kind == "timestamp" and column.is_utc == ("timestamp_ntz" in field.dataType.simpleString()):
        holds, trained = "instants", "clock times without a time zone (timestamp_ntz)"
        if column.is_utc:
            holds, trained = "clock times without a time zone", "instants (timestamp)"
        raise DataError(
            f"Column {field.name!r} holds {field.dataType.simpleString()}, {holds}, and the model was trained on "
            f"{trained}. Cast it, after setting spark.sql.session.timeZone to the zone whose clock shows these times."
        )


def quote(name: str) -> str:
    """Return a column name in quotes, so that Spark takes it literally, including dots."""
    return "`" + name.replace("`", "``") + "`"


_CAST = "Cast it to a number, for instance with unix_timestamp."
_REMEDIES = {
    "number": "",
    "string": "Encode strings as numbers first, for instance with StringIndexer. As features TorchClassifier and "
    "TorchRegressor take strings as categories, TextClassifier as texts, and TorchEstimator with prepareFeatures, a "
    "function that makes numbers of them (docs/inputs.md).",
    "date": _CAST,
    "timestamp": _CAST,
    "binary": "Decode it into an array of numbers first. As features ImageClassifier takes encoded images, and "
    "TorchEstimator any bytes with prepareFeatures, a function that makes numbers of them.",
}
"""What to do about columns that are not numbers, by their kind; empty for those that are."""


def _remedy(data_type: DataType) -> str:
    """Return what to do about a type that is not numbers; empty if it is."""
    kind, *_ = stored_type(data_type) or ("",)
    return _REMEDIES.get(kind, "Turn it into numbers, a vector, or arrays of a fixed length.")


_MISSING = object()


def check_frame(df: Any, taker: str, *, of_streams: str = "") -> None:
    """Check that ``df`` is a DataFrame of classic Spark or Spark Connect, and not a stream, without a Spark job.

    Args:
        df: object to check.
        taker: function that takes the DataFrame, as its caller spells it.
        of_streams: end of the message about a stream, which says what takes a stream.

    Raises:
        DataError: if it is something else, or a stream.
    """
    # Not by hasattr, because Spark Connect asks the server for the schema.
    if any(inspect.getattr_static(df, name, _MISSING) is _MISSING for name in ("sparkSession", "schema")):
        actual = f"{type(df).__module__}.{type(df).__name__}"
        raise DataError(
            f"{taker} takes a Spark DataFrame, got {actual}. Read files with spark.read, and make one of other data "
            "with spark.createDataFrame(...)."
        )
    check_session(df, taker)
    if df.isStreaming:
        raise DataError(
            f"{taker} takes a DataFrame that ends, and this one is a stream. Read its source with spark.read, or call "
            f"{taker} on each batch that writeStream.foreachBatch(...) gives{of_streams}."
        )


def check_session(df: DataFrame, taker: str) -> None:
    """Check that the session of a DataFrame was not stopped; ``taker`` is as for :func:`check_frame`.

    Raises:
        DataError: if it was.
    """
    if is_session_stopped(df.sparkSession):
        raise DataError(
            f"{taker} takes a DataFrame of a running Spark session, and the session of this one was stopped. Make the "
            "DataFrame again with a new session."
        )
