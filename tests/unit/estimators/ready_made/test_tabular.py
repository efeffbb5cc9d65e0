"""Values that ready-made estimators compute from rows before a fit, and what they refuse, on rows in a folder."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.sql import Row

from sparkdl.data import scan_dataset
from sparkdl.data.dataset.row_choice import draw_rows
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators import TorchClassifier, TorchRegressor
from sparkdl.estimators.fit.labels import count_classes
from sparkdl.estimators.fit.tracking import params_to_log
from sparkdl.estimators.ready_made import tabular
from sparkdl.estimators.ready_made.estimator import TorchClassificationModel, answer_row
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel, load_model, save_model
from sparkdl.model.served_model import PyfuncModel
from tests.unit.estimators.fit_examples import learn

NUM_ROWS = 60


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    rng = np.random.default_rng(2)
    kinds = rng.integers(0, 3, NUM_ROWS)
    vectors = rng.normal(3.0, 2.0, (NUM_ROWS, 4)).astype(np.float32)
    age = rng.normal(size=NUM_ROWS)
    table = pa.table(
        {
            "vector": pa.array(vectors.tolist(), pa.list_(pa.float32())),
            "ragged": [[1.0] * int(length) for length in rng.integers(1, 3, NUM_ROWS)],
            "blob": [b"x"] * NUM_ROWS,
            "age": age,
            "holes": np.where(kinds == 1, np.nan, age),
            "count": rng.integers(0, 9, NUM_ROWS),
            "flag": kinds > 0,
            "kind": np.array(["ant", "bee", "cat"])[kinds],
            "class": kinds,
            "double": kinds.astype(float),
            "from one": kinds + 1,
            "signs": 2 * (kinds % 2) - 1,
            "zeros": np.zeros(NUM_ROWS),
            "same": ["ant"] * NUM_ROWS,
            "halves": kinds + 0.5,
            "years": kinds + 1990,
            "many": np.arange(NUM_ROWS) * 1000,
        }
    )
    folder = tmp_path_factory.mktemp("rows") / "rows"
    folder.mkdir()
    pq.write_table(table, folder / "part-0.parquet", row_group_size=25)
    return scan_dataset(str(folder), shapes={"ragged": (None,)})


def column(dataset, name):
    return pq.read_table(dataset.url.removeprefix("file://"))[name].to_numpy()


CLASSES = {
    "class": (3, None),
    "double": (3, None),
    "flag": (2, (False, True)),
    "kind": (3, ("ant", "bee", "cat")),
    "from one": (4, None),
    "signs": (2, (-1, 1)),
    "years": (3, (1990, 1991, 1992)),
    "zeros": (2, None),
}


@pytest.mark.parametrize("name", CLASSES)
def test_number_of_classes_is_counted_as_spark_does_or_by_distinct_labels(dataset, name):
    num_classes, classes = CLASSES[name]
    assert count_classes(dataset, name) == num_classes
    inputs = learn(TorchClassifier(featuresCol="vector", labelCol=name), dataset)
    (output,) = inputs.signature.outputs
    assert (output.kind, output.num_classes, output.classes) == ("class", num_classes, classes)


def test_classes_that_are_named_need_no_rows(dataset):
    labels = ["dog", "cat", "bee", "ant"]
    inputs = learn(TorchClassifier(featuresCol="vector", labelCol="kind", labels=labels), dataset)
    (output,) = inputs.signature.outputs
    assert (output.num_classes, output.classes) == (4, tuple(labels))
    alone = learn(TorchClassifier(featuresCol="vector", labelCol="same", labels=["ant", "bee"]), dataset)
    assert alone.signature.outputs[0].classes == ("ant", "bee")


def test_class_that_only_validation_rows_have_is_a_class_of_the_model(tmp_path):
    validates = np.arange(8) >= 6
    table = pa.table({"x": np.arange(8.0), "kind": [*"abababcc"], "validates": validates})
    pq.write_table(table, tmp_path / "part-0.parquet")
    rows = scan_dataset(str(tmp_path))
    marked = {"featuresCol": "x", "labelCol": "kind", "validationIndicatorCol": "validates"}
    assert learn(TorchClassifier(**marked), rows).signature.outputs[0].classes == ("a", "b", "c")
    label = learn(TorchClassifier(**marked, labels=["a", "b"]), rows).spec.heads[0].label
    with pytest.raises(DataError, match="'kind' holds 'c', .* 2 classes of the fit: 'a', 'b'"):
        label.encode(np.array(["a", "c"], dtype=object))


def test_single_numeric_column_needs_no_preparation(dataset):
    inputs = learn(TorchClassifier(featuresCol="vector", labelCol="class"), dataset)
    assert inputs.spec.inputs.prepare is None
    vectors = np.stack(column(dataset, "vector"))
    np.testing.assert_allclose(inputs.spec.model.mean, vectors.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(inputs.spec.model.deviation, vectors.std(axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    "features", [["age", "vector", "kind", "count"], ["kind", "flag"], ["kind"], ["age", "count"], "count"]
)
def test_columns_of_all_kinds_become_predictions(dataset, features):
    estimator = TorchClassifier(featuresCol=features, labelCol="class", categoricalCols=["count"])
    if "count" not in features:
        estimator.setCategoricalCols([])
    inputs = learn(estimator, dataset)
    predictor = Predictor(SavedModel(inputs.spec.model, inputs.signature))
    names = [features] if isinstance(features, str) else features
    rows = {name: column(dataset, name) for name in names}
    if "vector" in rows:
        rows["vector"] = np.stack(rows["vector"])
    answers = predictor.answer(rows, ("probability",))["class"]
    assert answers["probability"].shape == (NUM_ROWS, 3)
    np.testing.assert_allclose(answers["probability"].sum(axis=1), 1)
    if "kind" in rows:
        assert inputs.spec.inputs.prepare.categories["kind"] == ("ant", "bee", "cat")
    if "count" in rows:
        assert inputs.spec.inputs.prepare.categories["count"] == tuple(sorted(set(rows["count"].tolist())))


SECONDS = np.random.default_rng(5).permutation(NUM_ROWS) / 4.0
"""Numbers of a quarter of a second within a minute; sums with whole numbers below 2**50 are exact."""

LARGE = {
    "a double": {"x": lambda values, offset: values + offset},
    "two doubles": {"x": lambda values, offset: values + offset, "y": lambda values, _: -values},
    "arrays": {"x": lambda values, offset: np.stack([values + offset, values], axis=1).tolist()},
    "nanoseconds": {"x": lambda values, offset: (values * 4).astype(np.int64) + (offset and 17 * 10**17)},
    "negative": {"x": lambda values, offset: (values * 4).astype(np.int64) - (offset and 2**63 - 9)},
    "arrays of integers": {
        "x": lambda values, offset: [[int(4 * value) + (offset and 2**60)] for value in values]
    },
}


@pytest.mark.parametrize("kind", LARGE)
def test_predictions_do_not_change_if_a_column_and_the_label_are_moved_far(tmp_path, kind):
    answers = []
    for offset in (0, 1_700_000_000):
        columns = {name: make(SECONDS, offset) for name, make in LARGE[kind].items()}
        table = pa.table({**columns, "label": SECONDS * 60 + offset})
        folder = tmp_path / str(offset)
        folder.mkdir()
        pq.write_table(table, folder / "part-0.parquet")
        names = list(columns)
        inputs = learn(TorchRegressor(featuresCol=names, labelCol="label"), scan_dataset(str(folder)))
        assert inputs.spec.heads[0].label.dtype == "float64"
        save_model(SavedModel(inputs.spec.model, inputs.signature), folder / "model")
        saved = load_model(folder / "model")
        rows = {name: np.array(values) for name, values in columns.items()}
        found = Predictor(saved).predict(rows)["label"]
        served = PyfuncModel(saved).predict(pd.DataFrame(table.drop(["label"]).to_pydict()))
        np.testing.assert_array_equal(served["prediction"], found)
        assert len(set(found.tolist())) == NUM_ROWS
        row = {name: values[0] for name, values in rows.items()}
        assert answer_row(saved, row, "prediction") == pytest.approx(found[0], abs=1e-4)
        answers.append(found - offset)
    np.testing.assert_allclose(*answers, atol=1e-2)


def test_scales_are_computed_from_the_training_rows_only(dataset):
    estimator = TorchRegressor(featuresCol="age", labelCol="many", validationFraction=0.5, seed=4)
    inputs = learn(estimator, dataset)
    validated = draw_rows(dataset.row_counts, 0.5, seed=4)
    trained, start = [], 0
    for group, count in enumerate(dataset.row_counts):
        trained += (start + validated.rest().rows_kept(None, group)).tolist()
        start += count
    ages, labels = column(dataset, "age")[trained], column(dataset, "many")[trained]
    assert len(trained) == NUM_ROWS / 2
    model = inputs.spec.model
    np.testing.assert_allclose(model.mean, [ages.mean()], rtol=1e-5)
    assert float(model.output_mean) == pytest.approx(labels.mean())
    assert float(model.output_deviation) == pytest.approx(labels.std())


def test_first_weights_depend_on_the_seed(dataset):
    def first(seed):
        estimator = TorchClassifier(featuresCol="vector", labelCol="class", seed=seed)
        return learn(estimator, dataset).spec.model.layers[0].weight

    torch.manual_seed(0)
    one = first(1)
    assert torch.equal(one, first(1))
    assert not torch.equal(one, first(2))


def test_params_reach_network_and_optimizer(dataset):
    params = {"hiddenSizes": [7], "dropout": 0.25, "learningRate": 0.5, "weightDecay": 0.125}
    estimator = TorchRegressor(featuresCol="vector", labelCol="age", **params)
    learning = estimator._params_of_fit()
    recipe = estimator._learn(learning, dataset, None)
    assert not learning.isSet(learning.model), "what is learned is in the recipe alone"
    network = recipe.model
    sizes = [getattr(layer, "out_features", None) or getattr(layer, "p", None) for layer in network.layers]
    assert sizes == [7, None, 0.25, 1]
    optimizer = learning.getOptimizer()(network.parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.5, 0.125)
    of_tables = {"hiddenSizes", "dropout", "weightDecay", "categoricalCols", "handleInvalid"}
    logged = params_to_log(learning, recipe, dataset)
    assert of_tables <= logged.keys()
    assert (logged["hiddenSizes"], logged["metrics"]) == ([7], "rmse, r2")
    assert (logged["model"], logged["loss"]) == ("TabularNetwork", "StandardizedMSELoss")
    names, defaults = list(logged), {"batchSize", "epochs", "numWorkers", "handleInvalid", "momentum"}
    first_default = min(names.index(name) for name in defaults & logged.keys())
    assert max(names.index(name) for name in ("featuresCol", "labelCol", *params)) < first_default
    assert names.index("numRows") < first_default


@pytest.mark.parametrize(
    ("made", "changes", "error", "message"),
    [
        (TorchClassifier, {"featuresCol": "nowhere"}, DataError, "no column 'nowhere'"),
        (TorchClassifier, {"featuresCol": "blob"}, DataError, "'blob' holds binary values. Cast them"),
        (TorchClassifier, {"featuresCol": "ragged"}, DataError, "'ragged' has arrays that"),
        (
            TorchClassifier,
            {"featuresCol": ["age", "holes"]},
            DataError,
            r"NaN or infinity.*: 'holes'\. Fill .*Imputer",
        ),
        (TorchRegressor, {"labelCol": "holes"}, DataError, "hold NaN or infinity.*'holes'"),
        (
            TorchClassifier,
            {"categoricalCols": ["kind"]},
            ParamError,
            "categoricalCols names kind, .* are: vector",
        ),
        (
            TorchClassifier,
            {"featuresCol": ["age", "kind"], "categoricalCols": ["age"]},
            DataError,
            "'age' is to hold categories, .* float64.* Cast whole numbers to bigint",
        ),
        (
            TorchClassifier,
            {"categoricalCols": ["vector"]},
            DataError,
            "'vector' is to hold categories, .* arrays of numbers",
        ),
        (TorchClassifier, {"labelCol": "same"}, DataError, "'same' holds the label 'ant' alone"),
        (
            TorchClassifier,
            {"labelCol": "halves"},
            DataError,
            "the label 0.5, .* 0 to 999, .*labels names. .* StringIndexer, or take TorchRegressor",
        ),
        (TorchClassifier, {"labelCol": "holes"}, DataError, "'holes' holds labels that are not finite"),
        (TorchClassifier, {"labelCol": "vector"}, DataError, "'vector' holds arrays of"),
        (TorchRegressor, {"labelCol": "kind"}, DataError, "'kind' holds strings, and TorchRegressor"),
        (TorchClassifier, {"learningRate": 0.0}, ParamError, "learningRate must be above 0"),
        (TorchClassifier, {"weightDecay": -1.0}, ParamError, "weightDecay must be at least 0"),
        (TorchRegressor, {"dropout": 1.0}, ParamError, "dropout must be at least 0 and below 1"),
        (TorchRegressor, {"hiddenSizes": [8, 0]}, ParamError, "hiddenSizes must be at least 1"),
        (TorchRegressor, {"epochs": 0}, ParamError, "epochs must be at least 1, got 0"),
    ],
)
def test_invalid_params_and_columns_are_refused_before_ranks_start(dataset, made, changes, error, message):
    params = {"featuresCol": "vector", "labelCol": "class", **changes}
    with pytest.raises(error, match=message):
        estimator = made(**params)
        estimator._check_values()
        learn(estimator, dataset)


def test_all_columns_with_numbers_that_are_not_finite_are_named_wherever_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "_ROWS_AT_ONCE", 8)
    bad = {"a": (0, np.nan), "b": (20, np.inf), "c": (0, 1.0), "price": (30, np.nan)}
    columns = {name: np.arange(40.0) for name in bad}
    for name, (row, value) in bad.items():
        columns[name][row] = value
    pq.write_table(pa.table(columns), tmp_path / "part-0.parquet")
    estimator = TorchRegressor(featuresCol=["a", "b", "c"], labelCol="price")
    with pytest.raises(DataError, match=r"for float32: 'a', 'b'\. Fill .* for float32: 'price'\. Leave"):
        learn(estimator, scan_dataset(str(tmp_path)))


def fitted(dataset, **params):
    inputs = learn(TorchClassifier(labelCol="kind", **params), dataset)
    return TorchClassificationModel(SavedModel(inputs.spec.model.eval(), inputs.signature))


def test_prediction_of_a_single_row_ignores_its_other_fields(dataset):
    model = fitted(dataset, featuresCol=["age", "kind", "vector"])
    features = {"age": 0.5, "kind": "bee", "vector": [1.0, 2.0, 3.0, 4.0]}
    expected = model.predictProbability(features)
    assert model.predictProbability(Row(label="bee", when=None, **features)) == expected
    assert model.predictProbability({"label": b"", **features}) == expected
    alone = fitted(dataset, featuresCol="vector")
    for row in (Row(vector=features["vector"], kind=None), features["vector"]):
        assert alone.predictRaw(row) == alone.predictRaw({"vector": features["vector"]})
    assert alone.predictRaw([Decimal(1), 2, Decimal("3.0"), 4.0]) == alone.predictRaw(features["vector"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(age=0.5), "no column 'kind'. The columns are: age"),
        ({"age": "old", "kind": "bee"}, "'age' takes a number, .*, not str"),
        ({"age": None, "kind": "bee"}, "'age' is null"),
        ({"age": 0.5, "kind": 3}, "'kind' takes a string, .*, not int"),
        ([0.5, "bee"], "several columns: give a dict of age, kind, or a Row that has them, not list"),
    ],
)
def test_one_row_that_does_not_fit_is_refused_by_its_column(dataset, row, message):
    inputs = learn(TorchClassifier(labelCol="class", featuresCol=["age", "kind"]), dataset)
    with pytest.raises(DataError, match=message):
        answer_row(SavedModel(inputs.spec.model, inputs.signature), row, "prediction")


@pytest.mark.parametrize(
    ("features", "count"),
    [
        ("vector", 4),
        (["age", "count"], 2),
        (["age", "flag", "kind"], 3),
        (["vector", "kind"], 5),
        ("kind", 1),
    ],
)
def test_a_model_counts_scalars_and_elements_of_arrays_as_features(dataset, features, count):
    assert fitted(dataset, featuresCol=features).numFeatures == count
