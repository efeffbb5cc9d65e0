"""Ready-made estimators on a real session: fitted by column names, with outputs for Spark's evaluators and OneVsRest.

``test_ml_contract.py`` tests their pipelines, tuning and saving;
``tests/unit/estimators/ready_made/test_tabular.py`` tests what they learn.
"""

from __future__ import annotations

import json

import mlflow
import numpy as np
import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.classification import ClassificationModel, Classifier, OneVsRest, OneVsRestModel
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.functions import array_to_vector
from pyspark.ml.regression import RegressionModel, Regressor
from pyspark.ml.tuning import TrainValidationSplit
from pyspark.sql import functions as F

from sparkdl.errors import DataError, ParamError
from sparkdl.estimators import TorchClassifier, TorchRegressor
from sparkdl.model.saved_model import load_model
from sparkdl.model.served_columns import to_column_dtype
from sparkdl.model.served_model import PyfuncModel
from tests.servers.fresh_mlflow import tracked
from tests.spark.estimators.estimator_examples import store_is_empty

__all__ = ["tracked"]

pytestmark = pytest.mark.any_spark_will_do


@pytest.fixture(scope="module")
def people(frame):
    """Rows with a vector, a decimal, a word and a number as category; two labels depend on them."""
    return frame.select(
        "id",
        "image",
        F.col("target").cast("decimal(12,6)").alias("age"),
        F.element_at(F.array(*map(F.lit, ("red", "green", "blue"))), F.col("digit") + 1).alias("colour"),
        (F.col("digit") * 7).alias("code"),
        (F.col("digit") > 0).cast("decimal(1,0)").alias("label"),
        "digit",
        (100 * F.col("digit") + F.col("target")).cast("decimal(12,6)").alias("price"),
    ).cache()


def common(folder):
    return {
        "store": str(folder / "store"),
        "keepRowsSeconds": 0,
        "tracking": "off",
        "showProgress": False,
        "batchSize": 16,
        "learningRate": 0.01,
    }


@pytest.fixture(scope="module")
def classified(people, tmp_path_factory):
    estimator = TorchClassifier(
        featuresCol=["image", "age", "colour", "code"],
        categoricalCols=["code"],
        epochs=5,
        **common(tmp_path_factory.mktemp("classifier")),
    )
    return estimator, estimator.fit(people)


def test_output_of_a_classifier_is_accepted_by_evaluators(people, classified):
    estimator, model = classified
    assert isinstance(estimator, Classifier)
    assert isinstance(model, ClassificationModel)
    scored = model.transform(people)
    types = {name: kind for name, kind in scored.dtypes if name not in people.columns}
    assert types == {"rawPrediction": "vector", "probability": "vector", "prediction": "double"}
    assert BinaryClassificationEvaluator().evaluate(scored) > 0.99
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) > 0.97
    assert MulticlassClassificationEvaluator(metricName="logLoss").evaluate(scored) < 0.2


@pytest.mark.slow
def test_a_table_of_categories_alone_is_fitted_and_saved(people, tmp_path):
    model = TorchClassifier(featuresCol=["colour"], epochs=2, **common(tmp_path)).fit(people)
    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = type(model).load(str(tmp_path / "model"))
    assert loaded.transform(people).select("prediction").collect() == (
        model.transform(people).select("prediction").collect()
    )


def test_a_classifier_of_two_classes_reports_accuracy_and_auroc_unasked(people, classified):
    _, model = classified
    assert [*model.history[-1].metrics] == ["accuracy", "auroc"]
    assert model.history[-1].metrics["accuracy"] > 0.95
    assert model.history[-1].metrics["auroc"] > 0.99
    right = model.transform(people).where("prediction = label").count()
    assert right / people.count() == pytest.approx(model.history[-1].metrics["accuracy"], abs=0.05)


def test_a_fitted_classifier_is_exported_and_onnx_runtime_computes_what_transform_does(
    people, classified, tmp_path
):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    _, model = classified
    model.export(str(tmp_path / "people.onnx"))
    session = runtime.InferenceSession(tmp_path / "people.onnx")
    assert [entry.name for entry in session.get_inputs()] == ["numeric features", "categorical features"]
    scored = model.transform(people.limit(5)).toPandas()
    # The lines of docs/trained_elsewhere.md.
    inputs = model.saved.signature.inputs
    columns = {column.name: to_column_dtype(scored[column.name], column) for column in inputs.columns}
    tensors = inputs.tensors(inputs.prepare_batch(columns), torch.device("cpu"))
    (scores,) = session.run(None, {name: tensor.numpy() for name, tensor in tensors.items()})
    expected = np.stack([vector.toArray() for vector in scored["probability"]])
    np.testing.assert_allclose(torch.tensor(scores).softmax(1), expected, rtol=1e-4, atol=1e-6)
    (output,) = json.loads(session.get_modelmeta().custom_metadata_map["sparkdl.outputs"])
    assert len(output["classes"] or expected[0]) == 2


