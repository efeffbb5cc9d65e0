"""Every public estimator in Spark's own pipelines and tuning, saved and loaded by Spark's own readers and writers.

What needs no session is in ``tests/unit/estimators/params/test_contract.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pyspark.ml import Estimator, Model, Pipeline, PipelineModel
from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator
from pyspark.ml.feature import SQLTransformer, VectorAssembler
from pyspark.ml.tuning import (
    CrossValidator,
    CrossValidatorModel,
    ParamGridBuilder,
    TrainValidationSplit,
    TrainValidationSplitModel,
)
from pyspark.sql import functions as F

from sparkdl.errors import ParamError
from sparkdl.estimators import (
    ImageClassifier,
    LanguageModel,
    LanguageModelModel,
    PerplexityEvaluator,
    TextClassifier,
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from tests.spark.estimators.estimator_examples import make_estimator, make_ready_made, store_is_empty

pytestmark = pytest.mark.no_cluster_needed


def accuracy():
    return MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy")


@dataclass(frozen=True)
class Case:
    """A public estimator: how to make one that predicts the classes in column ``digit`` from ``featuresCol``."""

    make: Callable[..., Estimator]
    estimator_class: type[Estimator]
    model_class: type[Model]
    function: str = "scheduler"
    """A Param that holds a function, which a fit calls before it starts ranks."""
    takes_text: bool = False
    """Whether its features are texts with one word for each of the four numbers."""
    prediction_type: str = "double"
    metric: Callable[[], Evaluator] = accuracy
    """Makes the evaluator of the search."""
    tuned: Mapping[str, object] = field(default_factory=dict)
    """Params that the estimator needs for that evaluator."""

    @property
    def features_type(self) -> str:
        return "string" if self.takes_text else "array<double>"


def language_model(folder, **changes):
    def make(labelCol, **params):
        return LanguageModel(**params)

    sizes = {"vocabularySize": 300, "embeddingSize": 16, "numLayers": 1, "numHeads": 2}
    return make_ready_made(make, **sizes, maxLength=16, maxNewTokens=4)(folder, **changes)


def classifier(made, **changes):
    return Case(make_ready_made(made, **changes), made, TorchClassificationModel)


CASES = {
    "TorchEstimator": Case(make_estimator, TorchEstimator, TorchModel, "optimizer"),
    "TorchClassifier": classifier(TorchClassifier),
    "TorchRegressor": Case(make_ready_made(TorchRegressor), TorchRegressor, TorchRegressionModel),
    "ImageClassifier": classifier(ImageClassifier, imageShape=[2, 2], stageWidths=[8], blocksPerStage=1),
    "TextClassifier": replace(classifier(TextClassifier, embeddingSize=8, numLayers=1), takes_text=True),
    "LanguageModel": Case(
        language_model,
        LanguageModel,
        LanguageModelModel,
        takes_text=True,
        prediction_type="string",
        metric=PerplexityEvaluator,
        tuned={"output": "logLikelihood", "vocabularySize": 257},
    ),
}

READY_MADE = (pytest.mark.slow, pytest.mark.no_cluster_needed)
"""Marks of ready-made estimators: fits on all kinds of Spark run daily with the first case only."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "TorchEstimator" else READY_MADE) for name in CASES],
)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def metric(spark, case):
    return case.metric()


def best_of(metric, values):
    return int(np.argmax(values) if metric.isLargerBetter() else np.argmin(values))


@pytest.fixture(scope="module")
def frame(case, frame):
    """The rows, with texts as features where the estimator takes texts."""
    if not case.takes_text:
        return frame
    words = F.transform(
        "image", lambda value: F.concat(F.lit("about"), F.round(2 * value).cast("int").cast("string"))
    )
    return frame.withColumn("image", F.concat_ws(" ", words))


@pytest.fixture(scope="module")
def parts(case, frame):
    """The rows with one column for each number or word, for an assembler."""
    values = F.split("image", " ") if case.takes_text else F.col("image")
    return frame.select("id", "digit", *[values[index].alias(f"x{index}") for index in range(4)])


def make_pipeline(case, folder, **changes):
    assembler = VectorAssembler(inputCols=[f"x{index}" for index in range(4)], outputCol="vector")
    if case.takes_text:
        assembler = SQLTransformer(
            statement="SELECT *, concat_ws(' ', x0, x1, x2, x3) AS vector FROM __THIS__"
        )
    estimator = case.make(folder, featuresCol="vector", numWorkers=1, **changes)
    return Pipeline(stages=[assembler, estimator]), estimator


