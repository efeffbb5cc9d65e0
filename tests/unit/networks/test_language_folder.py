"""Language models read from and written to folders of Hugging Face."""

from __future__ import annotations

import pytest
import torch

from sparkdl.errors import ParamError, SavedModelError
from sparkdl.estimators.ready_made.language import LanguageModelModel, text_model
from sparkdl.model.weights_file import map_weights, write_weights
from sparkdl.networks.adapters import merge_into_weights
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.networks.generation import Generation
from sparkdl.networks.language import LanguageNetwork, TokenNumbers, learn_tokenizer
from sparkdl.networks.language_folder import load_language_folder, save_language_folder
from sparkdl.networks.logits import logits_of
from sparkdl.parallel import load_weights, on_meta
from tests.memory_watch import memory_watched

transformers = pytest.importorskip("transformers")

TEXTS = ["the cat sat on the mat", "the dog sat"]


@pytest.fixture(scope="module")
def tokenizer():
    return learn_tokenizer(TEXTS, 290)


def model_of(decoder, tokenizer):
    how = {"column": "text", "answer": "continuation", "generation": Generation(), "max_length": 32}
    takes_tokens = isinstance(tokenizer, TokenNumbers)
    return LanguageModelModel(text_model(decoder, tokenizer, **how, takes_tokens=takes_tokens))


def small_decoder(vocabulary=320):
    return Decoder(DecoderSizes(vocabulary=vocabulary, width=32, layers=1, heads=2))


def written(decoder, tokenizer, folder):
    model_of(decoder, tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("key_heads", "is_tied"), [(None, True), (2, False)])
def test_a_decoder_is_saved_as_a_llama_with_the_same_logits(tokenizer, tmp_path, key_heads, is_tied):
    torch.manual_seed(0)
    decoder = Decoder(
        DecoderSizes(vocabulary=320, width=32, layers=2, heads=4, key_heads=key_heads, is_tied=is_tied)
    ).eval()
    folder = written(decoder, tokenizer, tmp_path / "folder")
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == llama.config.eos_token_id == tokenizer.end
    tokens = torch.tensor([theirs("the cat sat on a mat")["input_ids"]])
    assert tokens[0].tolist() == tokenizer.encode("the cat sat on a mat")
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(llama, tokens), logits_of(decoder, tokens), rtol=1e-4, atol=1e-5)
    # The written folder can be trained on.
    found, again = load_language_folder(folder, lora_rank=None, seed=0)
    assert found.num_tokens == tokenizer.num_tokens
    assert LanguageNetwork(again)(tokens, torch.zeros_like(tokens)).shape == (1, 320, tokens.shape[1])


@pytest.mark.parametrize("without_weights", [None, on_meta])
def test_trained_weights_of_a_bfloat16_folder_are_float32(tokenizer, tmp_path, without_weights):
    pytest.importorskip("peft")
    folder = written(small_decoder().bfloat16(), tokenizer, tmp_path / "folder")
    stored = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert stored.dtype == torch.bfloat16
    _, whole = load_language_folder(folder, lora_rank=None, seed=0, without_weights=without_weights)
    if without_weights is not None:
        load_weights(whole, folder)
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, stored.get_parameter(name).float()), name
    _, adapted = load_language_folder(folder, lora_rank=2, seed=0, without_weights=without_weights)
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in adapted.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_quantized_weights_are_not_trained_without_adapters(tokenizer, tmp_path, monkeypatch):
    folder = written(small_decoder(), tokenizer, tmp_path / "folder")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.config.quantization_config = {"quant_method": "any"}
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    with pytest.raises(ParamError, match="quantized.*Set loraRank"):
        load_language_folder(folder, lora_rank=None, seed=0)


