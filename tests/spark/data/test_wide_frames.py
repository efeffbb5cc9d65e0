"""Frames with many columns, and with columns of the same name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparkdl.data import Column, materialize
from sparkdl.errors import DataError
from sparkdl.estimators import TorchEstimator, TorchModel
from sparkdl.model.inputs import MATRIX, ModelInputs
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from tests.training.signatures import make_inputs

pytestmark = pytest.mark.any_spark_will_do


def wide(spark: SparkSession, width: int) -> tuple[DataFrame, list[str]]:
    """Eight rows of ``width`` numbers: the row's number times the column's number."""
    names = [f"x.{index}" for index in range(width)]
    products = (f"id * {index} as `{name}`" for index, name in enumerate(names))
    return spark.range(8).selectExpr("id", "id % 2 as label", *products), names


def estimator_of(names: list[str], store: Path) -> TorchEstimator:
    return TorchEstimator(
        model=nn.Linear(len(names), 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        featuresCol=names,
        passFeaturesBy="matrix",
        store=str(store),
        tracking="off",
        showProgress=False,
    )


def model_of(names: list[str]) -> TorchModel:
    """A model of a matrix of columns, which was not fitted."""
    columns = tuple(Column(name=name, dtype="int64") for name in names)
    inputs = ModelInputs(columns=columns, inputs=make_inputs(MATRIX).inputs, given_by="matrix")
    output = ModelOutput(name="label", kind="class", num_classes=2)
    saved = SavedModel(nn.Linear(len(names), 2), ModelSignature(inputs=inputs, outputs=(output,)))
    return TorchModel(saved).setFeaturesCol(names)


@pytest.mark.slow
def test_more_columns_take_few_more_calls_to_the_jvm(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes a third of a millisecond: forty calls per column would take minutes for ten thousand columns."""
    client = spark.sparkContext._gateway._gateway_client
    send, num_calls = client.send_command, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += not str(args[0]).startswith("m\n")  # garbage collection of Python references
        return send(*args, **kwargs)

    monkeypatch.setattr(client, "send_command", counted)

    def count(width: int) -> tuple[int, int]:
        nonlocal num_calls
        rows, names = wide(spark, width)
        num_calls = 0
        materialize(rows, names, str(tmp_path / "store"))
        written, num_calls = num_calls, 0
        model = model_of(names)
        num_calls = 0
        scored = model.transform(rows)
        transformed = num_calls
        numbers = torch.arange(8.0)[:, None] * torch.arange(float(width))
        with torch.no_grad():
            expected = model.module(numbers).argmax(dim=1)
        assert [row.prediction for row in scored.orderBy("id").collect()] == expected.tolist()
        return written, transformed

    count(10)  # the first run looks up Spark's functions, among others
    (written, transformed), (written_wide, transformed_wide) = count(100), count(200)
    # Six calls per column choose and find the columns; others come over time from threads that watch the jobs.
    assert written_wide - written <= 100 * 15
    assert transformed_wide - transformed < 100 // 2


def test_duplicate_column_names_are_refused_only_where_the_columns_are_used(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.range(8).selectExpr("id % 2 as label", "id as a", "id as b", "id as c")
    twice = rows.toDF("label", "a", "b", "b")
    message = "2 columns with the name 'b'"
    with pytest.raises(DataError, match=message):
        estimator_of(["a", "b"], tmp_path / "store").fit(twice)
    with pytest.raises(DataError, match=message):
        materialize(twice, ["b"], str(tmp_path / "store"))
    with pytest.raises(DataError, match="has the columns 'B', 'b', .*upper and lower case"):
        estimator_of(["a", "b"], tmp_path / "store").fit(rows.toDF("label", "a", "b", "B"))
    model = estimator_of(["a"], tmp_path / "store").fit(twice)
    assert model.transform(twice).count() == 8
    with pytest.raises(DataError, match=message):
        model.setFeaturesCol(["b"]).transform(twice)
