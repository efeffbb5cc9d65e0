"""``TorchModel.evaluate`` on a real session: values as scikit-learn computes them, logged to the run of the fit."""

from __future__ import annotations

import math
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from sklearn import metrics as sklearn_metrics
from torch import nn

from sparkdl.errors import DataError, ParamError
from sparkdl.estimators import ClassificationEvaluation, RegressionEvaluation, TorchModel
from sparkdl.model.saved_model import load_model
from sparkdl.model.served_model import PyfuncModel

pytestmark = pytest.mark.no_cluster_needed

NUM_ROWS = 400


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(NUM_ROWS, 3))
    return features, (features + rng.normal(size=(NUM_ROWS, 3))).argmax(axis=1)


@pytest.fixture(scope="module")
def rows(spark, values):
    features, labels = values
    return spark.createDataFrame(
        [
            (x.tolist(), int(y), "abc"[y], bool(y == 2), float(x[0] + y))
            for x, y in zip(features, labels, strict=True)
        ],
        "features array<double>, number int, letter string, flag boolean, price double",
    ).repartition(3)


def test_classes_are_evaluated_as_by_scikit_learn(rows, values, tmp_path) -> None:
    features, labels = values
    model = TorchModel.from_module(nn.Identity(), example=rows, outputs="class", labelCol="number")
    found = model.evaluate(rows)
    predicted = features.argmax(axis=1)
    assert isinstance(found, ClassificationEvaluation)
    np.testing.assert_array_equal(found.confusion, sklearn_metrics.confusion_matrix(labels, predicted))
    assert (found.labels, found.numInstances, found.numLeftOut) == ((0, 1, 2), NUM_ROWS, 0)
    for average, score in ((None, found.fMeasureByLabel()), ("weighted", found.weightedFMeasure())):
        assert score == pytest.approx(sklearn_metrics.f1_score(labels, predicted, average=average))
    assert found.accuracy == sklearn_metrics.accuracy_score(labels, predicted)
    assert found.weightedPrecision == pytest.approx(
        sklearn_metrics.precision_score(labels, predicted, average="weighted")
    )
    assert "label  precision  recall" in repr(found)
    with pytest.raises(ParamError, match="no curve of 3 classes"):
        found.roc.collect()
    found.plot().savefig(tmp_path / "three.png")


