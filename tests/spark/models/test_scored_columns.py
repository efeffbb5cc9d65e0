"""The columns that ``transform`` adds, with models that were not fitted, on a real session."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from pathlib import Path

import pytest
import torch
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from torch import nn

from sparkdl.data import Column
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators import TorchModel
from sparkdl.model.inputs import MATRIX
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from tests.spark.estimators.estimator_examples import NUM_ROWS, make_estimator
from tests.training.signatures import make_inputs, make_signature

pytestmark = pytest.mark.no_cluster_needed


class Noted(nn.Module):
    """A linear layer that writes a file for every call, with the number of rows, and a file for every load."""

    def __init__(self, outputs: int, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.folder = nn.Linear(4, outputs), str(folder)

    def __setstate__(self, state):
        super().__setstate__(state)
        if self.folder:
            Path(self.folder, f"loaded-{os.getpid()}-{uuid.uuid4().hex}").touch()

    def forward(self, inputs):
        if not self.folder:
            return self.linear(inputs)
        Path(self.folder, f"called-{uuid.uuid4().hex}").write_text(str(len(inputs)))
        return self.linear(inputs)


def make_model(folder: Path, kind: str = "class", outputs: int = 3, **params) -> TorchModel:
    signature = make_signature((4,), kind, num_classes=outputs if kind == "class" else None)
    model = TorchModel(SavedModel(Noted(outputs, folder), signature))
    return model.setParams(featuresCol="image", **params)


def num_loads(folder: Path) -> list[int]:
    """How often each process that loaded the module did so."""
    loads = Counter(path.name.split("-")[1] for path in folder.glob("loaded-*"))
    return list(loads.values())


def called_rows(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("called-*")]


ALL = {"probabilityCol": "probability", "rawPredictionCol": "raw"}


@pytest.mark.slow_elsewhere
def test_copies_of_a_model_are_loaded_once_per_process(frame, tmp_path):
    model, one_task = make_model(tmp_path), frame.coalesce(1)
    for copied in (model, model.copy({model.predictionCol: "p"}), model.copy()):
        assert copied.transform(one_task).collect()
    assert set(num_loads(tmp_path)) == {1}
    assert len(num_loads(tmp_path)) < 3, "some process scored for two of them"


@pytest.mark.slow_elsewhere
def test_vector_columns_for_evaluators_need_one_pass_over_the_rows(frame, tmp_path):
    model = make_model(tmp_path, **ALL, predictionBatchSize=64)
    holes = frame.withColumn("image", F.when(F.col("id") % 2 == 0, F.col("image"))).repartition(7)
    scored = model.transform(holes)
    assert not list(tmp_path.glob("*"))  # no job has run
    assert scored.columns == [*holes.columns, "raw", "probability", "prediction"]
    assert [dtype for _, dtype in scored.dtypes[-3:]] == ["vector", "vector", "double"]
    rows = scored.filter("prediction is null or prediction >= 0").collect()
    present = (NUM_ROWS + 1) // 2
    assert sum(called_rows(tmp_path)) == present
    assert max(called_rows(tmp_path)) <= 64
    assert set(num_loads(tmp_path)) == {1}
    assert len(rows) == NUM_ROWS
    for row in rows:
        if row["id"] % 2:
            assert (row["raw"], row["probability"], row["prediction"]) == (None, None, None)
            continue
        # The single row is another batch than it was scored in, for which a BLAS may round differently.
        outputs = model.module.linear(torch.tensor([row["image"]])).detach()[0]
        raw = torch.tensor(row["raw"].toArray())
        torch.testing.assert_close(raw.float(), outputs)
        # Computed in float64 from the scores beside them.
        torch.testing.assert_close(torch.tensor(row["probability"].toArray()), raw.softmax(0))
        assert row["prediction"] == float(raw.argmax())


def test_evaluators_take_scores_and_probabilities(frame, tmp_path):
    labelled = frame.withColumn("label", (F.col("target") > 0).cast("double"))
    model = make_model(tmp_path, "binary_logit", 1, **ALL)
    scored = model.transform(labelled)
    area = BinaryClassificationEvaluator(rawPredictionCol="raw").evaluate(scored)
    of_probability = BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(scored)
    assert 0 < area < 1
    assert area == pytest.approx(of_probability)
    evaluator = MulticlassClassificationEvaluator(metricName="logLoss")
    loss = nn.functional.binary_cross_entropy_with_logits
    rows = labelled.collect()
    outputs = model.module.linear(torch.tensor([row["image"] for row in rows])).detach().reshape(-1)
    expected = float(loss(outputs, torch.tensor([row["label"] for row in rows])))
    assert evaluator.evaluate(scored) == pytest.approx(expected, rel=1e-5)


@pytest.mark.any_spark_will_do
def test_single_output_column_may_be_a_vector_and_an_empty_frame_gives_no_rows(frame, tmp_path):
    model = make_model(tmp_path, predictionCol="", probabilityCol="p")
    assert dict(model.transform(frame).dtypes)["p"] == "vector"
    assert model.transform(frame.filter("id < 0")).collect() == []
    assert model.transform(frame).filter("p is not null").count() == NUM_ROWS
    assert sum(called_rows(tmp_path)) == NUM_ROWS
    typed = make_model(tmp_path, predictionType="vector").transform(frame)
    assert dict(typed.dtypes)["prediction"] == "vector"
    plain = make_model(tmp_path, predictionType="long").transform(frame)
    assert [row["prediction"].toArray().tolist() for row in typed.collect()] == [
        [row["prediction"]] for row in plain.collect()
    ]


@pytest.mark.any_spark_will_do
def test_columns_that_cannot_be_added_are_named_before_anything_runs(frame):
    with pytest.raises(ParamError, match="already has a column 'text'. .*another probabilityCol"):
        make_model("", probabilityCol="text").transform(frame)
    with pytest.raises(ParamError, match="Param probabilityCol is 'p'.*predicts no classes"):
        make_model("", "value", 1, probabilityCol="p").transform(frame)


class KindAndPrice(nn.Module):
    def forward(self, x):
        return x[:, :3], x[:, 3:]


@pytest.mark.any_spark_will_do
def test_a_head_of_classes_beside_one_of_numbers_has_a_field_in_the_column_of_probabilities(frame):
    outputs = (
        ModelOutput(name="kind", kind="class", num_classes=3),
        ModelOutput(name="price", kind="value"),
    )
    inputs = make_inputs("image", image=Column(name="image", dtype="float32", shape=(4,)))
    saved = SavedModel(KindAndPrice(), ModelSignature(inputs=inputs, outputs=outputs))
    model = TorchModel(saved).setParams(featuresCol="image", probabilityCol="p")
    scored = model.transform(frame)
    assert dict(scored.dtypes)["p"] == "struct<kind:vector>"
    for row in scored.take(3):
        expected = torch.tensor(row["image"][:3]).double().softmax(0)
        assert row["p"]["kind"].toArray() == pytest.approx(expected.numpy())
        assert row["prediction"]["price"] == pytest.approx(row["image"][3])


class JoinedColumns(nn.Module):
    """A linear layer over several scalar columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, *columns):
        return self.linear(torch.cat(columns, dim=1))


