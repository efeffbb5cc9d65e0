"""Shapes of models: their parameters equal those of the modules, and sizes that cannot work are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig

from sparkdl.errors import ParamError
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel import Parallelism, on_meta
from sparkdl.planner import MODELS, DecoderShape, count
from sparkdl.planner.counting import shape_of_module
from sparkdl.planner.shape import shape_from_text, shape_of_config

SIZES = [
    DecoderSizes(vocabulary=96, width=32, layers=3, heads=4),
    DecoderSizes(vocabulary=96, width=64, layers=2, heads=4, key_heads=2, is_tied=False, hidden=160),
]


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("sizes", SIZES)
def test_parameters_of_a_decoder_are_those_of_its_module(sizes: DecoderSizes) -> None:
    module = Decoder(sizes)
    assert shape_of_module(module, sequence=16).parameters == numel(module)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-1b", 1.236), ("llama-8b", 8.030), ("llama-70b", 70.55)]
)
def test_parameters_of_named_models_are_those_that_are_published(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_shape_of_a_llama_folder_has_the_parameters_of_the_model(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        head_dim=32,
        max_position_embeddings=256,
    )
    config.save_pretrained(tmp_path)
    with on_meta():
        model = LlamaForCausalLM(config)
    shape = shape_from_text(str(tmp_path))
    assert shape.parameters == numel(model) == shape_of_module(model).parameters
    assert shape.sequence == 256
    assert shape_from_text(str(tmp_path), sequence=64).sequence == 64


def test_shape_of_gpt2_lacks_only_its_positions() -> None:
    config = GPT2Config()
    with on_meta():
        model = GPT2LMHeadModel(config)
    positions = config.n_positions * config.n_embd
    assert shape_of_config(config.to_dict()).parameters + positions == numel(model)


def test_a_mixture_of_experts_is_refused_by_name() -> None:
    with pytest.raises(ParamError, match="tiny is a mixture of experts"):
        shape_of_config(MixtralConfig().to_dict(), name="tiny")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParamError, match="not a folder of a Hugging Face model"):
        shape_from_text(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ParamError, match="no vocab_size and no num_hidden_layers"):
        shape_from_text(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama-9b", r"'llama-9b' is not a model: .* in Python: sparkdl.planner.plan\(module, "),
        ("width=8,layers=2", "lack heads, vocabulary"),
        ("width=8,layers=2,heads=2,vocabulary=16", "lack --sequence"),
        ("width=8,depth=2", "'depth=2' is not a size"),
        ("width=wide", "'width=wide' is not a size"),
    ],
)
def test_a_text_that_names_no_model_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        shape_from_text(text)


def test_sizes_in_a_text_make_a_shape() -> None:
    shape = shape_from_text("width=64,layers=2,heads=4,vocabulary=96,is_gated=0", sequence=32)
    assert (shape.inner, shape.is_gated, shape.sequence) == (256, False, 32)


def test_sizes_that_do_not_divide_the_model_say_why() -> None:
    shape = DecoderShape(vocabulary=96, width=32, layers=2, heads=4, key_heads=2, sequence=64)
    assert shape.why_not(Parallelism(data=1, tensor=4)) == "tensor 4 does not divide key_heads 2"
    assert "twice context 64" in str(shape.why_not(Parallelism(data=1, context=64)))
    assert shape.why_not(Parallelism(data=1, tensor=2, context=4, sequence=True)) is None
    with pytest.raises(ParamError, match="key_heads 3 must divide heads 4"):
        DecoderShape(vocabulary=96, width=32, layers=2, heads=4, key_heads=3, sequence=64)


def test_a_counted_module_has_its_parameters_and_operations() -> None:
    module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 8))
    counted = count(module, torch.zeros(6, 32))
    assert counted.parameters == numel(module)
    forward = 2 * 32 * 32 * 4 + 2 * 32 * 8
    assert counted.flops_per_row() == 3 * forward
    assert all(not parameter.is_meta for parameter in module.parameters()), "the module itself stays"


def test_a_counted_decoder_has_the_numbers_of_its_sizes() -> None:
    module = Decoder(SIZES[1])
    shape, counted = (
        shape_of_module(module, sequence=32),
        count(module, torch.zeros(2, 32, dtype=torch.int64)),
    )
    assert (counted.layers, counted.parameters) == (shape.layers, shape.parameters)
    products = 6 * 32 * (counted.layers * counted.block + 96 * 64)
    assert counted.flops_per_row() == pytest.approx(products, rel=0.1)  # attention is small here


def test_a_module_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ParamError, match="Linear cannot be called on the meta device"):
        count(nn.Linear(4, 4), torch.zeros(2, 5))
    with pytest.raises(ParamError, match="Linear is not a decoder"):
        shape_of_module(nn.Linear(4, 4))


def test_configurations_without_a_tie_have_that_of_their_family() -> None:
    sizes = {
        "vocab_size": 100,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "text_config": None,
    }
    tied = {
        kind: shape_of_config({**sizes, "model_type": kind}).is_tied for kind in ("gemma", "qwen3", "llama")
    }
    assert tied == {"gemma": True, "qwen3": False, "llama": False}
    assert shape_of_config({**sizes, "model_type": "falcon"}).key_heads == 1
    grouped = {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2}
    assert shape_of_config({**sizes, **grouped}).key_heads == 2
    with pytest.raises(ParamError, match="cannot read the sizes of model_type 'bert'"):
        shape_of_config({**sizes, "model_type": "bert"})


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "date=2024"
    GPT2Config().save_pretrained(folder)
    assert shape_from_text(str(folder)).vocabulary == 50257


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ParamError, match="head_size must be a positive number, got -8"):
        DecoderShape(vocabulary=96, width=32, layers=2, heads=4, head_size=-8, sequence=64)


def test_a_module_that_trains_nothing_is_refused() -> None:
    for module in (nn.ReLU(), nn.Linear(4, 4).requires_grad_(False)):
        with pytest.raises(ParamError, match="no parameters that are trained"):
            count(module, torch.zeros(1, 4))
