"""Checks of features, labels and users' functions before a fit starts, on rows in a folder."""

from __future__ import annotations

import gc
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
from sparkdl.estimators.fit.tracking import _schema_of
from sparkdl.estimators.scoring.udf import score_batch
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from sparkdl.tracking.logged_model import LoggedColumn
from tests.training.scenes.input_scenes import Two, decode, write_rows
from tests.unit.estimators.fit_examples import (
    HEADS,
    Encoder,
    fail,
    first_mean,
    loss_alone,
    loss_by_gradients,
    make_estimator,
    two_values,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows")


@pytest.mark.parametrize("labels", [[1.0, 2.0], [[1.0, 2.0], [3.0, 4.0]]])
def test_label_column_with_the_name_of_the_matrix_is_refused(labels, tmp_path):
    rows = pa.table({"a": [0.5, 1.5], "b": [2.0, 1.0], "features": labels})
    pq.write_table(rows, tmp_path / "rows.parquet")
    names = {"featuresCol": ["a", "b"], "labelCol": "features", "passFeaturesBy": "matrix"}
    estimator = make_estimator(model=nn.Linear(2, 2), loss=nn.MSELoss(), **names)
    with pytest.raises(ParamError, match="matrix of the features is called 'features', and so is a label"):
        prepare_fit(estimator, scan_dataset(str(tmp_path)))


MISSING = {
    "a slip of the pen": ({"labelCol": "lable"}, "labelCol is 'lable', and the .* Did you mean 'label'"),
    "one of several": (
        {"labelCol": ["label", "x"]},
        "labelCol names 'x', and the DataFrame has no such column",
    ),
    "a default": (
        {"featuresCol": None},
        r"featuresCol is 'features' \(the default\), .*Its columns are: dense, label",
    ),
    "a weight": ({"weightCol": "w"}, "weightCol is 'w'"),
    "an indicator": ({"validationIndicatorCol": "v"}, "validationIndicatorCol is 'v'"),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_column_is_named_with_its_param(name):
    changes, message = MISSING[name]
    with pytest.raises(DataError, match=f"Param {message}"):
        check_columns(make_estimator(**{"labelCol": "label", **changes}), ["dense", "label"])


def test_existing_columns_and_steps_without_labels_are_accepted():
    check_columns(make_estimator(), ["number", "dense", "another"])
    without = {"labelCol": None, "loss": None, "trainStep": loss_alone}
    check_columns(make_estimator(**without), ["dense"])


def half(columns):
    return columns["dense"][: len(columns["dense"]) // 2]


def as_label(columns):
    return {"number": columns["dense"]}


REFUSED = {
    "one loss too few": (
        {**HEADS, "loss": [nn.CrossEntropyLoss()]},
        ParamError,
        "Param loss has 1 entries, and labelCol 2: number, target",
    ),
    "one weight too many": (
        {"lossWeights": [1.0, 2.0]},
        ParamError,
        "Param lossWeights has 2 entries, and labelCol 1",
    ),
    "losses that reduce in two ways": (
        {**HEADS, "loss": [nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss()]},
        ParamError,
        "losses that sum over the rows and others that do not",
    ),
    "one output for two labels": (
        {"labelCol": ["number", "target"], "loss": [nn.CrossEntropyLoss(), nn.MSELoss()]},
        ParamError,
        r"must return a tensor for each of number, target, .* it returned shape \(1, 3\)",
    ),
    "strings as features": (
        {"featuresCol": "kind"},
        DataError,
        "Column 'kind' holds string values, not numbers. Give prepareFeatures .* StringIndexer, .* TorchClassifier "
        "and TorchRegressor take strings as categories, TextClassifier takes texts",
    ),
    "a name that forward lacks": (
        {"passFeaturesBy": "name"},
        DataError,
        "Column 'dense' does not fit the model Linear.*unexpected keyword argument 'dense'",
    ),
    "a matrix with an array": (
        {"featuresCol": ["age", "dense"], "passFeaturesBy": "matrix"},
        DataError,
        "Column 'dense' holds arrays, and a matrix is made of columns of one number each",
    ),
    "a matrix of what a function makes": (
        {"passFeaturesBy": "matrix", "prepareFeatures": decode},
        ParamError,
        'passFeaturesBy is "matrix", and prepareFeatures makes the inputs. Leave one of them out',
    ),
    "a matrix that the model cannot take": (
        {"featuresCol": ["age", "w"], "passFeaturesBy": "matrix"},
        DataError,
        r"The matrix of the features does not fit the model Linear: a batch of shape \(1, 2\)",
    ),
    "columns one by one for a model that takes a matrix": (
        {"featuresCol": ["age", "w", "code", "target"]},
        DataError,
        r"cannot be called with 'age' .*but 5 were given\. Where it takes them as one matrix, set passFeaturesBy=",
    ),
    "a function that loses rows": (
        {"prepareFeatures": half},
        ParamError,
        r"Param prepareFeatures returned 'dense' of shape \(0, 4\) for 1 rows",
    ),
    "a function that fails": (
        {"prepareFeatures": fail},
        DataError,
        "Param prepareFeatures failed on 1 rows of dense: KeyError: 'nowhere'",
    ),
    "a function that returns strings": (
        {"prepareFeatures": lambda columns: {"kind": columns["kind"]}, "featuresCol": ["kind"]},
        DataError,
        "Column 'kind' holds str, not numbers. Make numbers of it with prepareFeatures",
    ),
    "inputs called like the label": (
        {"prepareFeatures": as_label},
        ParamError,
        "Param prepareFeatures returned 'number', which is a label or weight column",
    ),
    "strings for a loss over numbers": (
        {"model": nn.Linear(4, 1), "labelCol": "kind", "loss": nn.MSELoss()},
        DataError,
        "Column 'kind' holds strings, which are labels for a loss over classes",
    ),
    "more strings than outputs": (
        {"model": nn.Linear(4, 2), "labelCol": "kind"},
        DataError,
        "Column 'kind' holds more than the 2 classes of the model",
    ),
    "fewer strings than outputs": (
        {"model": nn.Linear(4, 5), "labelCol": "kind"},
        DataError,
        "Column 'kind' holds 3 different values, fewer than the 5 classes",
    ),
    "one of two booleans' outputs too many": (
        {"model": nn.Linear(4, 3), "labelCol": "flag"},
        DataError,
        "Column 'flag' holds 2 different values, fewer than the 3 classes",
    ),
    "fewer odd integers than outputs": (
        {"model": nn.Linear(4, 5), "labelCol": "code"},
        DataError,
        r"Labels must lie in \[0, 5\).* Number the classes from 0.* Or name the classes in Param labels\.",
    ),
    "torch's label for rows that are left out": (
        {"labelCol": "padded"},
        DataError,
        r"'padded' holds -100 to 1\. torch's losses leave out rows with the label -100 by default.*ignore_index=-1",
    ),
    "the same as a double": (
        {"labelCol": "padded_double"},
        DataError,
        r"'padded_double' holds the label -100: torch's losses leave out",
    ),
    "integers that no double holds": (
        {"model": nn.Linear(4, 3), "labelCol": "large"},
        DataError,
        "Column 'large' holds the label 9007199254740995, .* up to 2\\*\\*53",
    ),
    "an ignored label beside another head": (
        {**HEADS, "loss": [nn.CrossEntropyLoss(ignore_index=1), nn.MSELoss()]},
        ParamError,
        "The loss of label column 'number' divides by the labels or the weights of classes that count",
    ),
    "weights of classes beside another head": (
        {**HEADS, "loss": [nn.CrossEntropyLoss(weight=torch.ones(3)), nn.MSELoss()]},
        ParamError,
        "The loss of label column 'number' divides",
    ),
    "changes of a batch that double it": (
        {"augment": lambda batch: {name: np.repeat(values, 2, axis=0) for name, values in batch.items()}},
        ParamError,
        "Param augment returned 2 rows of 'dense' for 1",
    ),
    "changes of a batch that return nothing": (
        {"augment": lambda batch: None},
        ParamError,
        "Param augment must return a dict of the arrays that it is given: dense, number; it returned NoneType",
    ),
    "a feature that has to be indexed": (
        {"featuresCol": "code", "labelCol": "code", "model": nn.Linear(1, 3)},
        ParamError,
        "Column 'code' is a feature and a label whose values have to be indexed",
    ),
    "doubles that are no classes": (
        {"model": nn.Linear(4, 2), "labelCol": "target"},
        DataError,
        r"whole numbers in \[0, 2\).* Number the classes from 0, name them in Param labels, or give",
    ),
    "more integers than outputs": (
        {"model": nn.Linear(4, 2), "labelCol": "code"},
        DataError,
        r"Labels must lie in \[0, 2\)",
    ),
    "bytes as labels": (
        {"labelCol": "blob"},
        DataError,
        "Column 'blob' holds binary values, which cannot be labels",
    ),
    "strings as labels of a step": (
        {"loss": None, "trainStep": loss_alone, "labelCol": ["number", "kind"]},
        DataError,
        "Column 'kind' holds string values, and a trainStep gets labels as numbers. .* StringIndexer",
    ),
    "a step that returns two values": (
        {"loss": None, "trainStep": two_values},
        ParamError,
        r"Param trainStep must return the mean loss .* it returned shape \(4,\)",
    ),
    "a step that fails": (
        {"loss": None, "trainStep": lambda model, batch: batch["nowhere"]},
        ParamError,
        "Param trainStep failed on the first rows: KeyError: 'nowhere'",
    ),
    "a step without a graph": (
        {"loss": None, "trainStep": lambda model, batch: model(batch["dense"]).mean().detach()},
        ParamError,
        "Param trainStep returned a loss in which no weight of the model has a part",
    ),
    "a step of another model's loss": (
        {"loss": None, "trainStep": lambda model, batch: nn.Linear(4, 3)(batch["dense"]).mean()},
        ParamError,
        "Param trainStep returned a loss in which no weight of the model has a part",
    ),
    "a step that needs gradients where there are none": (
        {"loss": None, "trainStep": loss_by_gradients, "validationFraction": 0.5},
        ParamError,
        "Param trainStep without gradients, as validation calls it, failed on the first rows: RuntimeError",
    ),
    "sparse gradients of a step": (
        {"model": Encoder(sparse=True), "loss": None, "trainStep": first_mean, "numWorkers": 2},
        ParamError,
        "Param model has sparse gradients, which can neither be averaged over workers nor clipped",
    ),
    "a step for an optimizer that takes steps of its own": (
        {
            "loss": None,
            "trainStep": loss_alone,
            "optimizer": partial(torch.optim.LBFGS, lr=1),
        },
        ParamError,
        "Param optimizer makes LBFGS, which cannot step by gradients alone",
    ),
    "metrics without outputs": (
        {"loss": None, "trainStep": loss_alone, "metrics": {"right": lambda outputs, labels: labels}},
        ParamError,
        "Param metrics need the model's outputs, and trainStep returns the loss alone",
    ),
    "changes of a batch that fail": (
        {"augment": fail},
        ParamError,
        "Param augment failed on the first rows: KeyError",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_columns_and_functions_that_do_not_fit_are_refused(dataset, name):
    changes, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
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
    assert {each.name: each.dtype for each in inputs} == {"pixels": "float32", "kind": "int64"}


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
    assert not [each for each in gc.get_referrers(first) if isinstance(each, dict)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_logged_type_of_a_column_is_the_one_that_mlflow_writes(depth):
    schema = pytest.importorskip("mlflow.types.schema", reason="mlflow is not installed")
    kind = schema.DataType.double
    for _ in range(depth):
        kind = schema.Array(kind)
    expected = schema.ColSpec(kind, name="x").to_dict()
    logged = LoggedColumn(name="x", kind="double", depth=depth)
    assert {**_schema_of(logged), "name": "x", "required": True} == expected