@pytest.mark.slow_elsewhere
def test_numeric_feature_columns_are_packed_for_python_and_returned_unchanged(frame):
    names = [f"x{index}" for index in range(4)]
    signature = ModelSignature(inputs=make_inputs(*names), outputs=(ModelOutput(name="y", kind="value"),))
    model = TorchModel(SavedModel(JoinedColumns(), signature)).setParams(featuresCol=names)
    parts = frame.select("id", "image", *[F.col("image")[index].alias(f"x{index}") for index in range(4)])
    decimal = parts.withColumn("x1", F.col("x1").cast("decimal(20,12)"))
    holes = decimal.withColumn("x2", F.when(F.col("id") % 3 > 0, F.col("x2")))
    scored = model.transform(holes)
    assert scored.columns == [*holes.columns, "prediction"]
    for row in scored.collect():
        expected = model.module.linear(torch.tensor([row["image"]])).item()
        found = row["prediction"]
        assert found is None if row["id"] % 3 == 0 else found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert row["x0"] == row["image"][0]


@pytest.mark.any_spark_will_do  # reads the plan in the JVM, which Spark Connect does not expose
def test_rows_of_a_columnar_table_go_to_python_one_by_one(spark, frame, tmp_path):
    frame.select("id", "image").write.parquet(str(tmp_path / "rows"))
    table = spark.read.parquet(str(tmp_path / "rows"))
    scored = make_model("").transform(table)
    plan = scored._jdf.queryExecution().executedPlan()
    assert plan.collectLeaves().head().supportsColumnar()
    while plan.nodeName() != "ArrowEvalPython":
        plan = plan.children().head()
    assert not plan.children().head().supportsColumnar()
    columns = ["id", "image", "prediction"]
    assert scored.select(columns).orderBy("id").collect() == (
        make_model("").transform(frame).select(columns).orderBy("id").collect()
    )