def test_prediction_of_a_single_row_equals_transform(people, classified):
    _, model = classified
    assert (model.numClasses, model.numFeatures) == (2, 7)
    for row in model.transform(people.limit(3)).collect():
        features = {name: row[name] for name in model.getFeaturesCols()}
        assert model.predict(features) == row["prediction"]
        np.testing.assert_allclose(
            model.predictRaw(features).toArray(), row["rawPrediction"].toArray(), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            model.predictProbability(features).toArray(), row["probability"].toArray(), rtol=1e-5, atol=1e-6
        )
    with pytest.raises(DataError, match="takes several columns: give a dict of image, age, colour, code"):
        model.predict([1.0, 2.0])


def test_a_category_of_no_training_row_is_scored_and_a_null_is_not(people, classified):
    _, model = classified
    # Scoring ignores the label column.
    people = people.withColumn("label", F.lit("unheard of"))
    strange = people.withColumn("colour", F.when(F.col("id") % 2 == 0, F.lit("violet")))
    for row in model.transform(strange).select("id", "prediction", "probability").collect():
        assert (row["prediction"] is None) == (row["probability"] is None) == (row["id"] % 2 == 1)


@pytest.mark.slow
def test_a_grid_over_layers_and_learning_rates_chooses_a_regressor(people, tmp_path):
    estimator = TorchRegressor(featuresCol="image", labelCol="price", epochs=5, **common(tmp_path))
    assert isinstance(estimator, Regressor)
    grid = [{estimator.hiddenSizes: [], estimator.learningRate: 1e-5}, {estimator.hiddenSizes: [32]}]
    tuning = TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="price", metricName="r2"),
        collectSubModels=True,
        seed=1,
    )
    model = tuning.fit(people)
    assert [len(fitted.module.layers) for fitted in model.subModels] == [1, 4]
    untrained, trained = model.validationMetrics
    assert untrained < 0.5
    assert trained > 0.7
    assert isinstance(model.bestModel, RegressionModel)
    assert len(model.bestModel.module.layers) == 4
    row = model.bestModel.transform(people.limit(1)).first()
    assert model.bestModel.predict(row["image"]) == pytest.approx(row["prediction"])
    assert model.bestModel.numFeatures == 4
    assert store_is_empty(tmp_path)


@pytest.mark.slow  # tests/unit/estimators/ready_made tests what they learn
def test_moments_of_one_minute_are_told_apart_and_predicted(spark, tmp_path):
    moment = F.lit(1.7e9) + F.col("id") / 4
    rows = spark.range(0, 240, 1, 2).select(
        array_to_vector(F.array(moment)).alias("moment"),
        moment.alias("start"),
        F.lit(1.0).alias("one"),
        (F.col("id") >= 120).cast("int").alias("label"),
        (F.lit(1.7e9) + 60 * F.col("id")).alias("end"),
    )
    changes = {"hiddenSizes": [], "epochs": 15, **common(tmp_path), "learningRate": 0.1}
    classified = TorchClassifier(featuresCol="moment", **changes).fit(rows).transform(rows)
    assert classified.filter("prediction = label").count() > 230
    model = TorchRegressor(featuresCol=["start", "one"], labelCol="end", **changes).fit(rows)
    r2 = RegressionEvaluator(labelCol="end", metricName="r2")
    assert r2.evaluate(model.transform(rows)) > 0.95


@pytest.mark.slow
def test_one_versus_rest_trains_a_classifier_per_class_and_comes_back_from_disk(people, tmp_path):
    classifier = TorchClassifier(epochs=5, **common(tmp_path))
    tuning = OneVsRest(classifier=classifier, featuresCol="image", labelCol="digit")
    model = tuning.fit(people)
    evaluator = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy")
    scored = model.transform(people)
    assert evaluator.evaluate(scored) > 0.93
    model.save(str(tmp_path / "model"))
    loaded = OneVsRestModel.load(str(tmp_path / "model"))
    assert loaded.transform(people).select("prediction").collect() == scored.select("prediction").collect()
    tuning.save(str(tmp_path / "tuning"))
    assert OneVsRest.load(str(tmp_path / "tuning")).getClassifier().getEpochs() == 5


@pytest.fixture(scope="module")
def holes(people):
    """The rows with nulls and NaN in every kind of column, and with times."""
    hole = (F.col("id") % 4 == 0) & (F.col("id") > 0)
    return people.select(
        "id",
        F.when(~hole, F.col("image")).alias("image"),
        F.when(F.col("id") % 5 > 0, F.col("age")).alias("age"),
        F.when(F.col("id") % 3 > 0, F.col("colour")).alias("colour"),
        F.when(F.col("id") % 7 > 0, F.col("code")).alias("code"),
        F.when(F.col("id") % 2 > 0, F.timestamp_micros(F.col("id") * 10**11)).alias("time"),
        F.when(F.col("id") % 3 > 1, F.date_from_unix_date(F.col("id").cast("int"))).alias("day"),
        "label",
    ).cache()


