from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml import Model
from pyspark.ml.param import Param
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.estimators import TorchEstimator, TorchModel
from sparkdl.estimators.params.inputs import scored_columns_of
from sparkdl.estimators.scoring.columns import ScoredColumn, check_scored_columns, result_type
from sparkdl.estimators.scoring.udf import score_batch
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput
from tests.training.signatures import make_signature

ROWS = [[1.0, 2.0], [3.0, -1.0], [0.5, 0.0], [2.0, 2.0], [9.0, 1.0]]
LETTERS = ("a", "b", "c")
EVERYTHING = (
    ScoredColumn(name="r", answer="rawPrediction"),
    ScoredColumn(name="p", answer="probability"),
    ScoredColumn(name="y"),
)


class Counted(nn.Linear):
    """Counts the rows of each call."""

    calls: ClassVar[list[int]] = []

    def forward(self, inputs):
        Counted.calls.append(len(inputs))
        return super().forward(inputs)


def predictor_of(kind, outputs, prediction_shape=(), module_class=nn.Linear, **changes):
    torch.manual_seed(0)
    module = module_class(2, outputs)
    signature = make_signature((2,), kind, prediction_shape, **changes)
    return Predictor(SavedModel(module, signature), batch_size=4), module


def outputs_of(module):
    """The outputs in the predictor's batches: for other shapes a BLAS uses other kernels, which round differently."""
    return torch.cat([module(batch) for batch in torch.tensor(ROWS).split(4)]).detach().double()


def test_scores_probabilities_and_predictions_need_one_pass():
    predictor, module = predictor_of("class", 3, module_class=Counted)
    outputs = outputs_of(module)
    Counted.calls.clear()
    found = score_batch(predictor, (pa.array(ROWS),), EVERYTHING).to_pylist()
    assert Counted.calls == [4, 1]
    assert [row["rawPrediction"] for row in found] == outputs.tolist()
    probabilities = torch.tensor([row["probability"] for row in found], dtype=torch.float64)
    torch.testing.assert_close(probabilities, outputs.softmax(1))
    assert [row["prediction"] for row in found] == outputs.argmax(1).tolist()


def test_null_features_give_null_in_every_scored_column():
    predictor, _ = predictor_of("class", 3)
    whole = score_batch(predictor, (pa.array(ROWS),), EVERYTHING).to_pylist()
    holes = score_batch(predictor, (pa.array([None, *ROWS[:2], None, *ROWS[2:]]),), EVERYTHING)
    assert holes.to_pylist() == [None, *whole[:2], None, *whole[2:]]
    for field in holes.flatten():
        assert [index for index, value in enumerate(field.to_pylist()) if value is None] == [0, 3]


def test_empty_and_null_batches_have_the_types_of_scored_rows():
    nothing = pa.array([], pa.list_(pa.float64()))
    for kind, outputs in (("class", 3), ("binary_logit", 1)):
        predictor, _ = predictor_of(kind, outputs)
        some = score_batch(predictor, (pa.array(ROWS),), EVERYTHING)
        for absent in (nothing, pa.array([None], nothing.type)):
            found = score_batch(predictor, (absent,), EVERYTHING)
            assert (found.type, found.to_pylist()) == (some.type, [None] * len(absent))


@pytest.mark.parametrize(
    ("classes", "numbers"),
    [(None, (0, 1, 2)), (LETTERS, (0, 1, 2)), ((-7, 3, 40), (-7, 3, 40))],
)
def test_predicted_class_has_the_requested_type(classes, numbers):
    predictor, module = predictor_of("class", 3, classes=classes)
    places = outputs_of(module).argmax(1).tolist()
    names = LETTERS if classes == LETTERS else [float(number) for number in numbers]
    named = [names[place] for place in places]
    expected = {
        "auto": named,
        "double": [float(numbers[place]) for place in places],
        "long": [numbers[place] for place in places],
        "array": [[name] for name in named],
        "vector": [[float(numbers[place])] for place in places],
    }
    types = {"double": pa.float64(), "long": pa.int64(), "vector": pa.list_(pa.float64())}
    for wanted, values in expected.items():
        found = score_batch(predictor, (pa.array(ROWS),), (ScoredColumn(name="y", type=wanted),))
        assert found.to_pylist() == values
        assert found.type == types.get(wanted, found.type)
        assert [type(value) for value in found.to_pylist()] == [type(value) for value in values]


def test_predicted_number_has_the_requested_type():
    predictor, module = predictor_of("value", 1)
    numbers = outputs_of(module).reshape(-1).tolist()
    for wanted, values in {"double": numbers, "array": [[number] for number in numbers]}.items():
        found = score_batch(predictor, (pa.array(ROWS),), (ScoredColumn(name="y", type=wanted),))
        assert found.to_pylist() == values
    predictor, module = predictor_of("value", 3, (3,))
    for wanted in ("auto", "array", "vector"):
        found = score_batch(predictor, (pa.array(ROWS),), (ScoredColumn(name="y", type=wanted),))
        assert found.to_pylist() == outputs_of(module).tolist()


class TwoHeads(nn.Module):
    def forward(self, x):
        return x, x[:, :1]


KIND = ModelOutput(name="kind", kind="class", num_classes=2, classes=("dog", "owl"))
PRICED = (KIND, ModelOutput(name="price", kind="value"))


def scored_by_two_heads(outputs, columns):
    """The answers of two heads for a row with ``[1, 2]`` and a row without a value."""
    signature = replace(make_signature((2,)), outputs=outputs)
    predictor = Predictor(SavedModel(TwoHeads(), signature))
    return score_batch(predictor, (pa.array([[1.0, 2.0], None]),), columns).to_pylist()


