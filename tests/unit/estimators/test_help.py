"""What ``help`` and completion show of estimators and models."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest
from torch import nn

from sparkdl.estimators import TorchClassifier, TorchEstimator, TorchModel, evaluation, importances
from sparkdl.estimators.params.inputs import HasRowColumns, scored_columns_of
from tests.unit.estimators.public_classes import ESTIMATORS, MODELS, make_torch_estimator


def help_on(owner):
    return [line.removeprefix(" |  ") for line in pydoc.plain(pydoc.render_doc(owner)).splitlines()]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_help_of_an_estimator_has_at_most_300_lines(name):
    lines = help_on(type(ESTIMATORS[name]()))
    assert len(lines) <= 300
    assert max(map(len, lines)) < 2200
    assert any(line.strip().startswith("epochs: number of passes") for line in lines)


def test_help_of_a_classifier_begins_with_an_example_and_has_no_accessors():
    lines = help_on(TorchClassifier)
    summary = lines.index("Classifies the rows of a table with a multilayer perceptron.")
    assert lines[summary + 2] == "Example::"
    assert "model = classifier.fit(train)" in lines[summary + 5]
    assert any(line.startswith("fit(") for line in lines)
    assert not any(line.startswith(("setEpochs(", "_", "epochs =")) for line in lines)


def test_example_of_an_estimator_is_a_block():
    lines = (TorchEstimator.__doc__ or "").splitlines()
    example = lines.index("Example::")
    assert lines[example + 2] == "    estimator = TorchEstimator("


def test_completion_of_an_instance_has_setters_and_explain_param_has_all_of_the_text():
    estimator = make_torch_estimator()
    assert {"setEpochs", "getEpochs", "epochs", "fit"} <= set(dir(estimator))
    text = estimator.explainParam("keepCheckpoints")
    assert text.startswith("keepCheckpoints: number of the newest checkpoints to keep (> 0)")
    assert text.endswith("(default: 2)")
    assert "A rank is lost with its process" in estimator.explainParam(estimator.maxRestarts)
    assert estimator.explainParams().count("\n") > 60


def test_params_of_ready_made_estimators_say_what_these_take():
    def explain(name, param):
        return ESTIMATORS[name]().explainParam(param)

    assert explain("TextClassifier", "featuresCol") == "featuresCol: column of strings (default: features)"
    assert "(> 0). With a pretrained model, the default is 0.00005. (" in explain(
        "LanguageModel", "learningRate"
    )
    for name in ("TorchClassifier", "ImageClassifier", "TextClassifier"):
        assert "several" not in explain(name, "labels") + explain(name, "probabilityCol")
    assert "several label columns" in explain("TorchEstimator", "labels")


@pytest.fixture(scope="module")
def model():
    return MODELS["TorchModel"]()


def test_a_model_has_only_setters_with_an_effect(model):
    setters = {name for name in dir(model) if name.startswith("set")}
    assert setters == {
        "set",
        "setParams",
        "setFeaturesCol",
        "setLabelCol",
        "setPredictionBatchSize",
        "setPredictionCol",
        "setPredictionType",
        "setProbabilityCol",
        "setRawPredictionCol",
        "setThresholds",
        "setWeightCol",
    }
    assert not hasattr(model, "setEpochs")
    with pytest.raises(AttributeError, match=r"TorchModel has no setEpochs: .* Set it on the estimator"):
        model.setEpochs(3)
    assert model.setPredictionCol("p").getPredictionCol() == "p"
    assert model.getEpochs() == model.getOrDefault("epochs")


def test_params_that_methods_of_a_model_read_can_be_set(model):
    readers = (TorchModel, evaluation, importances, scored_columns_of, HasRowColumns._weight_column)
    sources = map(inspect.getsource, readers)
    read = set(re.findall(r"\b(?:self|model|params)\.get([A-Z]\w*)\(", " ".join(sources)))
    assert {"Thresholds", "WeightCol", "LabelCols", "PredictionCol"} <= read
    assert {name for name in read if not hasattr(model, f"set{name.removesuffix('s')}")} == {"Thresholds"}
    assert hasattr(model, "setThresholds")


def test_a_notebook_shows_a_model_as_a_table(model):
    shown = model._repr_html_()
    assert shown.startswith("<strong>TorchModel</strong><table>")
    assert f"{type(model.module).__name__}, " in shown
    assert "<summary>epochs</summary>" in shown
    assert "<summary>epochs</summary>" not in TorchModel(model.saved)._repr_html_(), "without a fit"
    assert isinstance(model, TorchModel)
    assert isinstance(model.module, nn.Module)
