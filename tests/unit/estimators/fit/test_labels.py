"""The classes of labels: those of the rows, or those named by Param labels; on rows in a folder."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

from sparkdl.data import scan_dataset
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.fit.inputs import prepare_fit
from tests.training.scenes.input_scenes import CODES, KINDS
from tests.unit.estimators.fit_examples import make_estimator


@pytest.mark.parametrize(
    ("label", "changes", "classes"),
    [
        ("kind", {}, KINDS),
        ("code", {}, CODES),
        ("number", {}, None),
        ("flag", {"model": nn.Linear(4, 1), "loss": nn.BCEWithLogitsLoss()}, (False, True)),
        ("flag", {"model": nn.Linear(4, 1), "loss": nn.MSELoss()}, None),
    ],
)
def test_labels_are_indexed_unless_they_are_numbers_from_0(dataset, label, changes, classes):
    fit = prepare_fit(make_estimator(labelCol=label, **changes), dataset)
    assert fit.spec.heads[0].label.classes == classes
    assert fit.signature.outputs[0].classes == classes


ONE_OUTPUT = {"model": nn.Linear(4, 1), "labelCol": "number"}


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.BCELoss()])
@pytest.mark.parametrize(
    ("labels", "classes"), [([-1, 1], (-1, 1)), ([1, 2], (1, 2)), ([0, 1], None), ([0.2, 1.0], None)]
)
def test_two_integers_are_the_classes_of_a_model_with_one_output(tmp_path, labels, classes, loss):
    rows = pa.table({"dense": [[1.0] * 4] * 4, "number": [*labels, *labels]})
    pq.write_table(rows, tmp_path / "part-0.parquet")
    changes = {"loss": loss, "model": nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())}
    (head,) = prepare_fit(make_estimator(**ONE_OUTPUT | changes), scan_dataset(str(tmp_path))).spec.heads
    assert head.label.classes == classes
    assert head.label.encode(np.array(labels)).tolist() == (labels if classes is None else [0, 1])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2], r"BCEWithLogitsLoss must lie between 0 and 1, but column 'number' holds 2\."),
        ([7, 7, 7], r"'number' holds 7 \(and 2 more like it\)\. Number the two classes 0 and 1"),
        ([0.0, 2.0, 1.0], r"'number' holds 2\.0\."),
        ([0.0, -1.0, 1.0], r"'number' holds -1\.0\."),
        ([0.0, float("nan"), 1.0], "'number' holds nan"),
        ([[0, 1], [255, 0], [1, 1]], "'number' holds 255"),
    ],
)
def test_labels_of_a_binary_loss_outside_of_0_to_1_are_refused(tmp_path, labels, message):
    pq.write_table(pa.table({"dense": [[1.0] * 4] * 3, "number": labels}), tmp_path / "part-0.parquet")
    shapes = {"number": (2,)} if isinstance(labels[0], list) else {}
    dataset = scan_dataset(str(tmp_path), ["dense", "number"], {"dense": (4,), **shapes})
    model = nn.Linear(4, 2) if shapes else nn.Linear(4, 1)
    with pytest.raises(DataError, match=message):
        prepare_fit(make_estimator(**ONE_OUTPUT | {"model": model, "loss": nn.BCEWithLogitsLoss()}), dataset)


def test_label_that_no_row_had_is_named_on_the_rank(dataset):
    label = prepare_fit(make_estimator(labelCol="kind"), dataset).spec.heads[0].label
    with pytest.raises(DataError, match="'kind' holds 'quince', .* 3 classes .*'apple', 'pear'"):
        label.encode(np.array(["pear", "quince"], dtype=object))


FOUR = {"model": nn.Linear(4, 4)}
SWAPPED = {"labels": [True, False], "model": nn.Linear(4, 1), "loss": nn.BCEWithLogitsLoss()}
NAMED = [
    ("kind", {**FOUR, "labels": ["quince", *KINDS]}, [2, 0], ["pear", "quince"]),
    ("code", {**FOUR, "labels": [9, 7, 5, 3]}, [3, 0], [3, 9]),
    ("flag", SWAPPED, [0, 1], [True, False]),
]


@pytest.mark.parametrize(("label", "changes", "numbers", "values"), NAMED)
def test_labels_param_defines_the_classes_in_order_although_rows_lack_one(
    dataset, label, changes, numbers, values
):
    fit = prepare_fit(make_estimator(labelCol=label, **changes), dataset)
    (head,) = fit.spec.heads
    assert head.label.classes == fit.signature.outputs[0].classes == tuple(changes["labels"])
    given = np.array(values, dtype=object) if label == "kind" else np.array(values)
    assert head.label.encode(given).tolist() == numbers


def test_labels_param_encodes_a_column_of_doubles(tmp_path):
    rows = pa.table({"dense": [[1.0] * 4] * 4, "number": [10.0, 20.0, 10.0, 20.0]})
    pq.write_table(rows, tmp_path / "part-0.parquet")
    named = make_estimator(labels=[20, 10], model=nn.Linear(4, 2))
    (head,) = prepare_fit(named, scan_dataset(str(tmp_path))).spec.heads
    assert head.label.dtype == "int64"
    assert head.label.encode(np.array([10.0, 20.0])).tolist() == [1, 0]
    with pytest.raises(DataError, match=r"'number' holds 30\.0, which is none of the 2 classes"):
        head.label.encode(np.array([10.0, 30.0]))


def test_labels_param_of_numbers_from_0_needs_no_encoding_and_allows_an_ignore_index(tmp_path):
    rows = pa.table({"dense": [[1.0] * 4] * 4, "number": [0, 2, -1, 2]})
    pq.write_table(rows, tmp_path / "part-0.parquet")
    dataset = scan_dataset(str(tmp_path))
    ignoring = make_estimator(labels=[0, 1, 2], loss=nn.CrossEntropyLoss(ignore_index=-1))
    (head,) = prepare_fit(ignoring, dataset).spec.heads
    assert head.label.classes is None
    with pytest.raises(DataError, match=r"in \[0, 3\), but column 'number' holds -1"):
        prepare_fit(make_estimator(labels=[0, 1, 2], loss=nn.CrossEntropyLoss(ignore_index=-2)), dataset)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"labels": [3, 7, 5], "labelCol": "code"}, DataError, "'code' holds 9, .* none of the 3 labels"),
        (
            {"labels": [3, 9, 5], "labelCol": "code", "loss": nn.CrossEntropyLoss(ignore_index=-1)},
            ParamError,
            "column 'code' has ignore_index -1, .* labels is 0 to 2.* Number the classes",
        ),
        (
            {"labels": [0, 1], "model": nn.Linear(4, 2)},
            DataError,
            r"lie in \[0, 2\).* 'number' holds 0 to 2.*give the model 3 outputs",
        ),
        ({"labels": [0, 1]}, DataError, "2 labels of column 'number', and the model has 3 classes"),
        ({"labels": ["a", "b", "c"]}, DataError, "names strings, and column 'number' holds numbers"),
        ({"labels": [0, 1, 2], "labelCol": "kind"}, DataError, "names numbers, .*'kind' holds strings"),
        (
            {"labels": [0, 1, 2], "labelCol": "target", "loss": nn.MSELoss(), "model": nn.Linear(4, 1)},
            ParamError,
            "labels of column 'target', .* not over classes",
        ),
    ],
)
def test_invalid_labels_param_is_refused(dataset, changes, error, message):
    with pytest.raises(error, match=message):
        prepare_fit(make_estimator(**changes), dataset)