@pytest.mark.slow_on("connect")
@pytest.mark.parametrize("kind", ["binary_logit", "binary_probability", "class"])
def test_curves_of_two_classes_are_those_of_scikit_learn(rows, values, kind) -> None:
    features, labels = values

    class Scores(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            scores = rows[:, 2:] - rows[:, :1]
            if kind == "class":
                return torch.cat([torch.zeros_like(scores), scores], dim=1)
            return scores.sigmoid() if kind == "binary_probability" else scores

    model = TorchModel.from_module(
        Scores(), example=rows, outputs=kind, labelCol="flag", labels=[False, True]
    )
    found = model.evaluate(rows)
    scores = features[:, 2] - features[:, 0]
    assert found.areaUnderROC == pytest.approx(sklearn_metrics.roc_auc_score(labels == 2, scores), abs=1e-3)
    assert found.accuracy == np.mean((scores > 0) == (labels == 2))
    assert found.areaUnderPR == pytest.approx(
        sklearn_metrics.average_precision_score(labels == 2, scores), abs=0.01
    )
    last = found.roc.collect()[-1]
    assert (last["FPR"], last["TPR"]) == (1.0, 1.0)


class LogOfUnderflow(nn.Module):
    """Log probabilities of two classes. One of them is -inf."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.softmax(torch.cat([torch.zeros_like(rows), rows], dim=1), dim=1))


@pytest.mark.slow_on("connect")
def test_infinite_scores_are_at_the_ends_of_the_curves(spark) -> None:
    features, labels = [-300.0, -200.0, -1.0, 1.0, 2.0, 200.0, 300.0], [0, 1, 0, 1, 0, 1, 1]
    scored = spark.createDataFrame(
        [([x], y) for x, y in zip(features, labels, strict=True)], "features array<double>, label int"
    )
    example = scored.where("abs(features[0]) < 3")
    found = TorchModel.from_module(LogOfUnderflow(), example=example, outputs="class").evaluate(scored)
    clipped = np.clip(features, -100.0, 100.0)
    assert found.areaUnderROC == pytest.approx(sklearn_metrics.roc_auc_score(labels, clipped))


@pytest.mark.slow_on("connect")
def test_rows_without_label_do_not_count_and_unknown_labels_are_errors_of_the_model(rows) -> None:

    model = TorchModel.from_module(
        nn.Identity(), example=rows, outputs="class", labelCol="letter", labels=["a", "b", "c"]
    )
    odd = rows.withColumn(
        "letter", F.when(F.col("letter") == "b", None).when(F.col("letter") == "a", "z").otherwise("c")
    )
    found = model.evaluate(odd)
    assert found.labels == ("a", "b", "c", "z")
    assert found.numLeftOut == rows.where("letter = 'b'").count()
    assert found.recallByLabel[3] == 0.0
    with pytest.raises(
        DataError, match=r"No row has a label that is one of the model's classes: .*'0', '1', '2'"
    ):
        model.copy({model.labelCol: "number"}).evaluate(rows)
    numbered = TorchModel.from_module(nn.Identity(), example=rows, outputs="class", labelCol="price")
    for measured in (
        numbered.copy({numbered.labelCol: "letter"}),
        TorchModel.from_module(FirstNumber(), example=rows, labelCol="letter"),
    ):
        for measure in (measured.evaluate, measured.featureImportances):
            with pytest.raises(DataError, match="'letter' holds strings, .*(labels=|Cast the column)"):
                measure(rows)
        with pytest.raises(DataError, match=r"'features' holds array<double>, .* position of the 1"):
            measured.copy({measured.labelCol: "features"}).evaluate(rows)
    of_strings = model.copy({model.labelCol: "number"})
    with pytest.raises(DataError, match="none of the 3 classes"):
        of_strings.featureImportances(rows)
    missing = rows.withColumn(
        "price", F.expr("CASE number WHEN 0 THEN 0D WHEN 1 THEN DOUBLE('NaN') ELSE -100D END")
    )
    assert numbered.evaluate(missing).numInstances == rows.where("number = 0").count()
    with pytest.raises(DataError, match=r"None of 400 rows has both a label in column 'letter'"):
        model.evaluate(rows.withColumn("letter", F.lit(None).cast("string")))
    with pytest.raises(DataError, match="no column 'word'"):
        model.copy({model.labelCol: "word"}).evaluate(rows)


@pytest.mark.slow_on("connect")
def test_numbers_and_several_outputs_are_evaluated_and_logged_to_the_run(rows, values, tracked: Path) -> None:
    features, labels = values
    model = TorchModel.from_module(
        Both(), example=rows, outputs={"number": "class", "price": "value"}, labelCol=["number", "price"]
    )
    with mlflow.start_run() as run:
        pass
    model._note_run(run.info.run_id, None)
    found = model.evaluate(rows)
    price = found["price"]
    assert isinstance(price, RegressionEvaluation)
    expected = features[:, 0] + labels
    assert price.r2 == pytest.approx(sklearn_metrics.r2_score(expected, features[:, 0]))
    assert price.meanAbsoluteError == pytest.approx(labels.mean(), rel=1e-6)
    assert "rootMeanSquaredError" in str(price)
    logged = mlflow.get_run(run.info.run_id).data.metrics
    assert logged["test_price_r2"] == pytest.approx(price.r2)
    assert logged["test_number_accuracy"] == found["number"].accuracy
    plots = mlflow.MlflowClient().list_artifacts(run.info.run_id, "plots")
    assert [plot.path for plot in plots] == ["plots/test_number.png"]


class Both(nn.Module):
    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"number": rows, "price": rows[:, :1]}


@pytest.mark.slow_on("connect")
def test_rows_count_by_their_weights(rows):
    weighted = rows.withColumn("weight", F.round(F.abs(F.col("features")[1]), 2))
    collected = weighted.select("features", "number", "weight", "price").collect()
    scores = np.array([row["features"] for row in collected])
    numbers, weights = [row["number"] for row in collected], [row["weight"] for row in collected]
    model = TorchModel.from_module(
        nn.Identity(), example=rows, outputs="class", labelCol="number", weightCol="weight"
    )
    found = model.evaluate(weighted)
    predicted = scores.argmax(axis=1)
    expected = sklearn_metrics.confusion_matrix(numbers, predicted, sample_weight=weights)
    np.testing.assert_allclose(found.confusion, expected)
    assert found.numInstances == NUM_ROWS
    assert found.accuracy == pytest.approx(
        sklearn_metrics.accuracy_score(numbers, predicted, sample_weight=weights)
    )
    assert "weight" in str(found)
    prices = [row["price"] for row in collected]
    regressor = TorchModel.from_module(FirstNumber(), example=rows, labelCol="price", weightCol="weight")
    numbers_found = regressor.evaluate(weighted)
    arguments = {"y_true": prices, "y_pred": scores[:, 0], "sample_weight": weights}
    assert numbers_found.r2 == pytest.approx(sklearn_metrics.r2_score(**arguments))
    assert numbers_found.meanSquaredError == pytest.approx(sklearn_metrics.mean_squared_error(**arguments))
    with pytest.raises(DataError, match="weightCol is 'weight', and the DataFrame has no such column"):
        model.evaluate(rows)
    is_first = F.col("price") == prices[0]
    for bad in (-1.0, math.inf):
        with pytest.raises(DataError, match="Weights of rows must be finite and at least 0"):
            regressor.evaluate(weighted.withColumn("weight", F.when(is_first, bad).otherwise(1.0)))


class FirstNumber(nn.Module):
    """Returns the first feature of each row."""

    def forward(self, features):
        return features[:, :1]


@pytest.mark.slow_on("connect")
def test_thresholds_move_predictions_and_are_saved(rows, tmp_path):
    model = TorchModel.from_module(
        nn.Identity(), example=rows, outputs="class", labelCol="number", probabilityCol="probability"
    )
    probable = model.transform(rows).toPandas()
    assert (
        probable["prediction"] == probable["probability"].map(lambda vector: vector.toArray().argmax())
    ).all()
    model.setThresholds([1.0, 0.25, 1.0]).write().overwrite().save(str(tmp_path / "model"))
    expected = (
        probable["probability"].map(lambda vector: (vector.toArray() / [1.0, 0.25, 1.0]).argmax()).tolist()
    )
    assert expected != probable["prediction"].tolist()
    loaded = TorchModel.load(str(tmp_path / "model"))
    for which in (model, loaded):
        assert which.transform(rows).toPandas()["prediction"].tolist() == expected
    served = PyfuncModel(load_model(tmp_path / "model" / "module"))
    assert served.predict(probable[["features"]])["prediction"].tolist() == expected
    cleared = loaded.setThresholds(None).transform(rows).toPandas()
    assert cleared["prediction"].tolist() == probable["prediction"].tolist()
    with pytest.raises(ParamError, match="has 2 numbers, and the model has 3 classes"):
        loaded.setThresholds([1.0, 1.0]).transform(rows)


@pytest.mark.slow_on("connect")
def test_importances_are_the_fall_of_the_score_by_shuffling(rows, tmp_path):
    class FirstAlone(nn.Module):
        def forward(self, features):
            return torch.cat([features[:, :1], -features[:, :1]], dim=1)

    model = TorchModel.from_module(
        FirstAlone(), example=rows, outputs="class", labelCol="flag", labels=[False, True]
    )
    found = model.featureImportances(rows, num_repeats=3, seed=4)
    assert found.names == ("features[0]", "features[1]", "features[2]")
    assert found.means[1:].tolist() == [0, 0]
    assert found.order[0] == 0
    assert (found.metric, found.numInstances) == ("accuracy", NUM_ROWS)
    assert found.score == pytest.approx(model.evaluate(rows).accuracy)
    again = model.featureImportances(rows, num_repeats=3, seed=4)
    assert again.means.tolist() == found.means.tolist()
    assert "features[0]" in str(found)
    found.plot().savefig(tmp_path / "importances.png")
    numbers = TorchModel.from_module(FirstNumber(), example=rows, labelCol="price")
    few = numbers.featureImportances(rows, num_rows=50)
    assert (few.metric, few.numInstances) == ("r2", 50)
    assert few.means[0] > 0.1 > abs(few.means[1])
    for name, value in model.evaluate(rows).metrics.items():
        assert model.featureImportances(rows, metric=name, num_repeats=1).score == pytest.approx(
            value, abs=1e-3
        )
    areas = model.featureImportances(rows, metric="areaUnderPR", num_repeats=1)
    assert areas.means[0] > 0.1 > abs(areas.means[1])
    errors = numbers.featureImportances(rows, metric="rootMeanSquaredError")
    assert errors.score == pytest.approx(numbers.evaluate(rows).rootMeanSquaredError)
    assert errors.means[0] > 0.1, "errors rise"
    assert "rise of rootMeanSquaredError if shuffled" in str(errors)
    with pytest.raises(ParamError, match="metric is 'areaUnderPR', and this model has rootMeanSquaredError"):
        numbers.featureImportances(rows, metric="areaUnderPR")
    with pytest.raises(DataError, match="There is no column 'price'"):
        numbers.featureImportances(rows.drop("price"))


class OfNumbers(nn.Module):
    """Returns the sum of each row's numbers, with 0 for NaN."""

    def forward(self, matrix):
        return torch.nan_to_num(matrix).sum(dim=1, keepdim=True)


def test_rows_with_nan_that_a_model_takes_count_in_the_importances_as_in_the_evaluation(spark):
    rows = spark.range(60).selectExpr(
        "if(id % 2 = 0, double('NaN'), id) AS a",
        "if(id % 2 = 1, double('NaN'), id) AS b",
        "id + id % 7 AS label",
    )
    features = {"featuresCol": ["a", "b"], "passFeaturesBy": "matrix"}
    model = TorchModel.from_module(OfNumbers(), example=rows, **features)
    found = model.featureImportances(rows, num_repeats=1)
    assert found.numInstances == 60
    assert found.score == pytest.approx(model.evaluate(rows).r2)
    with pytest.raises(DataError, match="has no row without a null in 'a', 'b'"):
        TorchModel.from_module(OfNumbers(), example=rows.selectExpr("double(NULL) AS a", "b"), **features)
