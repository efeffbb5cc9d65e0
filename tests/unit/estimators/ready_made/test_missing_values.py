"""Tables with missing values, dates and timestamps: fits, predictions and served models, on rows in a folder."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import Column, ParquetFeed, scan_dataset
from sparkdl.errors import DataError
from sparkdl.estimators import TorchClassifier, TorchRegressor
from sparkdl.estimators.ready_made.estimator import answer_row
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel, load_model, save_model
from sparkdl.model.served_model import PyfuncModel
from tests.unit.estimators.fit_examples import learn

NUM_ROWS = 40
FEATURES = ["age", "count", "pair", "kind", "code", "day", "time", "flag"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    rng = np.random.default_rng(5)

    def holes(values):
        return [value if rng.random() > 0.3 else None for value in values]

    table = pa.table(
        {
            "age": pa.array([*holes(rng.normal(size=NUM_ROWS - 1).tolist()), float("nan")]),
            "count": pa.array(holes(rng.integers(0, 9, NUM_ROWS).tolist()), pa.int64()),
            "pair": pa.array(holes(rng.normal(size=(NUM_ROWS, 2)).tolist()), pa.list_(pa.float64())),
            "kind": holes(np.array(["ant", "bee", "cat"])[rng.integers(0, 3, NUM_ROWS)].tolist()),
            "code": pa.array(holes(rng.integers(3, 6, NUM_ROWS).tolist()), pa.int32()),
            "day": holes([date(2024, 1, 1) + timedelta(days=int(n)) for n in range(NUM_ROWS)]),
            "time": pa.array(
                holes([datetime(2024, 1, 1) + timedelta(hours=int(n)) for n in range(NUM_ROWS)]),
                pa.timestamp("us", "UTC"),
            ),
            "flag": holes((rng.random(NUM_ROWS) > 0.5).tolist()),
            "whole": rng.normal(size=NUM_ROWS),
            "large": pa.array(holes([2**60 + int(n) for n in range(NUM_ROWS)]), pa.int64()),
            "label": rng.integers(0, 2, NUM_ROWS),
            "price": rng.normal(100, 3, NUM_ROWS),
        }
    )
    folder = tmp_path_factory.mktemp("rows") / "rows"
    folder.mkdir()
    pq.write_table(table, folder / "part-0.parquet", row_group_size=15)
    return scan_dataset(str(folder), shapes={"pair": (2,)})


def estimator(**changes):
    return TorchClassifier(
        **{"featuresCol": FEATURES, "categoricalCols": ["code"], "handleInvalid": "impute", **changes}
    )


@pytest.fixture(scope="module")
def saved(dataset, tmp_path_factory):
    """An untrained model, after it was saved and loaded."""
    fit = learn(estimator(), dataset)
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(SavedModel(fit.spec.model, fit.signature), folder)
    return load_model(folder)


def rows_of(dataset, saved):
    columns = saved.signature.inputs.columns
    nulls = {column.name: None for column in columns}
    with ParquetFeed(dataset, columns=list(nulls), batch_size=NUM_ROWS, shuffle=False, nulls=nulls) as feed:
        (batch,) = feed.epoch(0)
    return batch


def test_scales_are_those_of_the_values_that_are_there(dataset):
    network = learn(estimator(featuresCol=["age", "whole", "count"], categoricalCols=[]), dataset).spec.model
    table = pq.read_table(dataset.url.removeprefix("file://")).to_pandas()
    expected = table[["age", "whole", "count"]].astype(float)
    np.testing.assert_allclose(network.mean, expected.mean())
    np.testing.assert_allclose(network.deviation, expected.std(ddof=0))
    assert network.indicators == [0, 2]  # "whole" lacks nothing


def test_every_way_of_prediction_gives_a_row_the_same(dataset, saved):
    batch = rows_of(dataset, saved)
    expected = Predictor(saved).answer(batch, ("probability",))["label"]["probability"]
    assert np.isfinite(expected).all()
    table = pq.read_table(dataset.url.removeprefix("file://"))
    frame = table.select(FEATURES).to_pandas()
    served = PyfuncModel(saved).predict(frame)
    np.testing.assert_allclose(np.stack(served["probability"]), expected, rtol=1e-6)
    records = table.select(FEATURES).to_pylist()
    for record in records:
        if record["time"] is not None:
            record["time"] = np.datetime64(record["time"].replace(tzinfo=None), "us")
    one_by_one = [answer_row(saved, record, "probability").toArray() for record in records]
    np.testing.assert_allclose(one_by_one, expected, rtol=1e-6)


def test_null_inside_an_array_of_one_row_is_imputed_as_in_a_request(saved):
    row = dict.fromkeys(FEATURES) | {"pair": [None, 2.0]}
    served = PyfuncModel(saved).predict(pd.DataFrame([row]))
    assert answer_row(saved, row, "probability").toArray().tolist() == list(served["probability"][0])


def test_served_rows_may_lack_everything(saved):
    missing = {name: [None] for name in FEATURES} | {"pair": [[None, 2.0]]}
    served = PyfuncModel(saved).predict(pd.DataFrame(missing))
    assert np.isfinite(served["probability"][0]).all()
    assert [
        column.dtype for column in saved.signature.inputs.columns if column.name in ("count", "flag")
    ] == [
        "float64",
        "float64",
    ]


def test_json_serves_instants_and_dates(saved):
    row = {"age": 1, "count": 2, "pair": [1, 2], "kind": "ant", "code": 4, "day": "2024-02-01", "flag": True}
    moment = datetime(2024, 2, 1, 10, tzinfo=timezone.utc)
    texts = PyfuncModel(saved).predict(pd.DataFrame([row | {"time": "2024-02-01T11:00:00+01:00"}]))
    times = PyfuncModel(saved).predict(pd.DataFrame([row | {"time": moment}]))
    assert list(texts["probability"][0]) == list(times["probability"][0])
    one = answer_row(
        saved,
        row | {"day": date(2024, 2, 1), "time": moment.astimezone().replace(tzinfo=None)},
        "probability",
    )
    assert one.toArray().tolist() == list(texts["probability"][0])


def test_one_column_of_floats_is_imputed_too(dataset):
    fit = learn(TorchRegressor(featuresCol="age", labelCol="price", handleInvalid="impute"), dataset)
    assert fit.signature.inputs.prepare is None
    saved = SavedModel(fit.spec.model.eval(), fit.signature)
    values = Predictor(saved).predict({"age": np.array([np.nan, 1.0])})["price"]
    assert np.isfinite(values).all()


def test_missing_values_are_refused_unless_they_are_imputed(dataset):
    with pytest.raises(DataError, match="Column 'age' has .* nulls"):
        learn(estimator(handleInvalid="error"), dataset)


def test_integer_categories_that_doubles_cannot_hold_are_refused_with_nulls(dataset):
    with pytest.raises(DataError, match=r"'large' may hold nulls, .* up to 2\*\*53"):
        learn(estimator(featuresCol=["large"], categoricalCols=["large"]), dataset)


def test_all_faulty_columns_are_in_one_error_before_rows_are_written():
    columns = [
        Column(name="blob", kind="binary", dtype="object"),
        Column(name="size", kind="number", dtype="float64"),
        Column(name="fine", kind="number", dtype="float64"),
        Column(name="days", kind="date", dtype="datetime64[D]", shape=(0,)),
    ]
    label = Column(name="class", kind="date", dtype="datetime64[D]")
    assert [
        fault.partition(",")[0].partition(".")[0]
        for fault in estimator(categoricalCols=["size"])._faults(columns, [label])
    ] == [
        "Column 'blob' holds binary values",
        "Column 'size' is to hold categories",
        "Column 'days' holds arrays of dates",
        "Column 'class' holds dates",
    ]
