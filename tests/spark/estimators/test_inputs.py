"""Several columns of many kinds through Spark: fitted, applied, saved and loaded."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sparkdl.errors import DataError, ParamError, RankError
from sparkdl.estimators import TorchModel
from tests.spark.estimators.estimator_examples import make_estimator

KINDS = ("apple", "pear", "plum")


class Mixed(nn.Module):
    """A model of tokens of any length, numbers decoded from bytes, and a scalar; it predicts a kind and a size."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, padding_idx=0)
        self.kind, self.size = nn.Linear(7, 3), nn.Linear(7, 1)

    def forward(self, *, tokens, pair, age):
        joined = torch.cat([self.table(tokens).sum(dim=1), pair, age], dim=1)
        return {"size": self.size(joined), "kind": self.kind(joined)}


def from_bytes(columns):
    pair = np.stack([np.frombuffer(content, np.float32) for content in columns["blob"]])
    return {"tokens": columns["tokens"], "pair": pair, "age": np.float32(columns["age"])[:, None]}


@pytest.fixture(scope="module")
def rows(spark):
    rng = np.random.default_rng(0)
    number = rng.integers(0, 3, 90)
    return spark.createDataFrame(
        [
            (
                index,
                [1 + int(token) for token in rng.integers(0, 9, 1 + index % 4)],
                bytearray(rng.normal(kind, 0.3, 2).astype(np.float32).tobytes()),
                float(index),
                KINDS[kind],
                float(kind),
            )
            for index, kind in enumerate(number.tolist())
        ],
        "id long, tokens array<int>, blob binary, age double, kind string, size double",
    ).repartition(2, "id")


@pytest.mark.slow_elsewhere
def test_columns_of_many_kinds_and_two_labels_are_fitted_and_applied(rows, tmp_path):
    torch.manual_seed(0)
    estimator = make_estimator(
        tmp_path,
        model=Mixed(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        loss=[nn.CrossEntropyLoss(), nn.MSELoss()],
        featuresCol=["tokens", "blob", "age"],
        passFeaturesBy="name",
        paddingValue=0,
        prepareFeatures=lambda columns: from_bytes({**columns, "age": columns["age"] / 100}),
        labelCol=["kind", "size"],
        lossWeights=[1.0, 0.1],
        epochs=15,
    )
    model = estimator.fit(rows)
    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))
    scored = loaded.transform(rows)
    assert scored.schema["prediction"].dataType.simpleString() == "struct<kind:string,size:double>"
    found = {row["id"]: row for row in scored.collect()}
    assert len(found) == 90
    right = sum(row["prediction"]["kind"] == row["kind"] for row in found.values())
    assert right >= 80
    assert np.mean([abs(row["prediction"]["size"] - row["size"]) for row in found.values()]) < 0.5
    with_null = rows.selectExpr("if(id = 3, null, tokens) as tokens", "blob", "age", "id")
    (null,) = model.transform(with_null).filter("prediction is null").select("id").collect()
    assert null["id"] == 3


@pytest.mark.any_spark_will_do
def test_ranks_of_a_fit_on_plain_rows_load_neither_pandas_nor_petastorm(frame, tmp_path):
    driver, folder = os.getpid(), tmp_path / "loaded"
    folder.mkdir()

    class NotesModules(nn.Linear):  # pickled by value: this module imports pyspark
        def forward(self, features):
            if os.getpid() != driver:
                loaded = [name for name in ("pandas", "petastorm", "pyspark") if name in sys.modules]
                finders = [finder for finder in sys.meta_path if "petastorm" in repr(finder)]
                (folder / str(os.getpid())).write_text(f"{loaded} {finders}")
            return super().forward(features)

    make_estimator(tmp_path, model=NotesModules(4, 3), epochs=1).fit(frame)
    assert [path.read_text() for path in folder.iterdir()] == ["[] []"] * 2


class Recurrent(nn.Module):
    """A model that computes a weight from others, and keeps weights in a list."""

    def __init__(self):
        super().__init__()
        self.lstm = weight_norm(nn.LSTM(4, 8), "weight_hh_l0")
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.lstm(x[None])[0][0])


@pytest.mark.slow  # tests/unit/estimators/fit/test_labels.py has the claim daily
@pytest.mark.any_spark_will_do
def test_labels_param_defines_the_classes_in_order_although_rows_lack_one(frame, tmp_path):
    torch.manual_seed(0)
    labels = ["plum", "apple", "none such", "pear"]
    named = frame.coalesce(1).withColumn(
        "kind", F.element_at(F.array(*map(F.lit, KINDS)), F.col("digit") + 1)
    )
    fold = named.filter("kind != 'plum'")
    estimator = make_estimator(
        tmp_path,
        model=Recurrent(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        labelCol="kind",
        labels=labels,
        probabilityCol="probability",
        numWorkers=1,
        epochs=1,
    )
    model = estimator.fit(fold)
    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))
    assert model.labels == loaded.labels == labels
    found = loaded.transform(named).select("kind", "prediction", "probability").collect()
    assert all(row["prediction"] == labels[int(row["probability"].argmax())] for row in found)
    told = [row["prediction"] == row["kind"] for row in found if row["kind"] != "plum"]
    assert np.mean(told) > 0.8
    with pytest.raises(RankError, match="Column 'kind' holds 'plum', which is none") as caught:
        estimator.copy({estimator.labels: labels[1:], estimator.model: nn.Linear(4, 3)}).fit(named)
    assert caught.value.rank == 0
    assert isinstance(caught.value.__cause__, DataError)
    assert caught.value.__cause__.position == "epoch 1, step 1"


@pytest.mark.any_spark_will_do
def test_arrays_of_different_lengths_want_a_padding_value(rows, tmp_path):
    with pytest.raises(DataError, match="'tokens' has arrays of 1 to 4 elements.*paddingValue"):
        make_estimator(tmp_path, featuresCol="tokens", labelCol="size").fit(rows)


@pytest.mark.any_spark_will_do
def test_parquet_files_are_fitted_on_in_place(frame, tmp_path):
    frame.select("image", "digit").write.parquet(str(tmp_path / "rows"))
    estimator = make_estimator(tmp_path, epochs=1, keepRowsSeconds=3600)
    model = estimator.fit_on_parquet(tmp_path / "rows")
    assert model.history[0].rows == frame.count()
    assert not list((tmp_path / "store").glob("*/*.parquet"))


@pytest.mark.any_spark_will_do
def test_names_of_columns_are_taken_as_they_are(frame, tmp_path):
    name = "image.raw `a`"
    # Decimals are accepted as numbers, also in arrays.
    named = frame.withColumn(name, F.col("image").cast("array<decimal(20,15)>")).drop("image")
    # In Spark ML, an empty weightCol means none.
    model = make_estimator(tmp_path, featuresCol=name, weightCol="", epochs=1).fit(named)
    expected = model.copy({model.featuresCol: "image"}).transform(frame).select("id", "prediction").collect()
    assert model.transform(named).select("id", "prediction").collect() == expected
    with pytest.raises(ParamError, match="predictionBatchSize must be at least 1, got 0"):
        model.copy({model.predictionBatchSize: 0}).transform(named)