def test_missing_values_and_times_are_imputed_alike_in_transform_and_when_served(holes, tracked, tmp_path):
    features = ["image", "age", "colour", "code", "time", "day"]
    estimator = TorchClassifier(
        featuresCol=features,
        categoricalCols=["code"],
        handleInvalid="impute",
        classWeights="balanced",
        epochs=1,
        **common(tmp_path),
    )
    model = estimator.fit(holes)
    model.write().save(str(tmp_path / "model"))
    scored = model.transform(holes).orderBy("id").toPandas()
    probabilities = np.array([vector.toArray() for vector in scored["probability"]])
    assert np.isfinite(probabilities).all()
    served = PyfuncModel(load_model(tmp_path / "model" / "module"))
    given = holes.orderBy("id").withColumn("time", F.unix_micros("time")).select(*features).toPandas()
    np.testing.assert_allclose(np.stack(served.predict(given)["probability"]), probabilities, rtol=1e-6)
    numbers = TorchRegressor(
        featuresCol=["age", "code"],
        handleInvalid="impute",
        epochs=1,
        **{**common(tmp_path), "tracking": "on"},
    )
    regression = numbers.fit(holes)
    example = mlflow.models.get_model_info(regression.summary.model_uri).saved_input_example_info
    assert example is not None  # though the first row has nulls
    logged = mlflow.get_run(regression.summary.run_id).data.metrics
    unasked = regression.history[-1].metrics
    assert [*unasked] == ["rmse", "r2"]
    assert {name: logged[name] for name in unasked} == pytest.approx(unasked)
    prices = regression.transform(holes)  # several columns of numbers go to Python as one
    assert prices.where("prediction IS NULL").count() == 0
    with pytest.raises(
        DataError, match=r"'age' is null in .*'colour' is null in .*dropna\(subset=\['age', 'colour'\]\)"
    ):
        numbers.copy().setParams(featuresCol=["age", "colour"], handleInvalid="error").fit(holes)


def test_all_columns_of_the_wrong_type_are_named_before_rows_are_written(people, tmp_path):
    faulty = people.withColumn("blob", F.lit(b"x")).withColumn("many", F.array(F.lit(b"x")))
    estimator = TorchClassifier(
        featuresCol=["blob", "age", "many", "code"], categoricalCols=["age"], **common(tmp_path)
    )
    with pytest.raises(
        DataError, match="'blob' holds binary .*'age' is to hold categories.*'many' holds arrays of binary"
    ):
        estimator.fit(faulty)
    assert store_is_empty(tmp_path / "store")


def test_columns_without_any_value_are_named_with_what_can_be_done(people, tmp_path):
    empty = people.withColumn("nothing", F.lit(None)).withColumn("array", F.lit(None).cast("array<double>"))
    estimator = TorchClassifier(handleInvalid="impute", **common(tmp_path))
    for name, message in (
        ("nothing", "void: no row has a value. Cast"),
        ("array", "or none at all, .* or the column if it is null in every row"),
    ):
        with pytest.raises(DataError, match=f"'{name}' holds .*{message}"):
            estimator.copy().setParams(featuresCol=["age", name]).fit(empty)


def test_fast_dev_run_tries_all_phases_and_records_nothing(people, tmp_path):
    settings = common(tmp_path) | {"tracking": "on", "batchSize": 4}
    estimator = TorchClassifier(
        featuresCol="image",
        epochs=50,
        validationFraction=0.5,
        sampling="balanced",
        checkpointDir=str(tmp_path / "checkpoints"),
        fastDevRun=True,
        **settings,
    )
    model = estimator.fit(people)
    (record,) = model.history
    assert record.rows == 12
    assert "val_accuracy" in record.metrics
    assert model.summary.run_id is None
    assert not (tmp_path / "checkpoints").exists()
    count = sum(parameter.numel() for parameter in model.module.parameters())
    assert f"{count:,} of {count:,} parameters trained" in str(model.summary)
    model.write().save(str(tmp_path / "model"))
    assert type(model).load(str(tmp_path / "model")).summary.num_parameters == count
    whole = PipelineModel([model])
    assert whole.stages[-1].evaluate(whole.transform(people)).numInstances == people.count()


def test_range_test_suggests_a_learning_rate(people, tmp_path):
    estimator = TorchClassifier(
        featuresCol="image",
        validationFraction=0.5,
        bestMetric="val_loss",
        **common(tmp_path) | {"batchSize": 8},
    )
    found = estimator.find_learning_rate(people, low=1e-5, high=100.0, num_updates=40)
    assert len(found.rates) == len(found.losses) >= 10
    assert found.suggestion is not None
    assert 1e-4 < found.suggestion < 1
    assert f"{found.suggestion:.2g}" in str(found)
    found.plot().savefig(tmp_path / "rates.png")
    with pytest.raises(ParamError, match="0 < low < high"):
        estimator.find_learning_rate(people, low=1.0, high=0.1)
