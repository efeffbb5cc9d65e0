from __future__ import annotations

import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from sparkdl.data import Column
from sparkdl.data.spark.columns import check_like, check_types, without_decimals
from sparkdl.errors import DataError

TRAINED = {
    "a number": Column(name="x", dtype="float32"),
    "an array": Column(name="x", dtype="float32", shape=(4,)),
    "tokens": Column(name="x", dtype="object", kind="ragged", lengths=(None,), element=("number", "int64")),
    "a string": Column(name="x", dtype="object", kind="string"),
    "an instant": Column(name="x", dtype="datetime64[us]", kind="timestamp", is_utc=True),
    "a clock time": Column(name="x", dtype="datetime64[us]", kind="timestamp"),
    "instants": Column(
        name="x",
        dtype="object",
        kind="ragged",
        lengths=(None,),
        element=("timestamp", "datetime64[us]"),
        is_utc=True,
    ),
}
LIKE = [
    ("a number", T.LongType()),
    ("a number", T.BooleanType()),
    ("an array", T.ArrayType(T.DoubleType())),
    ("an array", VectorUDT()),
    ("tokens", T.ArrayType(T.IntegerType())),
    ("a string", T.StringType()),
    ("an instant", T.TimestampType()),
    ("a clock time", T.TimestampNTZType()),
    ("instants", T.ArrayType(T.TimestampType())),
]
UNLIKE = [
    ("a number", T.StringType(), "'x' holds string, and the model was trained on numbers"),
    ("a number", T.DecimalType(9, 2), r"'x' holds decimal\(9,2\), .* trained on numbers"),
    ("a number", T.ArrayType(T.DoubleType()), "'x' holds array<double>, .* trained on numbers"),
    ("an array", T.DoubleType(), "'x' holds double, .* trained on arrays of numbers"),
    ("tokens", T.ArrayType(T.ArrayType(T.LongType())), "trained on arrays of numbers"),
    ("a string", T.BinaryType(), "'x' holds binary, .* trained on string values"),
    ("an instant", T.TimestampNTZType(), "holds timestamp_ntz, clock times .* trained on instants"),
    ("a clock time", T.TimestampType(), "holds timestamp, instants, .* trained on clock times"),
    ("instants", T.ArrayType(T.TimestampNTZType()), "holds array<timestamp_ntz>, clock times"),
    ("a number", T.MapType(T.StringType(), T.LongType()), "'x' holds map<string,bigint>"),
]


def test_decimals_are_doubles_also_inside_of_arrays():
    decimal, double = T.DecimalType(20, 3), T.DoubleType()
    assert without_decimals(decimal) == double
    nested = without_decimals(T.ArrayType(T.ArrayType(decimal, containsNull=False)))
    assert nested == T.ArrayType(T.ArrayType(double, containsNull=False))
    for other in (T.LongType(), T.StringType(), VectorUDT(), T.ArrayType(T.FloatType())):
        assert without_decimals(other) == other


@pytest.mark.parametrize(("trained", "data_type"), LIKE)
def test_values_of_the_same_kind_are_accepted(trained, data_type):
    check_like(T.StructField("x", data_type), TRAINED[trained])


@pytest.mark.parametrize(("trained", "data_type", "message"), UNLIKE)
def test_columns_of_another_kind_are_refused_with_both_types(trained, data_type, message):
    with pytest.raises(DataError, match=message):
        check_like(T.StructField("x", data_type), TRAINED[trained])


@pytest.mark.parametrize(
    ("data_type", "message"),
    [
        (
            T.StringType(),
            "'x' holds string, not numbers. .* StringIndexer.* TorchClassifier .* TextClassifier .* prepareFeatures",
        ),
        (T.NullType(), "^Column 'x' holds void: no row has a value. Cast the column .* or leave it out.$"),
        (T.BinaryType(), "'x' holds binary, not numbers. Decode .* ImageClassifier .* prepareFeatures"),
    ],
)
def test_error_for_columns_that_are_no_numbers_names_the_alternatives(data_type, message):
    with pytest.raises(DataError, match=message):
        check_types(T.StructType([T.StructField("x", data_type)]), ["x"], numbers_only=True)
