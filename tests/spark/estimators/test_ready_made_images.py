"""ImageClassifier on a real session: fitted on image files, with outputs for Spark's evaluators."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from pyspark.ml import PipelineModel
from pyspark.ml.classification import ClassificationModel, Classifier
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import functions as F

from sparkdl.errors import DataError, RankError
from sparkdl.estimators import ImageClassifier, TorchClassificationModel
from tests.spark.estimators.estimator_examples import store_is_empty

pytestmark = pytest.mark.any_spark_will_do

NUM_IMAGES = 60


def write_images(folder):
    """Write images with a dark stripe across or along, in several modes and sizes, in a folder for each class."""
    rng = np.random.default_rng(0)
    for index in range(NUM_IMAGES):
        height, width = rng.integers(14, 20, 2)
        pixels = rng.integers(120, 255, (height, width, 3), dtype=np.uint8)
        name = ("across", "along")[index % 2]
        start = rng.integers(2, 8)
        if name == "across":
            pixels[start : start + 5] //= 4
        else:
            pixels[:, start : start + 5] //= 4
        image = Image.fromarray(pixels).convert(("RGB", "RGBA", "L")[index % 3])
        (folder / name).mkdir(exist_ok=True)
        image.save(folder / name / f"{index}.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    return folder


def common(folder):
    return {
        "labelCol": "class",
        "stageWidths": [8, 16],
        "blocksPerStage": 1,
        "learningRate": 0.01,
        "batchSize": 16,
        "store": str(folder / "store"),
        "keepRowsSeconds": 0,
        "tracking": "off",
        "showProgress": False,
    }


def test_images_of_sparks_image_source_are_fitted_scored_and_saved(spark, folder, tmp_path):
    images = spark.read.format("image").option("recursiveFileLookup", "true").load(f"file://{folder}")
    rows = images.withColumn("class", F.element_at(F.split("image.origin", "/"), -2))
    estimator = ImageClassifier(featuresCol="image", augmentation=["flip"], epochs=8, **common(tmp_path))
    assert isinstance(estimator, Classifier)
    model = estimator.fit(rows)
    assert isinstance(model, ClassificationModel)
    scored = model.transform(rows).cache()
    types = {name: kind for name, kind in scored.dtypes if name not in rows.columns}
    assert types == {"rawPrediction": "vector", "probability": "vector", "prediction": "string"}
    numbers = scored.select(
        "probability",
        *[(F.col(name) == "along").cast("double").alias(name) for name in ("class", "prediction")],
    )
    for metric, least, most in (("accuracy", 0.9, 1.0), ("logLoss", 0.0, 0.5)):
        evaluator = MulticlassClassificationEvaluator(labelCol="class", metricName=metric)
        assert least <= evaluator.evaluate(numbers) <= most
    PipelineModel([model]).save(f"file://{tmp_path}/model")
    (loaded,) = PipelineModel.load(f"file://{tmp_path}/model").stages
    assert type(loaded) is TorchClassificationModel
    assert loaded.transform(rows).select("prediction").collect() == scored.select("prediction").collect()
    row = scored.first()
    assert loaded.predict(row["image"]) == row["prediction"]
    np.testing.assert_allclose(
        loaded.predictProbability(row["image"]).toArray(), row["probability"].toArray(), rtol=1e-5, atol=1e-6
    )
    assert store_is_empty(tmp_path)


@pytest.mark.slow
def test_a_broken_file_among_many_is_named_with_the_digest_by_which_spark_finds_it(spark, folder, tmp_path):
    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(f"file://{folder}")
    rows = files.select(
        "path", F.col("content").alias("image"), F.col("path").contains("along").cast("int").alias("class")
    )
    model = ImageClassifier(featuresCol="image", epochs=2, **common(tmp_path)).fit(rows)
    spoiled = F.substring("image", 1, 60)
    bad = rows.withColumn(
        "image", F.when(F.col("path").endswith("/7.png"), spoiled).otherwise(F.col("image"))
    )
    with pytest.raises(Exception, match="'image'.* cannot be decoded") as failure:
        model.transform(bad).select("prediction").collect()
    digest = str(failure.value).partition("sha2(column, 256) = '")[2][:64]
    assert bad.filter(F.sha2("image", 256) == digest).first()["path"].endswith("/7.png")
    with pytest.raises((DataError, RankError), match=digest):
        ImageClassifier(featuresCol="image", epochs=1, imageSize=16, **common(tmp_path)).fit(bad)
    assert store_is_empty(tmp_path)