@pytest.fixture(scope="module")
def piped(case, parts, tmp_path_factory):
    pipeline, estimator = make_pipeline(case, tmp_path_factory.mktemp("pipeline"), epochs=2)
    return pipeline, estimator, pipeline.fit(parts, {estimator.predictionCol: "guess", estimator.epochs: 3})


def guesses(model, frame, column="prediction"):
    return [row[0] for row in model.transform(frame).orderBy("id").select(column).collect()]


def test_a_param_map_reaches_the_estimator_in_a_pipeline_and_its_model(case, piped, parts):
    _, estimator, model = piped
    stage = model.stages[-1]
    assert type(stage) is case.model_class
    assert stage.uid == estimator.uid
    assert (len(stage.history), estimator.getEpochs()) == (3, 2)
    assert dict(model.transform(parts).dtypes)["guess"] == case.prediction_type
    other = model.transform(parts, {estimator.predictionCol: "other"})
    assert other.columns[-1] == "other"
    assert stage.getPredictionCol() == "guess"


@pytest.mark.slow_elsewhere
def test_pipelines_are_saved_and_loaded_by_sparks_own_writers(case, piped, parts, tmp_path):
    pipeline, estimator, model = piped
    where = f"file:{tmp_path}/Q%20b c"  # Spark takes it as it stands
    pipeline.save(f"{where}/pipeline")
    _, same = Pipeline.load(f"{where}/pipeline").getStages()
    assert type(same) is case.estimator_class
    assert (same.uid, same.getEpochs(), same.getFeaturesCol()) == (estimator.uid, 2, "vector")
    model.write().save(f"{where}/model")
    model.write().overwrite().save(f"{where}/model")
    loaded = PipelineModel.load(f"{where}/model")
    assert loaded.uid == model.uid
    assert guesses(loaded, parts, "guess") == guesses(model, parts, "guess")
    assert loaded.stages[-1].summary == model.stages[-1].summary
    assert guesses(loaded.copy({estimator.predictionCol: "other"}), parts, "other") == guesses(
        model, parts, "guess"
    )


@pytest.fixture(scope="module")
def split(case, frame, metric, tmp_path_factory):
    """Two concurrent fits, each with as many ranks as there are slots."""
    folder = tmp_path_factory.mktemp("split")
    estimator = case.make(folder, numWorkers=2, **case.tuned)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 4]).build()
    tuning = TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=metric,
        parallelism=2,
        collectSubModels=True,
        seed=5,
    )
    return tuning, tuning.fit(frame), folder


@pytest.mark.slow_elsewhere
def test_a_split_chooses_the_model_of_the_best_metric(case, split, frame, metric):
    tuning, model, folder = split
    drawn = frame.select("*", F.rand(5).alias("drawn"))
    held_out = drawn.filter(F.col("drawn") >= tuning.getTrainRatio())
    assert 0 < held_out.count() < frame.count() / 2
    assert [len(fitted.history) for fitted in model.subModels] == [1, 4]
    metrics = [metric.evaluate(fitted.transform(held_out)) for fitted in model.subModels]
    assert model.validationMetrics == pytest.approx(metrics)
    best = best_of(metric, metrics)
    assert len(model.bestModel.history) == [1, 4][best]
    if case.metric is not PerplexityEvaluator:  # its rows are packed
        assert {record.rows for record in model.bestModel.history} == {frame.count()}
    assert store_is_empty(folder)


@pytest.mark.slow
@pytest.mark.slow_elsewhere
def test_a_split_and_its_model_are_saved_and_loaded(case, split, frame, tmp_path):
    tuning, model, _ = split
    tuning.save(str(tmp_path / "split"))
    same = TrainValidationSplit.load(str(tmp_path / "split"))
    assert type(same.getEstimator()) is case.estimator_class
    assert same.getEstimatorParamMaps() == tuning.getEstimatorParamMaps()
    model.save(str(tmp_path / "model"))
    loaded = TrainValidationSplitModel.load(str(tmp_path / "model"))
    assert guesses(loaded, frame) == guesses(model, frame)
    assert loaded.validationMetrics == model.validationMetrics
    assert [len(fitted.history) for fitted in loaded.subModels] == [1, 4]


