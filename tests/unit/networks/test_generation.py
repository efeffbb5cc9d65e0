"""Continuations with keys and values kept equal those for which all positions are computed again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.networks.generation import Generation, continue_texts
from sparkdl.networks.logits import logits_of

VOCABULARY = 61
MAX_LENGTH = 20
TEXTS = [[5], [7, 8, 9, 10, 11, 12, 13], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], list(range(20, 40))]

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "head_dim": 8,
    "pad_token_id": 0,
}
KINDS = {
    "Llama": {},
    "GPTNeo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": MAX_LENGTH,
    },
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_LENGTH},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 5},
    "Gemma3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "Olmo2": {},
    "Phi3": {},
    "GPTNeoX": {},
    "Granite": {},
    "Cohere": {},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "Mixtral": {"num_local_experts": 2},
}


def model_of(kind):
    torch.manual_seed(0)
    if kind.startswith("ours"):
        sizes = DecoderSizes(vocabulary=VOCABULARY, width=32, layers=2, heads=4, key_heads=2)
        decoder = Decoder(sizes)
    else:
        transformers = pytest.importorskip("transformers")
        configuration = getattr(transformers, f"{kind}Config")
        if kind == "Gemma3":
            configuration = transformers.Gemma3TextConfig
        config = configuration(**{**SIZES, **KINDS[kind]}, attn_implementation="eager")
        decoder = transformers.AutoModelForCausalLM.from_config(config)
    for weight in decoder.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)  # so that what is attended to decides which token is next
    return decoder.eval()


def padded(texts):
    lengths = torch.tensor([len(text) for text in texts])
    tokens = torch.zeros((len(texts), int(lengths.max())), dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    return tokens, lengths


def continuations(decoder, texts, how, end=None):
    with torch.inference_mode():
        return continue_texts(
            decoder,
            *padded(texts),
            generation=how,
            num_tokens=VOCABULARY,
            end=end,
            max_length=MAX_LENGTH,
        )


def computed_anew(decoder, text, num_tokens):
    found = []
    with torch.inference_mode():
        for _ in range(num_tokens):
            window = torch.tensor([(text + found)[-MAX_LENGTH:]])
            found.append(int(logits_of(decoder, window)[0, -1, :VOCABULARY].argmax()))
    return found


# Keys of the whole text, with and without numbers of positions in rotary form, and of windows in some or all layers.
DAILY = ("Llama", "GPTNeo", "GPT2", "Mistral", "Gemma3", "GptOss")


@pytest.mark.parametrize(
    "kind", ["ours", *(pytest.param(kind, marks=() if kind in DAILY else pytest.mark.slow) for kind in KINDS)]
)
def test_each_continuation_equals_the_one_computed_anew_from_the_whole_text(kind):
    decoder = model_of(kind)
    found = continuations(decoder, TEXTS, Generation(max_tokens=10))
    expected = [computed_anew(decoder, text, 10) for text in TEXTS]
    assert len(set(map(tuple, expected))) == len(TEXTS), "the texts decide what follows"
    assert found == expected


@pytest.mark.parametrize("kind", ["ours", "GPT2"])
def test_a_text_that_has_ended_leaves_the_others_as_they_are(kind):
    decoder = model_of(kind)
    alone = continuations(decoder, TEXTS, Generation(max_tokens=10))
    end = alone[1][2]
    found = continuations(decoder, TEXTS, Generation(max_tokens=10), end=end)
    for ended, whole in zip(found, alone, strict=True):
        assert ended == (whole[: whole.index(end)] if end in whole else whole)


class WithoutKeptKeys(torch.nn.Module):
    """A model that does not take keys and values of earlier tokens."""

    config = SimpleNamespace()

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=logits_of(self.decoder, input_ids))


@pytest.mark.parametrize("kind", ["ours", "Llama"])
def test_draws_are_the_same_with_and_without_kept_keys(kind):
    decoder = model_of(kind)
    how = Generation(max_tokens=10, temperature=1.0, top_k=5, seed=3)
    assert continuations(WithoutKeptKeys(decoder), TEXTS, how) == continuations(decoder, TEXTS, how)


def test_each_token_is_computed_once_while_the_text_fits():
    decoder = model_of("ours")
    seen = []
    decoder.embedding.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))
    continuations(decoder, [[1, 2, 3, 4]], Generation(max_tokens=10))
    assert seen == [4, *[1] * 9]
