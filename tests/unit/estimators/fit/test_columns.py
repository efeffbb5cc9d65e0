"""Checks of features, labels and users' functions before a fit starts, on rows in a folder."""

from __future__ import annotations

import gc
import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from sparkdl.data import scan_dataset
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.fit.inputs import check_columns, prepare_fit
from sparkdl.estimators.fit.tracking import describe_dataset
from sparkdl.estimators.scoring.udf import score_batch
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from tests.training.scenes.input_scenes import Two, decode
from tests.unit.estimators.fit_examples import (
    HEADS,
    Encoder,
    fail,
    first_mean,
    loss_alone,
    loss_by_gradients,
    make_estimator,
    prepare,
    two_values,
)


@pytest.mark.parametrize("labels", [[1.0, 2.0], [[1.0, 2.0], [3.0, 4.0]]])
def test_label_column_with_the_name_of_the_matrix_is_refused(labels, tmp_path):
    rows = pa.table({"a": [0.5, 1.5], "b": [2.0, 1.0], "features": labels})
    pq.write_table(rows, tmp_path / "rows.parquet")
    names = {"featuresCol": ["a", "b"], "labelCol": "features", "passFeaturesBy": "matrix"}
    estimator = make_estimator(model=nn.Linear(2, 2), loss=nn.MSELoss(), **names)
    with pytest.raises(ParamError, match="'features', and so is a label"):
        prepare_fit(estimator, scan_dataset(str(tmp_path)))