@pytest.mark.slow
@pytest.mark.any_spark_will_do
@pytest.mark.timeout(400)
def test_cross_validation_of_a_pipeline_averages_over_folds_and_comes_back_from_disk(
    case, parts, metric, tmp_path
):
    pipeline, estimator = make_pipeline(case, tmp_path, **case.tuned)
    tuning = CrossValidator(
        estimator=pipeline,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.epochs, [1, 4]).build(),
        evaluator=metric,
        numFolds=2,
        parallelism=2,
        collectSubModels=True,
        seed=5,
    )
    model = tuning.fit(parts)
    metrics = [
        [metric.evaluate(fitted.transform(held_out)) for fitted in models]
        for models, (_, held_out) in zip(model.subModels, tuning._kFold(parts), strict=True)
    ]
    np.testing.assert_allclose(model.avgMetrics, np.mean(metrics, axis=0))
    assert len(model.bestModel.stages[-1].history) == [1, 4][best_of(metric, model.avgMetrics)]
    assert store_is_empty(tmp_path)
    tuning.save(str(tmp_path / "validator"))
    assert CrossValidator.load(str(tmp_path / "validator")).getNumFolds() == 2
    model.save(str(tmp_path / "model"))
    loaded = CrossValidatorModel.load(str(tmp_path / "model"))
    assert loaded.avgMetrics == pytest.approx(model.avgMetrics)
    assert guesses(loaded.bestModel, parts) == guesses(model.bestModel, parts)


@pytest.mark.any_spark_will_do
def test_tuning_with_functions_in_its_grid_is_not_saved_by_spark_but_its_best_model_is(
    case, piped, metric, tmp_path
):
    pipeline, estimator, model = piped
    grid = [{estimator.getParam(case.function): torch.optim.SGD}]
    tuning = CrossValidator(estimator=pipeline, estimatorParamMaps=grid, evaluator=metric)
    best = tuning._copyValues(CrossValidatorModel(model, [0.5]))
    for stage in (tuning, best):
        with pytest.raises(TypeError, match="Object of type type is not JSON serializable"):
            stage.save(str(tmp_path / type(stage).__name__))
    best.bestModel.save(f"file://{tmp_path}/best")


def count_reads(folder: Path):
    """Make a function for mapInArrow that writes a file each time it reads a partition."""
    where = str(folder)

    def read(batches):
        import tempfile

        tempfile.mkstemp(dir=where)
        yield from batches

    return read


@pytest.mark.any_spark_will_do
def test_param_maps_with_other_columns_share_rows_until_no_more_models_are_requested(case, frame, tmp_path):
    if case.estimator_class is LanguageModel:
        pytest.skip("it packs rows for each map")
    reads = tmp_path / "reads"
    reads.mkdir()
    columns = f"id long, image {case.features_type}, digit int, turned {case.features_type}"
    turned = frame.select("id", "image", "digit", F.reverse("image").alias("turned"))
    rows = turned.coalesce(1).mapInArrow(count_reads(reads), columns)
    estimator = case.make(tmp_path, numWorkers=1, epochs=1)
    maps = [{estimator.featuresCol: "turned"}, {estimator.epochs: 2}, {estimator.batchSize: 64}]
    models = estimator.fitMultiple(rows, maps)
    assert not list(reads.iterdir())
    found = dict(next(models) for _ in range(2))
    assert (found[0].getFeaturesCol(), len(found[1].history)) == ("turned", 2)
    assert len(list(reads.iterdir())) == 1
    assert not store_is_empty(tmp_path)
    del models
    gc.collect()
    assert store_is_empty(tmp_path)
    assert [guesses(model, turned) for model in found.values()]


@pytest.mark.any_spark_will_do
def test_failed_fit_releases_its_rows_and_the_next_fit_writes_them_again(case, frame, tmp_path):
    calls = []

    def fail_first(given, *others):
        calls.append("call")
        if len(calls) == 1:
            raise ValueError("not this time")
        if case.function == "optimizer":
            return torch.optim.SGD(given, lr=0.1)
        return torch.optim.lr_scheduler.ConstantLR(given)

    estimator = case.make(tmp_path, numWorkers=1, epochs=1, **{case.function: fail_first})
    models = estimator.fitMultiple(frame, [{estimator.seed: 1}, {estimator.seed: 2}])
    with pytest.raises(ParamError, match="not this time"):
        next(models)
    assert store_is_empty(tmp_path)
    index, model = next(models)
    assert (index, model.getSeed(), len(model.history)) == (1, 2, 1)
    assert store_is_empty(tmp_path)
