"""Tokenizers, packed rows, and the answers of a language model, without Spark."""

from __future__ import annotations

import pickle
from itertools import chain

import numpy as np
import pandas as pd
import pytest
import torch

from sparkdl.errors import DataError
from sparkdl.estimators import TorchModel
from sparkdl.estimators.fit.tracking import save_for_mlflow
from sparkdl.estimators.ready_made.language import text_model
from sparkdl.model.predictor import Predictor
from sparkdl.model.served_model import PyfuncModel
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.networks.generation import Generation
from sparkdl.networks.language import (
    LanguageNetwork,
    PromptInputs,
    TextModel,
    TextPacker,
    TokenNumbers,
    as_bytes,
    learn_tokenizer,
)
from sparkdl.networks.logits import logits_of

TEXTS = ["the cat sat on the mat", "the dog sat", "", "ein Käse 🧀 aß", "x" * 50]


@pytest.mark.parametrize("kind", ["GPT2", "Mistral", "Qwen2"])
def test_texts_of_a_packed_row_have_the_same_logits_as_alone(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    windows = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
    changes = {} if kind == "GPT2" else {"intermediate_size": 16, "head_dim": 8, **windows}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32, pad_token_id=None, bos_token_id=0, eos_token_id=1, **sizes, **changes
    )
    torch.manual_seed(0)
    decoder = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(32, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    together = logits_of(decoder, tokens, documents)
    alone = [logits_of(decoder, part) for part in tokens.split([5, 7], dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def tokenizer():
    return learn_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def decoder(tokenizer):
    torch.manual_seed(0)
    return Decoder(DecoderSizes(vocabulary=tokenizer.num_tokens, width=32, layers=2, heads=4)).eval()


def test_every_text_comes_back_from_its_tokens(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    for text in [*TEXTS, "words that it has never seen: ÿ\n\t漢字"]:
        assert copy.decode([*tokenizer.encode(text), tokenizer.end]) == text
    assert 257 <= tokenizer.num_tokens <= 300
    assert len(tokenizer.encode("the cat")) < len("the cat")


def pack(texts, length, end=None):
    packer = TextPacker(length, end)
    return [*chain.from_iterable(packer.add(text) for text in texts), *packer.finish()]


def test_packed_rows_hold_every_token_once_and_labels_stay_in_their_text(tokenizer):
    rows = pack(map(tokenizer.encode, TEXTS), 16, tokenizer.end)
    found = []
    for row in rows:
        assert all(values.shape == (16,) for values in row.values())
        for number in range(row["documents"].max() + 1):
            mine = row["documents"] == number
            found.append(row["tokens"][mine].tolist())
            assert row["labels"][mine].tolist() == [*row["tokens"][mine][1:].tolist(), -100]
        assert (row["labels"][row["documents"] < 0] == -100).all()
    everything = [[*tokenizer.encode(text), tokenizer.end] for text in TEXTS]
    assert sorted(chain.from_iterable(found)) == sorted(chain.from_iterable(everything))


@pytest.mark.parametrize(("end", "expected"), [(None, [5, 6, 9, 5, 5]), (9, [5, 6, 9, 5, 5, 9, 9])])
def test_end_token_follows_each_text_that_has_none(end, expected):
    (row,) = pack([[5, 6, 9], np.array([5, 5], np.int32), []], 8, end)
    assert row["tokens"][row["documents"] >= 0].tolist() == expected


def test_loss_of_packed_rows_equals_the_loss_of_the_single_texts(tokenizer, decoder):
    network = LanguageNetwork(decoder)
    rows = pack(map(tokenizer.encode, TEXTS), 64, tokenizer.end)
    batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    loss = torch.nn.CrossEntropyLoss(ignore_index=-100)(
        network(batch["tokens"], batch["documents"]), batch["labels"]
    )
    total, count = 0.0, 0
    for text in TEXTS:
        tokens = torch.tensor([[*tokenizer.encode(text), tokenizer.end]])
        logs = logits_of(decoder, tokens).log_softmax(-1)[0, :-1]
        total -= logs.gather(1, tokens[0, 1:, None]).sum().item()
        count += tokens.shape[1] - 1
    assert loss.item() == pytest.approx(total / count, rel=1e-5)


def ask(decoder, tokenizer, answer, texts, **generation):
    model = TextModel(decoder, tokenizer, answer=answer, generation=Generation(**generation), max_length=32)
    inputs = PromptInputs(
        column="text",
        tokenizer=tokenizer,
        num_tokens=model.num_tokens,
        takes_tokens=False,
        max_length=32,
        from_end=answer == "continuation",
    )
    given = inputs({"text": np.array(texts, object)})
    with torch.inference_mode():
        return model, model(*(torch.from_numpy(given[name]) for name in ("tokens", "lengths")))


@pytest.mark.parametrize("length", [1, 2, 8, 9, 12, 13, 30])
def test_a_log_likelihood_is_the_sum_over_every_token_after_the_first_also_of_a_long_text(
    tokenizer, decoder, length
):
    torch.manual_seed(length)
    tokens = torch.randint(0, tokenizer.num_tokens, (2, 30))
    model = TextModel(decoder, tokenizer, answer="logLikelihood", generation=Generation(), max_length=8)
    with torch.inference_mode():
        found = model(tokens, torch.tensor([length, 30]))
        for row, (total, count) in zip((tokens[0, :length], tokens[1]), found.tolist(), strict=True):
            expected = 0.0
            for at in range(1, len(row)):
                # The window that reaches this token first: the first 8 tokens, or 4 tokens and the 4 before these.
                begin = 0 if at < 8 else 4 * (at // 4) - 4
                logs = logits_of(decoder, row[None, begin:at])[0, -1].log_softmax(-1)
                expected += logs[row[at]].item()
            assert count == len(row) - 1
            assert total == pytest.approx(expected, rel=1e-4)


def test_an_embedding_does_not_depend_on_what_a_batch_is_padded_to(tokenizer, decoder):
    _, together = ask(decoder, tokenizer, "embedding", TEXTS[:2])
    _, alone = ask(decoder, tokenizer, "embedding", TEXTS[1:2])
    assert together.shape == (2, 32)
    torch.testing.assert_close(together[1:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("generation", [{}, {"temperature": 0.8, "top_k": 5, "seed": 3}])
def test_continuation_of_a_text_does_not_depend_on_its_batch(tokenizer, decoder, generation):
    model, found = ask(decoder, tokenizer, "continuation", TEXTS, max_tokens=12, **generation)
    for row, text in zip(found, TEXTS, strict=True):
        _, (alone,) = ask(decoder, tokenizer, "continuation", [text], max_tokens=12, **generation)
        assert row[row >= 0].tolist() == alone[alone >= 0].tolist()
    longest = max(
        len(continuation) for continuation in model.continuations(torch.tensor([[5]]), torch.tensor([1]))
    )
    assert 1 <= longest <= 12


def test_other_seeds_draw_other_continuations(tokenizer, decoder):
    draws = {"max_tokens": 12, "temperature": 1.0}
    found = [ask(decoder, tokenizer, "continuation", ["the"], **draws, seed=seed)[1] for seed in range(4)]
    assert len({continuation.numpy().tobytes() for continuation in found}) > 1


FIVE_TOKENS = {"answer": "continuation", "generation": Generation(max_tokens=5), "max_length": 32}


def test_module_returns_texts_as_bytes_and_the_predictor_as_strings(tokenizer, decoder):
    saved = text_model(decoder, tokenizer, column="text", **FIVE_TOKENS)
    found = Predictor(saved, batch_size=2).predict({"text": np.array(TEXTS, object)})["continuation"]
    assert [type(continuation) for continuation in found] == [str] * len(TEXTS)
    assert as_bytes(["ä", ""]).tolist() == [[0xC3, 0xA4], [-1, -1]]


def test_a_model_without_a_tokenizer_takes_and_gives_tokens(tokenizer, decoder, tmp_path):
    numbers = TokenNumbers(tokenizer.num_tokens, tokenizer.end)
    saved = text_model(decoder, numbers, column="tokens", takes_tokens=True, **FIVE_TOKENS)
    rows = np.empty(len(TEXTS), object)
    rows[:] = [np.array(tokenizer.encode(text), np.int64) for text in TEXTS]
    found = Predictor(saved, batch_size=2).predict({"tokens": rows})["continuation"]
    model, _ = ask(decoder, tokenizer, "continuation", TEXTS, max_tokens=5)
    for row, text in zip(found, TEXTS, strict=True):
        given = tokenizer.encode(text) or [tokenizer.end]
        (expected,) = model.continuations(torch.tensor([given]), torch.tensor([len(given)]))
        assert row.tolist() == expected
        assert max(row, default=0) < tokenizer.num_tokens
    served = PyfuncModel(saved).predict(pd.DataFrame({"tokens": [row.tolist() for row in rows]}))
    assert [tokens.tolist() for tokens in served["prediction"]] == [tokens.tolist() for tokens in found]
    described = save_for_mlflow(TorchModel(saved), tmp_path)
    assert [(column.kind, column.depth) for column in (*described.inputs, *described.outputs)] == [
        ("long", 1)
    ] * 2


@pytest.mark.parametrize(
    ("row", "end", "words"), [([1, 7], None, "the token 7, and there are 7"), ([], None, "without tokens")]
)
def test_arrays_without_valid_tokens_are_refused(row, end, words):
    tokenizer = TokenNumbers(7, end)
    inputs = PromptInputs(
        column="t", tokenizer=tokenizer, num_tokens=7, takes_tokens=True, max_length=4, from_end=True
    )
    column = np.empty(1, object)
    column[0] = np.array(row, np.int64)
    with pytest.raises(DataError, match=words):
        inputs({"t": column})