def test_a_folder_with_adapters_is_saved_with_them_in_its_weights(tokenizer, tmp_path):
    pytest.importorskip("peft")
    decoder = small_decoder()
    first = written(decoder, tokenizer, tmp_path / "first")
    found, adapted = load_language_folder(first, lora_rank=2, seed=0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight)
    model = model_of(merge_into_weights(adapted), found)
    model.save_pretrained(tmp_path / "second")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second").eval()
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        expected = logits_of(model.module.decoder, tokens)
        torch.testing.assert_close(logits_of(again, tokens), expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(logits_of(decoder, tokens), expected, atol=1e-3)
    written_again = transformers.AutoTokenizer.from_pretrained(tmp_path / "second")
    assert written_again("the cat") == found.tokenizer("the cat")


def test_adapters_of_experts_are_merged_into_the_weights_of_all_experts(tokenizer, tmp_path):
    pytest.importorskip("peft")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        vocab_size=tokenizer.num_tokens, num_key_value_heads=2, num_local_experts=2, **sizes
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.library_tokenizer, eos_token="<|end|>"
    ).save_pretrained(tmp_path)
    _, adapted = load_language_folder(str(tmp_path), lora_rank=2, seed=0)
    adapters = [weight for name, weight in adapted.named_parameters() if ".lora_B." in name]
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        before = adapted.eval()(input_ids=tokens).logits
        for weight in adapters:
            torch.nn.init.normal_(weight)
        expected = adapted(input_ids=tokens).logits
        found = merge_into_weights(adapted)(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-3)


@pytest.mark.slow
def test_adapters_are_merged_without_holding_the_weights_in_memory(tmp_path):
    peft = pytest.importorskip("peft")
    # Matrices of 36 MiB: malloc may keep the memory of smaller ones.
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=3072, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=4
    )
    with on_meta():
        adapted = peft.get_peft_model(
            transformers.LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules="all-linear")
        )
    names = [name for name, _ in adapted.named_parameters()]
    with (tmp_path / "weights").open("wb") as file:
        write_weights({name: torch.zeros(adapted.get_parameter(name).shape) for name in names}, file)
    for name, weight in map_weights(tmp_path / "weights").items():
        layer, _, attribute = name.rpartition(".")
        setattr(adapted.get_submodule(layer), attribute, torch.nn.Parameter(weight, requires_grad=False))
    del weight
    with memory_watched() as growth:
        model = merge_into_weights(adapted)
    assert sum(tensor.nbytes for tensor in model.state_dict().values()) > 500 << 20
    assert growth.peak_bytes < 200 << 20


def test_model_without_a_tokenizer_is_saved_without_one_and_replaced_only_by_overwrite(tmp_path):
    model = model_of(small_decoder(vocabulary=64), TokenNumbers(50))
    model.save_pretrained(tmp_path / "folder")
    assert not list((tmp_path / "folder").glob("*token*"))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").config.eos_token_id is None
    with pytest.raises(SavedModelError, match=r"save_pretrained\(folder, overwrite=True\)"):
        model.save_pretrained(tmp_path / "folder")
    model.save_pretrained(tmp_path / "folder", overwrite=True)


def test_a_folder_whose_tokenizer_does_not_fit_is_refused(tokenizer, tmp_path):
    folder = written(small_decoder(vocabulary=100), tokenizer, tmp_path / "folder")
    with pytest.raises(ParamError, match=f"has {tokenizer.num_tokens} tokens, and the model has 100"):
        load_language_folder(folder, lora_rank=None, seed=0)


def test_several_texts_for_generate_are_refused(tokenizer):
    with pytest.raises(ParamError, match="continues one text"):
        model_of(small_decoder(), tokenizer).generate(["the cat", "the dog"])


@pytest.mark.parametrize(
    ("kind", "is_decoder", "words"),
    [
        ("Bert", False, "BertLMHeadModel that sees later tokens .*is_decoder"),
        ("Roberta", True, "RobertaForCausalLM, whose positions begin after its padding token"),
    ],
)
def test_models_that_do_not_count_texts_from_zero_or_see_later_tokens_are_refused(
    tokenizer, tmp_path, kind, is_decoder, words
):
    save_language_folder(small_decoder(vocabulary=290), tokenizer, str(tmp_path), max_length=16)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=290, max_position_embeddings=32, is_decoder=is_decoder, **sizes
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ParamError, match=words):
        load_language_folder(str(tmp_path), lora_rank=None, seed=0)