MISSING = {
    "a slip of the pen": ({"labelCol": "lable"}, "labelCol is 'lable', and the .* Did you mean 'label'"),
    "one of several": ({"labelCol": ["label", "x"]}, "labelCol names 'x', .* no such column"),
    "a default": ({"featuresCol": None}, r"featuresCol is 'features' \(the default\), .*: dense, label"),
    "a weight": ({"weightCol": "w"}, "weightCol is 'w'"),
    "an indicator": ({"validationIndicatorCol": "v"}, "validationIndicatorCol is 'v'"),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_column_is_named_with_its_param(name):
    changes, message = MISSING[name]
    estimator = make_estimator(**{"labelCol": "label", **changes})
    with pytest.raises(DataError, match=f"Param {message}"):
        check_columns(estimator, estimator._columns_of_fit(), ["dense", "label"])


def test_all_missing_columns_are_named_together():
    estimator = make_estimator(
        featuresCol=["dense", "m1", "m2", *(f"c{i}" for i in range(500))], labelCol="lable"
    )
    with pytest.raises(DataError) as caught:
        check_columns(estimator, estimator._columns_of_fit(), ["dense", "label", "twice", "twice"])
    text = str(caught.value)
    assert "featuresCol names 'm1', 'm2', 'c0', " in text
    assert "and 492 more, and the DataFrame has no such columns." in text
    assert "labelCol is 'lable', and the DataFrame has no such column. Did you mean 'label'?" in text
    assert text.endswith("The DataFrame's columns are: dense, label, twice, twice.")
    assert len(text) < 1000


def test_existing_columns_and_steps_without_labels_are_accepted():
    estimator = make_estimator()
    check_columns(estimator, estimator._columns_of_fit(), ["number", "dense", "another"])
    estimator = make_estimator(labelCol=None, loss=None, trainStep=loss_alone)
    check_columns(estimator, estimator._columns_of_fit(), ["dense"])


def half(columns):
    return columns["dense"][: len(columns["dense"]) // 2]


def as_label(columns):
    return {"number": columns["dense"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"passFeaturesBy": "name"}, "does not fit the model Linear.*unexpected keyword argument 'dense'"),
        (
            {"featuresCol": ["age", "dense"], "passFeaturesBy": "matrix"},
            "Column 'dense' holds arrays, and a matrix",
        ),
        (
            {"featuresCol": ["age", "w"], "passFeaturesBy": "matrix"},
            r"matrix of the features does not fit .*Linear: .*\(1, 2\)",
        ),
        (
            {"featuresCol": ["age", "w", "code", "target"]},
            r"cannot be called with 'age' .*5 were given\. .* set passFeaturesBy=",
        ),
        ({"prepareFeatures": fail}, "prepareFeatures failed on 1 row of dense: KeyError: 'nowhere'"),
        (
            {"prepareFeatures": lambda columns: {"kind": columns["kind"]}, "featuresCol": ["kind"]},
            "Column 'kind' holds values that are not numbers, .*with prepareFeatures",
        ),
        (
            {"model": nn.Linear(4, 1), "labelCol": "kind", "loss": nn.MSELoss()},
            "'kind' holds strings, .* loss over classes",
        ),
        ({"model": nn.Linear(4, 2), "labelCol": "kind"}, "'kind' holds more than the 2 classes"),
        ({"model": nn.Linear(4, 5), "labelCol": "kind"}, "'kind' holds 3 different values, fewer than the 5"),
        ({"model": nn.Linear(4, 3), "labelCol": "flag"}, "'flag' holds 2 different values, fewer than the 3"),
        (
            {"model": nn.Linear(4, 5), "labelCol": "code"},
            r"lie in \[0, 5\).* Number the classes .* Param labels\.",
        ),
        ({"labelCol": "padded"}, r"'padded' holds -100 to 1\. .* -100 by default.*ignore_index=-1"),
        ({"labelCol": "padded_double"}, r"'padded_double' holds the label -100: torch"),
        (
            {"model": nn.Linear(4, 3), "labelCol": "large"},
            r"'large' holds the label 9007199254740995, .* up to 2\*\*53",
        ),
        (
            {"model": nn.Linear(4, 2), "labelCol": "target"},
            r"whole numbers in \[0, 2\).* Number the classes .* Param labels",
        ),
        ({"model": nn.Linear(4, 2), "labelCol": "code"}, r"lie in \[0, 2\)"),
        ({"labelCol": "blob"}, "'blob' holds binary values, which cannot be labels"),
        (
            {"loss": None, "trainStep": loss_alone, "labelCol": ["number", "kind"]},
            "'kind' holds string values, and a trainStep .* StringIndexer",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(dataset, changes, message):
    with pytest.raises(DataError, match=message):
        prepare(make_estimator(**changes), dataset)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**HEADS, "loss": [nn.CrossEntropyLoss()]}, "loss has 1 entries, and labelCol 2: number, target"),
        ({"lossWeights": [1.0, 2.0]}, "lossWeights has 2 entries, and labelCol 1"),
        (
            {**HEADS, "loss": [nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss()]},
            "losses that sum over the rows",
        ),
        (
            {"labelCol": ["number", "target"], "loss": [nn.CrossEntropyLoss(), nn.MSELoss()]},
            r"for each of number, target, .*shape \(1, 3\)",
        ),
        (
            {"passFeaturesBy": "matrix", "prepareFeatures": decode},
            'passFeaturesBy is "matrix", and prepareFeatures makes the inputs',
        ),
        ({"prepareFeatures": half}, r"prepareFeatures returned 'dense' of shape \(0, 4\) for 1 row\."),
        ({"prepareFeatures": as_label}, "prepareFeatures returned 'number', which is a label"),
        (
            {**HEADS, "loss": [nn.CrossEntropyLoss(ignore_index=1), nn.MSELoss()]},
            "label column 'number' takes the mean over class weights",
        ),
        (
            {**HEADS, "loss": [nn.CrossEntropyLoss(weight=torch.ones(3)), nn.MSELoss()]},
            "label column 'number' takes the mean",
        ),
        (
            {"augment": lambda batch: {name: np.repeat(values, 2, axis=0) for name, values in batch.items()}},
            "augment returned 2 rows of 'dense' for 1",
        ),
        (
            {"augment": lambda batch: None},
            "augment must return a dict .*: dense, number; it returned NoneType",
        ),
        (
            {"augment": lambda batch: {**{f"mask{n}": 0 for n in range(12)}, "dense": batch["dense"]}},
            r"augment must return a dict .*: dense, number; what it returned differs in number, mask0, .* and 3 more",
        ),
        (
            {"featuresCol": "code", "labelCol": "code", "model": nn.Linear(1, 3)},
            "'code' is a feature and a label",
        ),
        ({"loss": None, "trainStep": two_values}, r"must return the mean loss .* it returned shape \(4,\)"),
        (
            {"loss": None, "trainStep": lambda model, batch: batch["nowhere"]},
            "trainStep failed on the first rows: KeyError: 'nowhere'",
        ),
        (
            {"loss": None, "trainStep": lambda model, batch: model(batch["dense"]).mean().detach()},
            "trainStep returned a loss that does not depend on any weight",
        ),
        (
            {"loss": None, "trainStep": lambda model, batch: nn.Linear(4, 3)(batch["dense"]).mean()},
            "trainStep returned a loss that does not depend on any weight",
        ),
        (
            {"loss": None, "trainStep": loss_by_gradients, "validationFraction": 0.5},
            "trainStep without gradients, .* failed .*: RuntimeError",
        ),
        (
            {"model": Encoder(sparse=True), "loss": None, "trainStep": first_mean, "numWorkers": 2},
            "Param model has sparse gradients",
        ),
        (
            {"loss": None, "trainStep": loss_alone, "optimizer": partial(torch.optim.LBFGS, lr=1)},
            "optimizer makes LBFGS, which cannot step",
        ),
        (
            {"loss": None, "trainStep": loss_alone, "metrics": {"right": lambda outputs, labels: labels}},
            "metrics need the model's outputs",
        ),
        ({"augment": fail}, "augment failed on the first rows: KeyError"),
    ],
)
def test_params_and_functions_that_do_not_fit_are_refused(dataset, changes, message):
    with pytest.raises(ParamError, match=message):
        prepare_fit(make_estimator(**changes), dataset)


