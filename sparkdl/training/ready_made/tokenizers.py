"""Texts as numbers of tokens: their bytes, or words that a fit has learned. On *ranks*, in predictions, in a fit.

A tokenizer has ``num_tokens``, its largest number and one, and ``encode``. The numbers 0 and 1 stand for no token of a
text: :data:`PADDING` fills up, and :data:`START` is before every text, so that an empty one has a token, too.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

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
