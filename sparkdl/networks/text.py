"""A small transformer for texts, with its tokenizers and inputs.

A text is converted to token numbers: of its bytes, or of words that a fit has learned. A tokenizer has ``num_tokens``,
its largest token number plus one, and ``encode``. The numbers 0 and 1 are not tokens of a text: :data:`PADDING` pads,
and :data:`START` precedes every text, so that an empty text has a token, too. Texts are converted on *ranks*, in
predictions, and when a fit is tried.

Words are split here and not by the library ``tokenizers``, so that a fit and a served model need only torch. Each
executor counts the words of a part of the rows; the library's trainers read all texts in one process.

The network is a transformer (Vaswani et al., 2017, Attention Is All You Need).
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.errors import DataError

PADDING, START = 0, 1
_FIRST_BYTE = 2
_UNKNOWN, _FIRST_WORD = 2, 3

_JOINERS = "\u200c\u200d"
"""Characters that some scripts have between the letters of a word."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Treats each byte of a text in UTF-8 as a token."""

    num_tokens: ClassVar = _FIRST_BYTE + 256
    """256 bytes, and the tokens for padding and start."""

    def encode(self, text: str, max_length: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the first ``max_length`` bytes of a text."""
        # Each character has at least one byte; a lone surrogate, which has none, becomes a question mark.
        content = text[:max_length].encode("utf-8", "replace")[:max_length]
        return np.frombuffer(content, np.uint8).astype(np.int64) + _FIRST_BYTE


@dataclass(frozen=True)
class WordTokenizer:
    """Treats each word of a text in lower case, and each character between words, as a token.

    Attributes:
        words: known words. All other words share one number.
    """

    words: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """The known words, and the tokens for all other words, padding and start."""
        return _FIRST_WORD + len(self.words)

    def encode(self, text: str, max_length: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the first ``max_length`` words of a text."""
        words = itertools.islice(_word().finditer(_normalize(text)), max_length)
        return np.array([self._numbers.get(word.group(), _UNKNOWN) for word in words], np.int64)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, start=_FIRST_WORD)}

    def __reduce__(self) -> Any:
        """Pickle the words alone: their numbers follow from them."""
        return WordTokenizer, (self.words,)


Tokenizer: TypeAlias = ByteTokenizer | WordTokenizer


def words_of(text: str) -> list[str]:
    """Return the words of a text, as :class:`WordTokenizer` splits it.

    A word is a run of letters, digits and underscores of any script with the marks on them, such as the vowel signs of
    Hindi; or any other character that is not a space, with the marks on it. In a script without spaces between words, a
    run may contain several words. A letter and its accent may be one character or two.
    """
    return _word().findall(_normalize(text))


def _normalize(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower()


@cache
def _word() -> re.Pattern[str]:
    """The pattern of a word, built on first use as that takes about 20 ms: re has no classes for Unicode categories."""
    # Two character classes: re looks up 16-bit characters in one step, but tries all others one after the other.
    low = _JOINERS + _marks(range(1 << 16))
    high = _marks(
        itertools.chain(range(1 << 16, 1 << 17), range(0xE0000, 0xE1000))
    )  # there are none elsewhere
    mark = rf"(?:[{low}]|(?=[\U00010000-\U0010ffff])[{high}])"
    return re.compile(rf"\w+(?:{mark}+\w*)*|[^\w\s]{mark}*")


def _marks(places: Iterable[int]) -> str:
    return "".join(
        character for character in map(chr, places) if unicodedata.category(character).startswith("M")
    )


class TextNetwork(nn.Module):
    """A transformer encoder: embeds tokens and positions, and classifies by the mean of its outputs.

    Called with token numbers ``(rows, tokens)``. Padding is neither attended to nor part of the mean, so that a
    prediction does not depend on the other texts of a batch. Each layer normalizes its input, not its output (Xiong et
    al., 2020, On Layer Normalization in the Transformer Architecture), and so learns without a warm-up.

    Args:
        num_tokens: largest token number plus one.
        max_tokens: maximum number of tokens of a text, including its start token.
        size: size of the embedding of a token.
        num_layers: number of attention layers.
        num_heads: number of heads of each layer; it divides ``size``.
        dropout: share of the layers' outputs and of the attention weights that is dropped in training.
        num_outputs: number of outputs per row.
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
    """Attention and a feed-forward part, each added to its input.

    It is not ``nn.TransformerEncoderLayer``: in ``eval`` mode, that passes the weights of its linear layers to one
    kernel, and ignores adapters (LoRA) over these layers without an error.
    """

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
        states = states + self.dropout(self._attend(self.attention_norm(states), is_token))
        changed: Tensor = states + self.dropout(self.inner(states))
        return changed

    def _attend(self, states: Tensor, is_token: Tensor) -> Tensor:
        rows, tokens, size = states.shape
        in_heads = self.attention_in(states).view(rows, tokens, 3, self.num_heads, size // self.num_heads)
        queries, keys, values = in_heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=is_token[:, None, None, :],
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        outputs: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, tokens, size))
        return outputs


TOKENS = "numbers of tokens"

ROWS_AT_ONCE = 128
"""Number of texts per forward pass: BERT takes 11 MB for the layers of a text of 256 tokens."""


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Converts each text to token numbers, padded to the longest text of a batch; saved with the model.

    Attributes:
        column: name of the column.
        tokenizer: tokenizer of the texts.
        max_length: maximum number of tokens of a text, without its start token; later tokens are cut off.
    """

    column: str
    tokenizer: Tokenizer
    max_length: int
    rows_at_once: ClassVar = ROWS_AT_ONCE

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        """Return token numbers ``(rows, 1 + longest)``; each row begins with the start token.

        Raises:
            DataError: if a row does not hold a text.
        """
        texts = [
            self.tokenizer.encode(text, self.max_length)
            for text in check_texts(columns[self.column], self.column)
        ]
        longest = max((len(text) for text in texts), default=0)
        tokens = np.full((len(texts), 1 + longest), PADDING, np.int64)
        tokens[:, 0] = START
        for row, text in zip(tokens, texts, strict=True):
            row[1 : 1 + len(text)] = text
        return {TOKENS: tokens}


def check_texts(rows: npt.NDArray[Any], column: str) -> list[str]:
    """Return the rows of a column as a list of texts.

    Raises:
        DataError: if a row does not hold a text.
    """
    for index, row in enumerate(rows):
        if not isinstance(row, str):
            raise DataError(
                f"Column {column!r} holds no text in row {index} of its batch, but {type(row).__name__}. Give a string."
            )
    return list(rows)