class SumOfNumbers(nn.Module):
    def forward(self, *columns):
        return sum(torch.nan_to_num(column).reshape(len(column), -1).sum(1) for column in columns)


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(("names", "shape"), [(["x"], ()), (["x", "y"], ()), (["pair"], (2,))])
def test_nan_is_a_value_for_the_model_and_null_gives_a_null_prediction(spark, names, shape):
    rows = spark.createDataFrame(
        [(0, 1.0, 2.0), (1, float("nan"), 2.0), (2, None, 2.0)], "id long, x double, y double"
    ).withColumn("pair", F.when(F.col("x").isNotNull(), F.array("x", "y")))
    columns = {name: Column(name=name, dtype="float64", shape=shape) for name in names}
    output = ModelOutput(kind="value", shape=(), name="target")
    signature = ModelSignature(inputs=make_inputs(*names, **columns), outputs=(output,))
    model = TorchModel(SavedModel(SumOfNumbers(), signature)).setParams(featuresCol=names)
    found = {row["id"]: row["prediction"] for row in model.transform(rows).collect()}
    alone = names == ["x"]
    assert found == {0: 1.0 if alone else 3.0, 1: 0.0 if alone else 2.0, 2: None}


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(("names", "shape"), [(["x", "y", "z"], ()), (["array"], (3,)), (["vector"], (3,))])
def test_a_row_that_the_model_answers_with_nan_has_null_in_all_columns(spark, names, shape):
    rows = spark.createDataFrame(
        [(0, 1.0, 2.0), (1, float("nan"), 2.0), (2, None, 2.0), (3, 0.5, float("nan"))],
        "id long, x double, y double",
    ).withColumns({"z": F.lit(0.0), "array": F.when(F.col("x").isNotNull(), F.array("x", "y", F.lit(0.0)))})
    rows = rows.withColumn("vector", F.when(F.col("x").isNotNull(), array_to_vector("array")))
    columns = {name: Column(name=name, dtype="float64", shape=shape) for name in names}
    given_by = "matrix" if len(names) > 1 else "position"
    inputs = make_inputs(*names, dtypes=("float32",) * len(names), given_by=given_by, **columns)
    if given_by == "matrix":
        inputs = inputs.with_dtypes({MATRIX: torch.float32})
    output = ModelOutput(name="kind", kind="class", num_classes=3)
    torch.manual_seed(0)
    saved = SavedModel(nn.Linear(3, 3), ModelSignature(inputs=inputs, outputs=(output,)))
    model = TorchModel(saved).setParams(featuresCol=names, **ALL)
    added = ["raw", "probability", "prediction"]
    scored = model.transform(rows.coalesce(1))
    found = {row["id"]: [row[name] is None for name in added] for row in scored.collect()}
    assert found == {0: [False] * 3, 1: [True] * 3, 2: [True] * 3, 3: [True] * 3}


@pytest.mark.any_spark_will_do
def test_stream_can_be_scored_and_is_refused_by_fit(spark, frame, tmp_path):
    frame.select("id", "image").coalesce(1).write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema("id long, image array<double>").parquet(str(tmp_path / "rows"))
    model = make_model("", **ALL)
    scored = model.transform(stream)
    assert scored.isStreaming
    to = {"path": str(tmp_path / "scored"), "checkpointLocation": str(tmp_path / "stream")}
    query = scored.writeStream.format("parquet").options(**to).trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    columns = ["id", "prediction", "probability", "raw"]
    found = spark.read.parquet(to["path"]).select(columns).orderBy("id").collect()
    expected = model.transform(frame).select(columns).orderBy("id").collect()
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    # The stream has one partition and the frame three: for other batches a BLAS may round differently.
    for name in ("probability", "raw"):
        one, other = (
            torch.tensor([row[name].toArray().tolist() for row in rows]) for rows in (found, expected)
        )
        torch.testing.assert_close(one, other)
    for fit in (make_estimator(tmp_path).fit, lambda rows: make_estimator(tmp_path).fitMultiple(rows, [{}])):
        with pytest.raises(DataError, match="this one is a stream"):
            fit(stream)
