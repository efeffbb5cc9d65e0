"""Texts are data: no text makes a control token, with tokenizers of every kind."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.estimators.ready_made.language import text_model
from sparkdl.model.predictor import Predictor
from sparkdl.networks.folder_tokens import TextEncoder
from sparkdl.networks.generation import Generation
from sparkdl.networks.language import FolderTokenizer, TextPacker, learn_tokenizer
from sparkdl.networks.pretrained import PretrainedTextInputs

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["the cat sat on the mat </s> < / s >", "the dog [SEP] sat | [ MASK ]"]
NAMES = ["<s>", "</s>", "<pad>", "[MASK]", "<|endoftext|>", "<|turn|>", "<unk>"]


def tokenizer_of(kind, *, begins=True, ends=False):
    """A tokenizer of transformers: of a model of the library tokenizers, or one in Python."""
    if kind == "Python":
        return transformers.ByT5Tokenizer()
    models, splits = tokenizers.models, tokenizers.pre_tokenizers
    model, trainer, splitter = {
        "BPE": (models.BPE(), tokenizers.trainers.BpeTrainer, splits.ByteLevel(add_prefix_space=False)),
        "Unigram": (models.Unigram(), tokenizers.trainers.UnigramTrainer, splits.Metaspace()),
        "WordLevel": (models.WordLevel(unk_token="<unk>"), tokenizers.trainers.WordLevelTrainer, None),
    }[kind]
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = splitter or splits.WhitespaceSplit()
    unknown = {"unk_token": "<unk>"} if kind == "Unigram" else {}
    library.train_from_iterator(TEXTS, trainer(special_tokens=NAMES, show_progress=False, **unknown))
    template = f"{'<s> ' * begins}$A{' </s>' * ends}"
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[(name, library.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        mask_token="[MASK]",
        unk_token="<unk>",
        additional_special_tokens=["<|endoftext|>", "<|turn|>"],
    )
    found.add_tokens(["zebra"])
    return found


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordLevel", "Python"])
def test_no_text_makes_a_control_token(kind):
    tokenizer = tokenizer_of(kind)
    encoder = pickle.loads(pickle.dumps(TextEncoder(tokenizer)))
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    pieces = st.sampled_from(
        [*NAMES, *(name.upper() for name in NAMES), " ", "cat", "<", "/s>", "\uff1c/s\uff1e"]
    )

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.lists(pieces, max_size=6))
    def check(parts):
        text = "".join(parts)
        (tokens,) = encoder.encode([text])
        assert not control & set(tokens)
        inputs = PretrainedTextInputs(column="t", tokenizer=tokenizer, max_length=99)
        (row,) = inputs({"t": np.array([text], dtype=object)})["input_ids"].tolist()
        if tokens:
            assert row == [*encoder.template.before, *tokens, *encoder.template.after]

    check()


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordLevel", "Python"])
def test_ordinary_texts_have_the_tokens_that_the_tokenizer_makes(kind):
    tokenizer = tokenizer_of(kind, ends=True)
    encoder = TextEncoder(tokenizer)
    for text in ("the cat sat", "the dog zebra", ""):
        (tokens,) = encoder.encode([text])
        template = encoder.template
        assert [*template.before, *tokens, *template.after] == tokenizer(text)["input_ids"]


def test_a_learned_tokenizer_reads_the_string_of_its_end_as_text():
    tokenizer = pickle.loads(pickle.dumps(learn_tokenizer(TEXTS, 300)))
    tokens = tokenizer.encode("a<|end|>b")
    assert tokenizer.end not in tokens
    assert tokenizer.decode(tokens) == "a<|end|>b"


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.5,
    )
    return transformers.LlamaForCausalLM(config).eval()


def answer(llama, tokenizer, answer, text, *, max_length=16, takes_tokens=False):
    generation = Generation(max_tokens=6)
    how = {"answer": answer, "generation": generation, "max_length": max_length, "takes_tokens": takes_tokens}
    saved = text_model(llama, FolderTokenizer(tokenizer), column="text", **how)
    column = np.empty(1, object)
    column[0] = text
    return Predictor(saved).predict({"text": column})[answer][0]


@pytest.mark.parametrize(("begins", "ends"), [(True, False), (True, True), (False, False), (False, True)])
def test_texts_are_scored_continued_and_packed_as_the_tokenizer_says(llama, begins, ends):
    tokenizer = tokenizer_of("BPE", begins=begins, ends=ends)
    text = "the cat sat on a dog"
    tokens = tokenizer(text)["input_ids"]
    with torch.inference_mode():
        given = torch.tensor([tokens])
        loss = llama(given, labels=given).loss.item()
        prompt = torch.tensor([tokens[: len(tokens) - ends]])
        end = tokenizer.eos_token_id
        following = llama.generate(
            prompt, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=1
        )
    expected = following[0, prompt.shape[1] :].tolist()
    assert [end] * ends == tokens[len(tokens) - ends :]
    for row, takes_tokens in ((text, False), (np.array(tokens), True)):
        total, count = answer(
            llama, tokenizer, "logLikelihood", row, max_length=64, takes_tokens=takes_tokens
        )
        assert count == len(tokens) - 1
        assert -total / count == pytest.approx(loss, rel=1e-5)
    continuation = answer(llama, tokenizer, "continuation", text, max_length=64)
    assert continuation == tokenizer.decode(
        [token for token in expected if token != end], skip_special_tokens=True
    )
    ours = FolderTokenizer(tokenizer)
    packer = TextPacker(64, ours.end, ours.before)
    rows = [*packer.add(ours.encode(text)), *packer.add(np.array(tokens)), *packer.finish()]
    (row,) = rows
    packed = row["tokens"][row["documents"] >= 0].tolist()
    assert packed == ([*tokens[: len(tokens) - ends], end]) * 2


def test_a_text_longer_than_the_model_takes_keeps_its_beginning_of_sequence(llama):
    tokenizer = tokenizer_of("BPE")
    (before,) = FolderTokenizer(tokenizer).before
    text = "the dog sat on the mat " * 3
    tokens = tokenizer(text)["input_ids"]
    window = [before, *tokens[-15:]]
    expected = []
    with torch.inference_mode():
        for _ in range(6):
            expected.append(int(llama(torch.tensor([window])).logits[0, -1].argmax()))
            window = [before, *[*window, expected[-1]][-15:]]
        total, count = answer(llama, tokenizer, "logLikelihood", text)
        logs = llama(torch.tensor([tokens[:16]])).logits.log_softmax(-1)[0, :-1]
        likelihood = logs[torch.arange(15), torch.tensor(tokens[1:16])].sum().item()
        for begin in range(8, len(tokens) - 8, 7):  # each window reads 15 tokens, 7 of them new
            piece = torch.tensor([[before, *tokens[begin : begin + 15]]])
            logs = llama(piece).logits.log_softmax(-1)[0, :-1]
            new = torch.arange(8, piece.shape[1] - 1)
            likelihood += logs[new, piece[0, 9:]].sum().item()
    assert answer(llama, tokenizer, "continuation", np.array(tokens), takes_tokens=True).tolist() == expected
    assert count == len(tokens) - 1
    assert total == pytest.approx(likelihood, rel=1e-4)
