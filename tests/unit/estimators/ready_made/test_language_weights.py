"""The initial weights of a language model: a network without weights on the driver, and files that ranks can read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sparkdl.data import Store
from sparkdl.errors import StoreError
from sparkdl.estimators.ready_made.language_weights import beginning_of_folder, beginning_of_sizes
from sparkdl.networks.decoder import DecoderSizes
from sparkdl.networks.language import learn_tokenizer
from sparkdl.networks.language_folder import why_converted
from sparkdl.parallel import draw_weights, load_weights
from sparkdl.parallel.weights import copy_weights

transformers = pytest.importorskip("transformers")


def real_parameters(module):
    return [name for name, parameter in module.named_parameters() if not parameter.is_meta]


@pytest.fixture(params=["llama", "gpt2"])
def folder(request, tmp_path):
    learned = learn_tokenizer(["the cat sat on the mat"], 290)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned.library_tokenizer, eos_token="<|end|>"
    )
    tokenizer.save_pretrained(tmp_path / "folder")
    ends = {"bos_token_id": None, "eos_token_id": learned.end}
    if request.param == "llama":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends)
    else:  # has a tied head, which is not in the files
        config = transformers.GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, **ends)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "folder", max_shard_size="40KB")
    return str(tmp_path / "folder")


def test_decoder_from_sizes_has_no_weights_and_draws_them_by_seed():
    first, again = (
        beginning_of_sizes(DecoderSizes(vocabulary=64, width=16, layers=2, heads=2)) for _ in range(2)
    )
    assert first.weights == "drawn"
    assert not real_parameters(first.network)
    for beginning in (first, again):
        draw_weights(beginning.network, seed=3)
    for name, weight in first.network.state_dict().items():
        assert torch.equal(weight, again.network.state_dict()[name])
        assert weight.ndim == 1 or 0 < weight.std() < 0.03, name


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_weights_of_a_folder_are_not_read_on_the_driver_and_reach_the_ranks_whole(
    folder, tmp_path, lora_rank
):
    if lora_rank is not None:
        pytest.importorskip("peft")
    tokenizer, beginning = beginning_of_folder(folder, lora_rank=lora_rank, seed=0)
    assert not real_parameters(beginning.network)
    with beginning.reachable_weights(Store(str(tmp_path / "store"))) as copied:
        assert copied != folder
        load_weights(beginning.network, copied, seed=5)
    assert not Path(copied.removeprefix("file://")).exists()
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([tokenizer.encode("the cat sat on a mat")])
    found = beginning.network.eval()(tokens, torch.zeros_like(tokens))
    # Adapters initially change nothing.
    torch.testing.assert_close(found, expected.eval()(tokens).logits.transpose(1, 2), rtol=1e-4, atol=1e-5)
    drawn = [parameter for name, parameter in beginning.network.named_parameters() if ".lora_A." in name]
    assert bool(drawn) == (lora_rank is not None)
    assert all(parameter.requires_grad and parameter.std() > 0 for parameter in drawn)


def test_weights_are_copied_to_another_filesystem_and_linked_on_the_same_one(folder, tmp_path):
    copy_weights(folder, "memory://copied")
    copy_weights(folder, str(tmp_path / "linked"))
    linked = tmp_path / "linked" / "model.safetensors.index.json"
    assert linked.samefile(Path(folder) / linked.name)
    networks = []
    for place in (folder, "memory://copied", str(tmp_path / "linked")):
        _, beginning = beginning_of_folder(folder, lora_rank=None, seed=0)
        load_weights(beginning.network, place)
        networks.append(beginning.network.state_dict())
    for name, weight in networks[0].items():
        assert torch.equal(networks[1][name], weight)
        assert torch.equal(networks[2][name], weight)
    with pytest.raises(StoreError, match=r"model\.safetensors in .* cannot be read"):
        copy_weights(str(tmp_path), "memory://nothing")


def test_folder_with_more_weights_than_the_model_is_read_whole_with_a_warning(folder, caplog):
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for file in Path(folder).glob("model*"):
        file.unlink()
    weights = {name: weight.clone() for name, weight in whole.state_dict().items()}
    safetensors.torch.save_file(
        {**weights, "mask": torch.ones(2)}, Path(folder) / "model.safetensors", {"format": "pt"}
    )
    with caplog.at_level(logging.WARNING):
        _, beginning = beginning_of_folder(folder, lora_rank=None, seed=0)
    assert "reads the whole model" in caplog.text
    assert "'mask'" in caplog.text
    assert beginning.weights is None
    for name, weight in whole.named_parameters():
        assert torch.equal(beginning.network.decoder.get_parameter(name), weight)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"transformers_weights": "other.safetensors"}, "names the file"),
    ],
)
def test_folder_with_quantized_or_renamed_weights_is_not_read_in_parts(folder, change, reason):
    file = Path(folder) / "config.json"
    assert why_converted(folder) is None
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert reason in why_converted(folder)