def test_answers_of_several_heads_are_structs():
    outputs = (KIND, ModelOutput(name="is big", kind="binary_logit"))
    found = scored_by_two_heads(outputs, EVERYTHING)
    assert found[0]["prediction"] == {"kind": "owl", "is big": 1.0}
    assert found[0]["rawPrediction"] == {"kind": [1.0, 2.0], "is big": [-1.0, 1.0]}
    np.testing.assert_allclose(found[0]["probability"]["is big"][1], 1 / (1 + np.exp(-1.0)))
    assert found[1] is None
    assert result_type(EVERYTHING, outputs) == (
        "struct<`rawPrediction`: struct<`kind`: array<double>, `is big`: array<double>>, "
        "`probability`: struct<`kind`: array<double>, `is big`: array<double>>, "
        "`prediction`: struct<`kind`: string, `is big`: double>>"
    )


def test_a_head_of_classes_beside_one_of_numbers_has_scores_and_probabilities():
    check_scored_columns(EVERYTHING, PRICED)
    found = scored_by_two_heads(PRICED, EVERYTHING)
    assert found[0]["prediction"] == {"kind": "owl", "price": 1.0}
    assert found[0]["rawPrediction"] == {"kind": [1.0, 2.0]}
    assert found[0]["probability"] == {"kind": torch.tensor([1.0, 2.0]).double().softmax(0).tolist()}
    assert found[1] is None
    assert result_type(EVERYTHING[1:2], PRICED) == "struct<`kind`: array<double>>"
    assert scored_by_two_heads(PRICED, EVERYTHING[1:2]) == [found[0]["probability"], None]


def test_error_for_several_heads_without_classes_names_each_of_them():
    outputs = (PRICED[1], ModelOutput(name="margin", kind="class_margin", num_classes=2))
    message = "probabilityCol is 'p'.*'price' predicts no classes.*'margin' predicts margins"
    with pytest.raises(ParamError, match=message):
        check_scored_columns(EVERYTHING, outputs)
    check_scored_columns(EVERYTHING[:1], outputs)


LONG, DOUBLE = (ScoredColumn(name="y", type=kind) for kind in ("long", "double"))
BAD = {
    "probabilities of a number": ("value", (), EVERYTHING[1], "probabilityCol is 'p'.*predicts no classes"),
    "scores of a number": ("value", (), EVERYTHING[0], "rawPredictionCol is 'r'.*predicts no classes"),
    "probabilities of margins": ("class_margin", (), EVERYTHING[1], "predicts margins, which are not prob"),
    "scores of several classes": ("binary_logit", (4,), EVERYTHING[0], r"classes of shape \(4,\) per row"),
    "a long that is no integer": ("value", (), LONG, "predictionType is 'long'.*'y' is a number with a fr"),
    "a number that is an array": ("value", (3,), DOUBLE, r"predictionType is 'double'.*shape \(3,\) per row"),
}


@pytest.mark.parametrize("name", BAD)
def test_scored_column_that_the_model_cannot_give_is_refused_with_its_param(name):
    kind, shape, column, message = BAD[name]
    with pytest.raises(ParamError, match=message):
        check_scored_columns([column], [ModelOutput(name="y", kind=kind, shape=shape)])
    check_scored_columns(EVERYTHING, [ModelOutput(name="y", kind="class", num_classes=3)])
    check_scored_columns(EVERYTHING[:1], [ModelOutput(name="y", kind="class_margin", num_classes=3)])


def test_only_columns_with_a_name_are_scored():
    estimator = TorchEstimator()
    assert scored_columns_of(estimator) == (ScoredColumn(name="prediction"),)
    estimator.setProbabilityCol("p").setPredictionCol("").setPredictionType("long")
    assert scored_columns_of(estimator) == (ScoredColumn(name="p", answer="probability"),)
    with pytest.raises(ParamError, match="are all empty"):
        scored_columns_of(estimator.setProbabilityCol(""))
    with pytest.raises(ParamError, match="one name: rawPredictionCol 'p', probabilityCol 'p'"):
        scored_columns_of(estimator.setProbabilityCol("p").setRawPredictionCol("p"))


@pytest.mark.parametrize("classes", [LETTERS, (False, True), (-1, 1), None])
def test_labels_are_in_the_order_of_their_probabilities(classes):
    signature = make_signature((2,), "class", num_classes=len(classes or LETTERS), classes=classes)
    module = nn.Linear(2, len(classes or LETTERS))
    model = TorchModel(SavedModel(module, signature))
    if classes is None:
        assert model.labels is None
        return
    assert model.labels == list(classes)
    for row in score_batch(Predictor(model.saved), (pa.array(ROWS),), EVERYTHING).to_pylist():
        assert row["prediction"] == model.labels[int(np.argmax(row["probability"]))]


def test_labels_of_several_heads_come_by_label_column():
    model = TorchModel(SavedModel(nn.Identity(), replace(make_signature(), outputs=PRICED)))
    assert model.labels == {"kind": ["dog", "owl"], "price": None}


def test_torch_model_adds_only_ways_to_make_and_evaluate_one_and_what_a_fit_has_made():
    def public(kind):
        params = {name for name in dir(kind) if name.startswith(("get", "set"))}
        params |= {name for name in dir(kind) if isinstance(getattr(kind, name), Param)}
        return {name for name in dir(kind) if not name.startswith("_")} - params

    added = public(TorchModel) - public(Model) - {"load", "read", "save", "write"}
    made_by = {"from_module", "from_pretrained"}
    methods = {"evaluate", "export", "featureImportances"}
    assert added == {*made_by, *methods, "history", "labels", "module", "saved", "summary"}
