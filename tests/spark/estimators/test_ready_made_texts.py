"""TextClassifier on a real session: fitted on strings, with outputs for Spark's evaluators."""

from __future__ import annotations

import numpy as np
import pytest
from pyspark.ml import PipelineModel
from pyspark.ml.classification import ClassificationModel, Classifier
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import functions as F
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from sparkdl.data import materialize
from sparkdl.errors import DataError
from sparkdl.estimators import TextClassifier
from sparkdl.estimators.ready_made import text
from sparkdl.estimators.ready_made.text import learn_words
from tests.spark.estimators.estimator_examples import store_is_empty

pytestmark = pytest.mark.any_spark_will_do

NUM_TEXTS = 600
FILLERS = "the a of to in it was on as at by this had not are but from"


def make_texts():
    """Texts with two names among other words; the label is the name that comes first."""
    rng = np.random.default_rng(0)
    rows = []
    for index in range(NUM_TEXTS):
        words = rng.choice(FILLERS.split(), rng.integers(2, 6)).tolist()
        first = ("Ann", "Bob")[index % 2]
        near, far = sorted(rng.integers(0, len(words) + 1, 2))
        words.insert(far, ("Bob", "Ann")[index % 2])
        words.insert(near, first)
        rows.append((index, " ".join(words), first))
    return rows


@pytest.fixture(scope="module")
def texts(spark):
    return (
        spark.createDataFrame(make_texts(), "id long, text string, first string").repartition(3, "id").cache()
    )


@pytest.mark.slow  # tests/unit/estimators/ready_made/test_text.py tests the classifier daily
def test_text_classifier_solves_a_task_that_bags_of_words_cannot_solve(texts, tmp_path):
    is_tested = F.col("id") % 5 == 0
    estimator = TextClassifier(
        featuresCol="text",
        labelCol="first",
        embeddingSize=16,
        numLayers=1,
        learningRate=1e-2,
        batchSize=16,
        epochs=5,
        store=str(tmp_path / "store"),
        keepRowsSeconds=0,
        tracking="off",
        showProgress=False,
    )
    assert isinstance(estimator, Classifier)
    model = estimator.fit(texts.filter(~is_tested))
    assert isinstance(model, ClassificationModel)
    assert store_is_empty(tmp_path)
    tested = texts.filter(is_tested)
    scored = model.transform(tested).cache()
    types = {name: kind for name, kind in scored.dtypes if name not in texts.columns}
    assert types == {"rawPrediction": "vector", "probability": "vector", "prediction": "string"}
    numbers = scored.select(
        "probability",
        *[(F.col(name) == "Bob").cast("double").alias(name) for name in ("first", "prediction")],
    )
    for metric, least, most in (("accuracy", 0.93, 1.0), ("logLoss", 0.0, 0.3)):
        evaluator = MulticlassClassificationEvaluator(labelCol="first", metricName=metric)
        assert least <= evaluator.evaluate(numbers) <= most
    PipelineModel([model]).save(f"file://{tmp_path}/model")
    (loaded,) = PipelineModel.load(f"file://{tmp_path}/model").stages
    rows = [("Ann saw Bob",), ("",), (None,), ("words that were in no text",)]
    strange = texts.sparkSession.createDataFrame(rows, "text string")
    for row in loaded.transform(strange).collect():
        assert (row["prediction"] is None) == (row["probability"] is None) == (row["text"] is None)
        if row["text"] is not None:
            assert loaded.predict(row["text"]) == row["prediction"]


@pytest.mark.slow
def test_bag_of_words_classifier_fails_on_the_task_of_the_text_classifier():
    """The accuracy of bags of words on the task of the test above."""
    _, texts, first = zip(*make_texts(), strict=True)
    counts = CountVectorizer().fit_transform(texts)
    is_tested = np.arange(NUM_TEXTS) % 5 == 0
    labels = np.array(first)
    model = LogisticRegression(max_iter=1000).fit(counts[~is_tested], labels[~is_tested])
    assert model.score(counts[is_tested], labels[is_tested]) < 0.6


def test_executors_count_the_same_words_in_the_same_order(spark, texts, tmp_path, monkeypatch):
    dataset = materialize(texts, ["text"], str(tmp_path), row_group_bytes=5_000)
    assert len(dataset.row_groups) == 3
    here = learn_words(dataset, "text", size=15, training=None, spark=None)
    monkeypatch.setattr(text, "COUNTED_HERE", 10)
    assert learn_words(dataset, "text", size=15, training=None, spark=spark) == here
    assert len(here) == 15


def test_all_columns_of_a_wrong_type_are_named_before_a_row_is_read(texts, tmp_path):
    rows = texts.selectExpr("cast(raise_error('a row is read') as int) n", "array(id) ids", "text")
    estimator = TextClassifier(
        featuresCol="n", labelCol="ids", weightCol="text", store=str(tmp_path / "store"), tracking="off"
    )
    message = (
        "'text' holds string, not numbers.* 'n' holds numbers, and .* takes strings.* 'ids' holds arrays"
    )
    with pytest.raises(DataError, match=message):
        estimator.fit(rows)
    assert store_is_empty(tmp_path)
