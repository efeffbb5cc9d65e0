"""A row's prediction is the same whatever rows, settings and ways of calling the model are around it."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F
from torch import nn

import sparkdl.mlflow
from sparkdl.data import Column
from sparkdl.data.spark.columns import quote
from sparkdl.estimators import TorchEstimator, TorchModel
from sparkdl.model.inputs import ModelInput, ModelInputs
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature

pytestmark = [pytest.mark.no_cluster_needed, pytest.mark.any_spark_will_do]

COLUMNS = (
    Column(name="id", dtype="int64"),
    Column(name="a.b", dtype="bool"),
    Column(name="with `blanks` ", dtype="float64"),
    Column(name="Zeit", dtype="datetime64[us]", kind="timestamp", is_utc=True),
    Column(name="tags", dtype="float64", shape=(2,)),
    Column(name="text", dtype="object", kind="string"),
    Column(name="day", dtype="datetime64[D]", kind="date"),
)
ID, FLAG, NUMBER, TIME, TAGS, TEXT, DAY = (column.name for column in COLUMNS)
SCHEMA = ["bigint", "boolean", "double", "bigint", "array<double>", "string", "int"]
NUM_NUMBERS = 10


def numbers_of(columns: dict[str, Any]) -> dict[str, Any]:
    """Numbers that together hold every bit of a row, so that no change of a value goes unnoticed."""
    time, day = columns[TIME].astype(np.int64), columns[DAY].astype(np.int64)
    parts = [columns[ID] // 10**6, columns[ID] % 10**6, columns[FLAG], columns[NUMBER]]
    parts += [time // 10**6, time % 10**6, columns[TAGS][:, 0], columns[TAGS][:, 1]]
    parts += [np.array([hash_of(text) for text in columns[TEXT]], np.int64), day]
    return {"numbers": np.stack([np.asarray(part, np.float64) for part in parts], axis=1)}


def hash_of(text: str) -> int:
    return sum(ord(letter) * (index + 1) for index, letter in enumerate(text))


def expected(row: list[Any]) -> list[float] | None:
    if None in row:
        return None
    columns = [np.array([value]) for value in row]
    columns[3], columns[6] = columns[3].view("datetime64[us]"), columns[6].astype("datetime64[D]")
    named = dict(zip((column.name for column in COLUMNS), columns, strict=True))
    return numbers_of(named)["numbers"][0].tolist()


def make_model() -> TorchModel:
    inputs = ModelInputs(
        columns=COLUMNS, inputs=(ModelInput(name="numbers", dtype="float64"),), prepare=numbers_of
    )
    output = ModelOutput(name="y", kind="value", shape=(NUM_NUMBERS,))
    model = TorchModel(SavedModel(nn.Identity(), ModelSignature(inputs=inputs, outputs=(output,))))
    return model.setFeaturesCol([column.name for column in COLUMNS])


@pytest.fixture(scope="module")
def ways(spark, tmp_path_factory):
    """The model of Spark ML, the pyfunc and the function of Spark SQL."""
    path = str(tmp_path_factory.mktemp("same row") / "model")
    model = make_model()
    sparkdl.mlflow.save_model(model, path)
    udf = mlflow.pyfunc.spark_udf(spark, path, env_manager="local", result_type="prediction array<double>")
    return model, mlflow.pyfunc.load_model(path), udf


NUMBERS = st.floats(-1e9, 1e9) | st.integers(-5, 5).map(float)
MICROS = st.integers(-4 * 10**15, 4 * 10**15) | st.sampled_from(
    [
        1604210400 * 10**6,
        1604214000 * 10**6,
    ]  # both half past one in New York, and both ten past ten in Lisbon
)
VALUES = (
    st.integers(-(2**62), 2**62) | st.integers(1700000000000000001, 1700000000000000009),
    st.booleans(),
    NUMBERS,
    MICROS,
    st.lists(NUMBERS, min_size=2, max_size=2),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5),
    st.integers(-(10**5), 10**5),
)
ROWS = st.lists(st.tuples(*(st.none() | values for values in VALUES)).map(list), min_size=1, max_size=7)
COMPLETE_ROWS = st.lists(st.tuples(*VALUES).map(list), min_size=1, max_size=4)
ZONES = ("UTC", "Asia/Tokyo", "America/New_York", "America/St_Johns", "Africa/Monrovia")


# An example takes four seconds.
@settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_row_has_one_prediction_in_every_company_and_by_every_way(spark, ways, data):
    compare_ways(spark, ways, data)


@pytest.mark.slow
@settings(max_examples=24, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_rows_have_one_prediction_in_every_company_and_by_every_way(spark, ways, data):
    compare_ways(spark, ways, data)


def compare_ways(spark, ways, data):
    model, pyfunc, udf = ways
    rows, complete = data.draw(ROWS), data.draw(COMPLETE_ROWS)
    rows += complete
    before = {name: spark.conf.get(name) for name in ("spark.sql.session.timeZone", BATCH_ROWS)}
    try:
        spark.conf.set("spark.sql.session.timeZone", data.draw(st.sampled_from(ZONES)))
        spark.conf.set(BATCH_ROWS, data.draw(st.sampled_from([1, 2, 3, 10000])))
        model.setPredictionBatchSize(data.draw(st.sampled_from([1, 2, 100])))
        df = frame_of(spark, rows, data.draw(st.sampled_from([1, 2, 3])))
        found = model.transform(df).select("row", "prediction").collect()
        assert {row.row: row.prediction for row in found} == dict(enumerate(map(expected, rows)))

        told = list(map(expected, complete))
        df = frame_of(spark, complete, 1).withColumn(TIME, F.unix_micros(F.col(TIME)))
        arguments = F.struct(*(F.col(quote(column.name)) for column in COLUMNS))
        found = df.select("row", udf(arguments).getField("prediction").alias("prediction")).collect()
        assert {row.row: row.prediction for row in found} == dict(enumerate(told))
        frame = df.orderBy("row").toPandas()
        assert pyfunc.predict(frame)["prediction"].map(list).tolist() == told
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
    if HAS_ANY_TYPE:
        zone = data.draw(st.sampled_from(ZONES))
        frame[TIME] = pd.to_datetime(frame[TIME], unit="us", utc=True).dt.tz_convert(zone)
        assert pyfunc.predict(frame)["prediction"].map(list).tolist() == told


HAS_ANY_TYPE = hasattr(mlflow.types.schema, "AnyType")
"""MLflow before 2.19 refuses whole numbers in arrays of doubles, and takes instants only as microseconds."""
BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def frame_of(spark, rows, num_partitions):
    schema = ", ".join(f"{quote(column.name)} {kind}" for column, kind in zip(COLUMNS, SCHEMA, strict=True))
    df = spark.createDataFrame([(index, *row) for index, row in enumerate(rows)], f"row bigint, {schema}")
    return (
        df.repartition(num_partitions)
        .withColumn(TIME, F.expr(f"timestamp_micros({TIME})"))
        .withColumn(DAY, F.date_add(F.lit("1970-01-01").cast("date"), F.col(DAY)))
    )


@pytest.mark.skipif(not HAS_ANY_TYPE, reason="MLflow before 2.19 refuses whole numbers in arrays of doubles")
@settings(max_examples=30)
@given(rows=COMPLETE_ROWS, form=st.sampled_from(["dataframe_records", "dataframe_split"]))
def test_a_row_has_the_same_prediction_over_http(ways, rows, form):
    from mlflow.pyfunc import scoring_server

    _, pyfunc, _ = ways
    names = [column.name for column in COLUMNS]
    values = [[as_json(name, value) for name, value in zip(names, row, strict=True)] for row in rows]
    body: Any = {"columns": names, "data": values}
    if form == "dataframe_records":
        body = [dict(zip(names, row, strict=True)) for row in values]
    answer = scoring_server.invocations(
        json.dumps({form: body}), "application/json", pyfunc, pyfunc.metadata.get_input_schema()
    )
    found = [prediction["prediction"] for prediction in json.loads(answer.response)["predictions"]]
    assert found == list(map(expected, rows))


def as_json(name: str, value: Any) -> Any:
    """A value as JavaScript and Go write it: whole numbers without a fraction, times in UTC."""
    if isinstance(value, list):
        return [as_json(name, item) for item in value]
    if name == TIME:
        text = str(np.int64(value).view("datetime64[us]"))
        return f"{text}Z"
    if name == DAY:
        return str(np.datetime64(value, "D"))
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize("way", ["toPandas", "spark_udf"])
def test_clock_times_of_the_session_are_refused_for_instants(spark, ways, way):
    _, pyfunc, udf = ways
    df = frame_of(spark, [[1, True, 0.5, 0, [1.0, 2.0], "", 0]], 1).drop("row")
    with pytest.raises(
        Exception, match=r"(?s)'Zeit' holds the clock time .*unix_micros|Incompatible input types.*Zeit"
    ):
        if way == "toPandas":
            pyfunc.predict(df.toPandas())
        else:
            df.select(udf(F.struct(*map(quote, df.columns)))).collect()


@pytest.mark.parametrize(
    "kind",
    [
        "bigint",
        pytest.param("double", marks=pytest.mark.slow),
        "date",
        pytest.param("timestamp", marks=pytest.mark.slow),
    ],
)
def test_a_null_inside_an_array_is_an_error_on_every_spark(spark, kind):
    stored = {
        "bigint": ("number", "int64"),
        "double": ("number", "float64"),
        "date": ("date", "datetime64[D]"),
    }
    what, dtype = stored.get(kind, ("timestamp", "datetime64[us]"))
    column = Column(name="v", dtype=dtype, kind=what, shape=(2,), is_utc=kind == "timestamp")
    inputs = ModelInputs(
        columns=(column,), inputs=(ModelInput(name="v", dtype="float64"),), prepare=as_numbers
    )
    signature = ModelSignature(inputs=inputs, outputs=(ModelOutput(name="y", kind="value", shape=(2,)),))
    model = TorchModel(SavedModel(nn.Identity(), signature)).setFeaturesCol("v")
    values = "(array(1, 2)), (null), (array(3, null))".replace("array(3, null)", "array(3, 4)")
    cast = {"date": "date_from_unix_date(cast(x as int))", "timestamp": "timestamp_micros(x)"}.get(
        kind, f"cast(x as {kind})"
    )
    df = spark.sql(f"select transform(v, x -> {cast}) as v from values {values} as t(v)").coalesce(1)
    assert [row.prediction for row in model.transform(df).collect()] == [[1.0, 2.0], None, [3.0, 4.0]]
    broken = df.withColumn("v", F.expr("transform(v, (x, i) -> if(i = 1, null, x))"))
    with pytest.raises(Exception, match="Column 'v' has .*null"):
        model.transform(broken).collect()


def as_numbers(columns: dict[str, Any]) -> Any:
    return (
        columns["v"].astype(np.float64) if columns["v"].dtype.kind != "M" else columns["v"].astype(np.int64)
    )


def hours(columns: dict[str, Any]) -> Any:
    return np.stack([columns[name].astype(np.int64) / 3.6e9 for name in ("t", "clock")], axis=1)


def test_a_fit_and_transform_see_the_same_instants(spark, tmp_path):
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
        df = spark.range(8).selectExpr(
            "timestamp_micros(id * 10800000000) as t",
            "timestamp_ntz'1970-01-01 00:00:00' + make_dt_interval(0, cast(id as int)) as clock",
            "cast(id as double) as y",
        )
        torch.manual_seed(0)
        estimator = TorchEstimator(
            model=nn.Linear(2, 1),
            loss=nn.MSELoss(),
            optimizer=partial(torch.optim.SGD, lr=1e-6),
            featuresCol=["t", "clock"],
            labelCol="y",
            prepareFeatures=hours,
            epochs=1,
            batchSize=8,
            numWorkers=1,
            store=str(tmp_path),
            tracking="off",
        )
        model = estimator.fit(df)
        found = {row.y: row.prediction for row in model.transform(df).collect()}
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert [column.is_utc for column in model.saved.signature.inputs.columns] == [True, False]
    told = model.module(torch.tensor([[3.0 * index, float(index)] for index in range(8)]))
    assert [found[float(index)] for index in range(8)] == pytest.approx(told.flatten().tolist(), rel=1e-5)
