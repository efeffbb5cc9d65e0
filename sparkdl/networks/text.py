"""A small transformer for texts, with its tokenizers and inputs.

A text becomes numbers of tokens: its bytes, or words that a fit has learned. A tokenizer has ``num_tokens``, its
largest number plus one, and ``encode``. The numbers 0 and 1 stand for no token of a text: :data:`PADDING` pads, and
:data:`START` precedes every text, so that an empty one has a token, too. Texts are converted on *ranks*, in
predictions, and when a fit is tried.

The network is a transformer (Vaswani et al., 2017, Attention Is All You Need).
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.errors import DataError

PADDING, START = 0, 1
_FIRST_BYTE = 2
_UNKNOWN, _FIRST_WORD = 2, 3

_JOINERS = "\u200c\u200d"
"""Which letters within a word of some scripts have between them."""


class Tokenizer(Protocol):
    """Makes numbers of texts."""

    @property
    def num_tokens(self) -> int:
        """How many numbers of tokens there are, 0 and 1 among them."""

    def encode(self, text: str, max_length: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the first tokens of a text, without a start, ``(tokens,)``."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Takes each byte of a text in UTF-8 for a token."""

    @property
    def num_tokens(self) -> int:
        """256 bytes, and what fills up and starts."""
        return _FIRST_BYTE + 256

    def encode(self, text: str, max_length: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the first bytes of a text."""
        # A character has a byte at least; half of a pair of surrogates, which has none, becomes a question mark.
        content = text[:max_length].encode("utf-8", "replace")[:max_length]
        return np.frombuffer(content, np.uint8).astype(np.int64) + _FIRST_BYTE


@dataclass(frozen=True)
class WordTokenizer:
    """Takes each word of a text for a token, and each mark between them; in lower case.

    Attributes:
        words: those that are known. All others have one number together.
    """

    words: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """The known words, one for all others, and what fills up and starts."""
        return _FIRST_WORD + len(self.words)

    def encode(self, text: str, max_length: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the first words of a text."""
        words = itertools.islice(_word().finditer(_written_alike(text)), max_length)
        return np.array([self._numbers.get(word.group(), _UNKNOWN) for word in words], np.int64)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, start=_FIRST_WORD)}

    def __reduce__(self) -> Any:
        """Pickle the words without the numbers that follow from them."""
        return WordTokenizer, (self.words,)


def words_of(text: str) -> list[str]:
    """Return the words of a text as :class:`WordTokenizer` takes them.

    A word is a run of letters, digits and underscores of any script with the marks on them, as vowels of Hindi are; or
    another character that is no space, with the marks on it. A script without spaces between its words has runs of
    them. It does not matter whether a letter and its accent are one character or two.
    """
    return _word().findall(_written_alike(text))


def _written_alike(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower()


@cache
def _word() -> re.Pattern[str]:
    """The pattern of a word, made when it is needed as it takes some 20 ms: re knows no category of characters."""
    # Two classes, as re finds a character among those of 16 bits at once, and among further ones by trying each.
    low = _JOINERS + _marks(range(1 << 16))
    high = _marks(
        itertools.chain(range(1 << 16, 1 << 17), range(0xE0000, 0xE1000))
    )  # there are none elsewhere
    mark = rf"(?:[{low}]|(?=[\U00010000-\U0010ffff])[{high}])"
    return re.compile(rf"\w+(?:{mark}+\w*)*|[^\w\s]{mark}*")


def _marks(places: Iterable[int]) -> str:
    return "".join(each for each in map(chr, places) if unicodedata.category(each).startswith("M"))


class TextNetwork(nn.Module):
    """A transformer encoder: embeds tokens and positions, and classifies by the mean of its outputs.

    Called with the numbers of tokens ``(rows, tokens)``. What fills up is neither attended to nor part of the mean, so
    that the other texts of a batch change nothing. Each layer normalizes what it takes, not what it gives (Xiong et
    al., 2020, On Layer Normalization in the Transformer Architecture), which learns without a warm-up.

    Args:
        num_tokens: largest number of a token and one.
        max_tokens: of a text, its start among them.
        size: of the embedding of a token.
        num_layers: that attend.
        num_heads: of each of them; they divide the size.
        dropout: share of what layers put out that is dropped in training, and of what is attended to.
        num_outputs: per row.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        max_tokens: int,
        size: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
        num_outputs: int,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, size, padding_idx=PADDING)
        self.places = nn.Embedding(max_tokens, size)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(_Layer(size, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, num_outputs)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=size**-0.5)
        with torch.no_grad():
            self.tokens.weight[PADDING] = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(rows, outputs)``."""
        is_token = tokens != PADDING
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.dropout(self.tokens(tokens) + self.places(places))
        for layer in self.layers:
            states = layer(states, is_token)
        counted = is_token.unsqueeze(2).to(states.dtype)
        means = (self.norm(states) * counted).sum(dim=1) / counted.sum(dim=1)
        outputs: Tensor = self.head(self.dropout(means))
        return outputs


class _Layer(nn.Module):
    def __init__(self, size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(size)
        self.attention_in = nn.Linear(size, 3 * size)
        self.attention_out = nn.Linear(size, size)
        self.inner = nn.Sequential(
            nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, is_token: Tensor) -> Tensor:
        """Return states ``(rows, tokens, size)`` of the same shape."""
        states = states + self.dropout(self._attended(self.attention_norm(states), is_token))
        changed: Tensor = states + self.dropout(self.inner(states))
        return changed

    def _attended(self, states: Tensor, is_token: Tensor) -> Tensor:
        rows, tokens, size = states.shape
        in_heads = self.attention_in(states).view(rows, tokens, 3, self.num_heads, size // self.num_heads)
        queries, keys, values = in_heads.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=is_token[:, None, None, :],
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        outputs: Tensor = self.attention_out(found.transpose(1, 2).reshape(rows, tokens, size))
        return outputs


TOKENS = "numbers of tokens"


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Makes the numbers of the tokens of each text, filled up to the longest of a batch; saved with the model.

    Attributes:
        column: name of the column.
        tokenizer: makes numbers of a text.
        max_length: tokens of a text that count; what comes after them is left out.
    """

    column: str
    tokenizer: Tokenizer
    max_length: int

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        """Return ``(rows, 1 + longest)``, where each row begins with a start.

        Raises:
            DataError: if a row holds no text.
        """
        texts = [
            self.tokenizer.encode(text, self.max_length)
            for text in checked_texts(columns[self.column], self.column)
        ]
        longest = max((len(text) for text in texts), default=0)
        tokens = np.full((len(texts), 1 + longest), PADDING, np.int64)
        tokens[:, 0] = START
        for row, text in zip(tokens, texts, strict=True):
            row[1 : 1 + len(text)] = text
        return {TOKENS: tokens}


def checked_texts(rows: npt.NDArray[Any], column: str) -> list[str]:
    """Return the rows of a column as a list of texts.

    Raises:
        DataError: if a row holds none.
    """
    for index, row in enumerate(rows):
        if not isinstance(row, str):
            raise DataError(
                f"Column {column!r} holds no text in row {index} of its batch, but {type(row).__name__}. Give a string."
            )
    return list(rows)
