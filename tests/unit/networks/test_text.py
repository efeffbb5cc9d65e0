"""Tokens of texts, and the ready-made text network."""

from __future__ import annotations

import pickle
import sys
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import DataError
from sparkdl.networks.text import (
    PADDING,
    START,
    TOKENS,
    ByteTokenizer,
    TextInputs,
    TextNetwork,
    WordTokenizer,
    words_of,
)

WORDS = WordTokenizer(("the", "cat", "!", "élan"))


def column(*texts):
    rows = np.empty(len(texts), dtype=object)
    rows[:] = texts
    return {"text": rows}


def tokens_of(*texts, tokenizer=WORDS, max_length=5):
    return TextInputs(column="text", tokenizer=tokenizer, max_length=max_length)(column(*texts))[TOKENS]


def test_words_and_punctuation_are_tokens_in_lower_case():
    assert words_of("Don't STOP—the Cat_2, 3.5 ÉLAN 猫!") == [
        "don", "'", "t", "stop", "—", "the", "cat_2", ",", "3", ".", "5", "élan", "猫", "!",
    ]  # fmt: skip
    np.testing.assert_array_equal(WORDS.encode("The CAT sat! Élan", 10), [3, 4, 2, 5, 6])
    assert WORDS.num_tokens == 7


@pytest.mark.parametrize(
    "word", ["हिन्दी", "भाषा", "ภาษาไทยที่", "நாடு", "שָׁלוֹם", "क\u094d\u200dष", "❤\ufe0f", "q\u0307"]
)
def test_marks_belong_to_the_word_or_character_that_they_are_on(word):
    assert words_of(f"{word}, {word}") == [word, ",", word]


@given(st.text())
def test_a_letter_and_its_accent_may_be_one_character_or_two(text):
    assert words_of("cafe\u0301") == ["caf\u00e9"]
    assert words_of(unicodedata.normalize("NFD", text)) == words_of(text)


def test_marks_of_all_of_unicode_belong_to_words():
    marks = [chr(place) for place in range(sys.maxunicode + 1) if unicodedata.category(chr(place))[0] == "M"]
    assert [mark for mark in marks if len(words_of(f"x{mark}")) != 1] == []


@given(st.text(), st.integers(1, 40))
def test_bytes_are_utf_8(text, max_length):
    tokens = ByteTokenizer().encode(text, max_length)
    assert bytes((tokens - 2).tolist()) == text.encode("utf-8", "replace")[:max_length]
    assert tokens.size == 0 or tokens.max() < ByteTokenizer().num_tokens


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5), st.sampled_from([WORDS, ByteTokenizer()]))
def test_rows_begin_with_the_start_token_and_are_padded_to_the_longest_of_the_batch(texts, tokenizer):
    tokens = tokens_of(*texts, tokenizer=tokenizer, max_length=6)
    alone = [tokens_of(text, tokenizer=tokenizer, max_length=6)[0] for text in texts]
    assert tokens.shape == (len(texts), max(map(len, alone)))
    assert tokens.shape[1] <= 7
    for row, one in zip(tokens, alone, strict=True):
        assert one[0] == START
        assert PADDING not in one
        np.testing.assert_array_equal(row[: len(one)], one)
        assert (row[len(one) :] == PADDING).all()


def test_tokens_beyond_the_maximum_length_are_dropped():
    np.testing.assert_array_equal(tokens_of("cat cat cat the the the", max_length=4), [[START, 4, 4, 4, 3]])


@pytest.mark.parametrize("row", [None, 3.5, b"bytes"])
def test_value_that_is_no_text_is_named_by_its_row(row):
    with pytest.raises(DataError, match=f"'text' holds no text in row 1 .* but {type(row).__name__}"):
        tokens_of("a text", row)


def test_a_tokenizer_is_pickled_as_its_words_alone():
    WORDS.encode("the", 5)
    assert pickle.loads(pickle.dumps(WORDS)) == WORDS
    assert len(pickle.dumps(WORDS)) == len(pickle.dumps(WordTokenizer(WORDS.words)))


def make_network(**changes):
    torch.manual_seed(0)
    sizes = {"num_tokens": 9, "max_tokens": 8, "size": 8, "num_layers": 2, "num_heads": 2, "dropout": 0.5}
    return TextNetwork(**{**sizes, "num_outputs": 3, **changes})


def test_other_texts_of_a_batch_change_nothing():
    network = make_network().eval()
    texts = [[1, 3], [1, 4, 5, 6, 7, 8], [1]]
    padded = torch.tensor([text + [PADDING] * (8 - len(text)) for text in texts])
    alone = torch.cat([network(torch.tensor([text])) for text in texts])
    torch.testing.assert_close(network(padded), alone)
    assert torch.isfinite(alone).all()


def test_the_order_of_tokens_matters():
    network = make_network().eval()
    forwards, backwards = network(torch.tensor([[1, 3, 4], [1, 4, 3]]))
    assert not torch.allclose(forwards, backwards)


def test_every_weight_learns_and_padding_stays_zeros():
    network = make_network()
    network(torch.tensor([[1, 3, 4, 5, 6, 7, 8, 2], [1, 3, 0, 0, 0, 0, 0, 0]])).sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert not network.tokens.weight.grad[PADDING].any()
    assert not network.tokens.weight[PADDING].any()


def test_dropout_is_for_training_alone():
    network = make_network()
    tokens = torch.tensor([[1, 3, 4]])
    assert not torch.equal(network(tokens), network(tokens))
    network.eval()
    assert torch.equal(network(tokens), network(tokens))