def test_prepared_inputs_take_their_dtypes_from_what_the_function_returns(dataset):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.last = nn.Embedding(3, 2), nn.Linear(6, 3)

        def forward(self, *, pixels, kind):
            return self.last(torch.cat([pixels, self.table(kind)], dim=1))

    def prepare(columns):
        return {**decode(columns), "kind": decode(columns)["kind"].astype(np.int32)}

    estimator = make_estimator(
        model=Mixed(), featuresCol=["blob", "kind"], passFeaturesBy="name", prepareFeatures=prepare
    )
    inputs = prepare_fit(estimator, dataset).spec.inputs.inputs
    assert {entry.name: entry.dtype for entry in inputs} == {"pixels": "float32", "kind": "int32"}


def test_padded_columns_take_rows_of_other_lengths_and_integers_of_another_size(dataset):
    """Also if all training rows happen to have the same length."""
    estimator = make_estimator(model=Two(), featuresCol=["triple", "dense"], paddingValue=0)
    inputs = prepare_fit(estimator, dataset).signature.inputs
    tokens = pa.array([[1, 2, 3, 4, 5], [6]], pa.list_(pa.int32()))
    dense = pa.array([[0.0] * 4] * 2, pa.list_(pa.float64()))
    torch.manual_seed(0)
    model = Two().eval()
    output = ModelOutput(name="y", kind="value", shape=(3,))
    predictor = Predictor(SavedModel(model, ModelSignature(inputs=inputs, outputs=(output,))))
    found = score_batch(predictor, (tokens, dense)).to_pylist()
    with torch.no_grad():
        expected = model(torch.tensor([[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]]), torch.zeros(2, 4))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_replaced_model_is_released():
    first = nn.Linear(4, 3)
    estimator = make_estimator(model=first)
    estimator.setModel(nn.Linear(4, 3))
    assert not [referrer for referrer in gc.get_referrers(first) if isinstance(referrer, dict)]


def test_columns_are_described_in_the_format_in_which_mlflow_writes_them(tmp_path):
    types = pytest.importorskip("mlflow.types.schema", reason="mlflow is not installed")
    rows = {"number": [0.5], "dense": [[0.5, 1.5]], "matrix": [[[0.5], [1.5]]]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    estimator = make_estimator(featuresCol=["dense", "matrix"])
    logged = json.loads(describe_dataset(estimator, scan_dataset(str(tmp_path)), None, None).schema)
    double = types.DataType.double
    kinds = {"number": double, "dense": types.Array(double), "matrix": types.Array(types.Array(double))}
    expected = {name: types.ColSpec(kind, name=name).to_dict() for name, kind in kinds.items()}
    assert {column["name"]: column for column in logged["mlflow_colspec"]} == expected
