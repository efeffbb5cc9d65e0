"""Tokens of texts by a tokenizer of transformers, in Rust or in Python.

A text is data: whatever it contains, it yields no *control token*, such as the token that begins or ends a text.
Control tokens come only from the :class:`Template`, the tokens that the tokenizer puts around every text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Template:
    """The tokens that a tokenizer puts around every text.

    Attributes:
        before: tokens before a text.
        after: tokens after a text.
        types: token types of ``before``, of a token of the text, and of ``after``, in one sequence.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[int, ...]


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts as data.

    Attributes:
        tokenizer: tokenizer of transformers.
    """

    tokenizer: Any

    @cached_property
    def template(self) -> Template:
        """The special tokens that the tokenizer adds around a text, as it does to an example."""
        for example in itertools.chain(
            "a", self.tokenizer.get_vocab()
        ):  # some vocabularies lack the letter a
            (tokens,) = self.encode([example])
            if tokens:
                break
        encoding = self.tokenizer(example)
        numbers, size = encoding["input_ids"], len(tokens)
        types = encoding.get("token_type_ids", [0] * len(numbers))
        at = next((at for at in range(len(numbers)) if numbers[at : at + size] == tokens), 0)
        return Template(
            before=tuple(numbers[:at]),
            after=tuple(numbers[at + size :]),
            types=(*types[: at + 1], *types[at + size :]),
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts, without those of the template and without control tokens."""
        encoded = self._encode(texts)
        for index, tokens in enumerate(encoded):
            if not self._control.keys().isdisjoint(tokens):
                encoded[index] = self._encode_in_pieces(texts[index])
        return encoded

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        # mistral-common never makes control tokens of a text, and refuses the argument.
        is_safe = type(self.tokenizer).__module__.endswith("tokenization_mistral_common")
        how = {} if is_safe else {"split_special_tokens": True}
        encoding = self.tokenizer(list(texts), add_special_tokens=False, verbose=False, **how)
        tokens: list[list[int]] = encoding["input_ids"]
        return tokens

    def _encode_in_pieces(self, text: str) -> list[int]:
        """Encode a text with a control token that is a word of the vocabulary, as in Unigram and WordLevel.

        The strings of control tokens are cut behind their first character. A control token that is left, such as one
        that the tokenizer's normalization makes, becomes the unknown token.
        """
        borders = (f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in self._control.values())
        pieces = [piece for piece in re.split("|".join(borders), text, flags=re.IGNORECASE) if piece]
        unknown = self.tokenizer.unk_token_id
        unknown = None if unknown in self._control else unknown
        numbers = [number for tokens in self._encode(pieces) for number in tokens]
        known = [unknown if number in self._control else number for number in numbers]
        return [number for number in known if number is not None]

    @cached_property
    def _control(self) -> dict[int, str]:
        """The special tokens by their numbers, except a token that only stands for unknown words."""
        tokenizer = self.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        control = {number: token.content for number, token in added.items() if token.special}
        control.update(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        roles = [role for role, token in tokenizer.special_tokens_map.items() if token == tokenizer.unk_token]
        if roles == ["unk_token"]:
            control.pop(tokenizer.unk_token_id, None)
        return control
