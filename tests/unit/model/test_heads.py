"""Assignment of model outputs to label columns."""

from __future__ import annotations

import pytest
import torch

from sparkdl.errors import ParamError
from sparkdl.model.heads import NO_LABEL, check_named, first_output, output_of_each

ONE, TWO = torch.zeros(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    "outputs",
    [
        ONE,
        (ONE,),
        {"digit": ONE, "logits": TWO},
        {"logits": ONE, "hidden_states": TWO},
        {"scores": ONE, "hidden_states": (TWO,)},
    ],
)
def test_one_label_column_takes_the_matching_output(outputs):
    assert output_of_each(outputs, ["digit"])["digit"] is ONE


def test_a_model_output_of_transformers_gives_its_logits():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    found = outputs.SequenceClassifierOutput(loss=TWO, logits=ONE, hidden_states=(TWO,))
    assert output_of_each(found, ["digit"])["digit"] is ONE


@pytest.mark.parametrize(
    "outputs", [{"a": ONE, "b": TWO}, {"logits": (ONE,), "hidden": TWO}, (ONE, TWO), {}, None]
)
def test_ambiguous_outputs_are_refused(outputs):
    with pytest.raises(ParamError, match="one entry per row"):
        output_of_each(outputs, ["digit"])


def test_several_label_columns_need_an_output_each():
    assert output_of_each({"b": TWO, "a": ONE}, ["a", "b"]) == {"a": ONE, "b": TWO}
    with pytest.raises(ParamError, match="for each of a, b"):
        output_of_each({"logits": ONE}, ["a", "b"])


def test_the_prediction_without_a_name_is_the_logits_or_the_first_tensor_of_a_tuple():
    assert first_output({"features": TWO, "logits": ONE})[NO_LABEL] is ONE
    assert first_output(("no tensor", ONE, TWO))[NO_LABEL] is ONE
    check_named({"scores": ONE, "hidden": (TWO,)}, [NO_LABEL])
    check_named((ONE, TWO), [NO_LABEL])


def test_names_of_outputs_have_to_say_which_tensors_are_meant():
    with pytest.raises(ParamError, match="tensors features, scores, .*such as {'scores': 'class'}"):
        check_named({"features": TWO, "scores": ONE}, [NO_LABEL])
    with pytest.raises(ParamError, match="outputs names score, .* the tensors logits, scores"):
        check_named({"logits": TWO, "scores": ONE}, ["score"])
