"""Continuations of texts, token by token, from the keys and values of earlier tokens. Runs wherever a model predicts.

Each token costs the decoder one position, as the keys and values of earlier positions are kept. A text that has grown
beyond the positions with which the decoder was trained is continued from its last ``max_length`` tokens, behind those
that begin every text. The positions of all of these change with each token, so their keys are computed anew.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkdl.networks.decoder import Decoder, attend
from sparkdl.networks.logits import ATTENTION_TYPES, logits_of, takes_positions


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Options of the continuation of texts.

    Attributes:
        max_tokens: maximum number of tokens that are added.
        temperature: divisor of the logits before a token is drawn; 0 takes the likeliest token.
        top_k: number of the likeliest tokens among which one is drawn; 0 for all.
        seed: seed of the draws. The draws of a text depend on the seed and the text alone.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0


def continue_texts(
    decoder: nn.Module,
    tokens: Tensor,
    lengths: Tensor,
    *,
    generation: Generation,
    num_tokens: int,
    end: int | None,
    max_length: int,
    before: tuple[int, ...] = (),
) -> list[list[int]]:
    """Return the tokens that continue each text, without the token that ends it.

    Args:
        decoder: a :class:`~sparkdl.networks.decoder.Decoder`, or a causal language model of transformers.
        tokens: tokens of the texts, ``(rows, longest)`` integers, padded behind the texts; ``longest`` is at most
            ``max_length``.
        lengths: number of tokens of each text, ``(rows,)``, at least 1.
        generation: options of the continuation.
        num_tokens: number of tokens to choose from; a decoder may compute logits for a few more.
        end: number of the token that ends a text; None if there is none.
        max_length: number of positions with which the decoder was trained.
        before: tokens with which every text begins; they stay before the last tokens of a text that has grown too long.
    """
    texts = [row[: int(length)].tolist() for row, length in zip(tokens, lengths, strict=True)]
    generators = [
        torch.Generator().manual_seed(zlib.crc32(np.array(text, np.int64).tobytes(), generation.seed))
        for text in texts
    ]
    found: list[list[int]] = [[] for _ in texts]
    open_rows = list(range(len(texts)))
    reader = _reader_of(decoder, tokens.shape[1], generation.max_tokens, max_length)
    for number in range(generation.max_tokens):
        if not open_rows:
            break
        kept = [row for row in open_rows if reader and reader.has_room(len(texts[row]), number)]
        moved = [row for row in open_rows if row not in kept]
        parts = []
        if reader and kept:
            last = torch.tensor([each[-1] if each else 0 for each in found], device=tokens.device)
            parts.append((reader.following(last) if number else reader.first(tokens, lengths))[kept])
        if moved:
            windows = [last_tokens(texts[row] + found[row], max_length, before) for row in moved]
            parts.append(_last_logits(decoder, windows, tokens.device))
        rows = [*kept, *moved]
        logits = torch.cat([each.cpu().float()[:, :num_tokens] for each in parts])
        chosen = _choose(logits, [generators[row] for row in rows], generation)
        open_rows = []
        for row, token in zip(rows, chosen, strict=True):
            if token != end:
                found[row].append(token)
                open_rows.append(row)
    return found


def last_tokens(tokens: list[int], num_tokens: int, before: tuple[int, ...]) -> list[int]:
    """Return the last tokens of a text, ``num_tokens`` with those before every text, which stay as far as they fit."""
    if len(tokens) <= num_tokens:
        return tokens
    kept = len(before) if len(before) < num_tokens else 0
    return [*before[:kept], *tokens[len(tokens) - num_tokens + kept :]]


def _choose(logits: Tensor, generators: Sequence[torch.Generator], generation: Generation) -> list[int]:
    if not generation.temperature:
        return logits.argmax(dim=-1).tolist()
    if generation.top_k:
        least = logits.topk(min(generation.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    shares = (logits / generation.temperature).softmax(dim=-1)
    return [
        int(torch.multinomial(each, 1, generator=generator))
        for each, generator in zip(shares, generators, strict=True)
    ]


def _last_logits(decoder: nn.Module, texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The logits after each text, ``(texts, vocabulary)``, computed from all of its tokens."""
    lengths = torch.tensor([len(text) for text in texts], device="cpu")
    tokens = torch.zeros((len(texts), int(lengths.max())), dtype=torch.int64, device="cpu")
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text, device="cpu")
    return logits_of(decoder, tokens.to(device))[torch.arange(len(texts)), lengths - 1]


class _Reader(Protocol):
    """Reads texts, and then one more token of each text at a time; returns logits ``(rows, vocabulary)``."""

    def has_room(self, length: int, added: int) -> bool:
        """Return whether a text of so many tokens can be read with so many more."""

    def first(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits after each text; texts are padded at their ends."""

    def following(self, tokens: Tensor) -> Tensor:
        """Return the logits after one more token of each text, ``(rows,)``; meaningless for rows that have ended."""


def _reader_of(decoder: nn.Module, longest: int, max_tokens: int, max_length: int) -> _Reader | None:
    """Return the reader of a decoder; None for a model of transformers that keeps no keys and values."""
    if isinstance(decoder, Decoder):
        return _DecoderReader(decoder, min(longest + max_tokens, max_length))
    return _TransformersReader(decoder, longest, max_length) if _keeps_keys(decoder) else None


def _keeps_keys(decoder: Any) -> bool:
    """Whether all layers of a model of transformers are attention, and the model takes its keys and values again."""
    model = decoder.get_base_model() if hasattr(decoder, "get_base_model") else decoder
    types = getattr(model.config, "layer_types", None) or ["full_attention"]
    return (
        "past_key_values" in inspect.signature(type(model).forward).parameters
        and takes_positions(decoder)
        and set(types) <= set(ATTENTION_TYPES)
        and not getattr(model, "_is_stateful", False)
    )


class _DecoderReader:
    """Keeps a :class:`Decoder`'s keys and values; those of padding behind a text are overwritten by its next tokens.

    Each text is kept at its own positions, from 0.
    """

    def __init__(self, decoder: Decoder, num_positions: int) -> None:
        self._decoder, self._num_positions = decoder, num_positions
        self._layers = [_Layer(num_positions) for _ in decoder.blocks]
        self._lengths = torch.empty(0)

    def has_room(self, length: int, added: int) -> bool:
        return length + added <= self._num_positions

    def first(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        self._lengths = lengths.clone()
        states = self._decoder.states(tokens, pasts=[layer.first for layer in self._layers])
        return self._decoder.head(states[torch.arange(len(states)), lengths - 1])  # type: ignore[no-any-return]  # modules return Any

    def following(self, tokens: Tensor) -> Tensor:
        at = self._lengths.clamp(max=self._num_positions - 1)  # rows that have ended could go beyond
        for layer in self._layers:
            layer.at = at
        states = self._decoder.states(
            tokens[:, None], at[:, None], pasts=[layer.following for layer in self._layers]
        )
        self._lengths += 1
        return self._decoder.head(states[:, 0])  # type: ignore[no-any-return]  # modules return Any


class _Layer:
    """Keys and values of one layer, ``(rows, key heads, positions, head size)``.

    Attributes:
        at: position of the token that is read, in each row.
    """

    at: Tensor

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._keys = self._values = torch.empty(0)

    def first(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute the attention inside of texts, and keep their keys and values."""
        rows, heads, positions, size = key.shape
        self._keys, self._values = (key.new_zeros(rows, heads, self._num_positions, size) for _ in range(2))
        self._keys[:, :, :positions], self._values[:, :, :positions] = key, value
        return attend(query, key, value, None)

    def following(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute the attention of one more position of each text to itself and all earlier positions."""
        rows = torch.arange(len(key), device=key.device)
        self._keys[rows, :, self.at], self._values[rows, :, self.at] = key[:, :, 0], value[:, :, 0]
        seen = torch.arange(self._num_positions, device=key.device) <= self.at[:, None]
        return F.scaled_dot_product_attention(
            query,
            self._keys,
            self._values,
            attn_mask=seen[:, None, None],
            enable_gqa=query.shape[1] != key.shape[1],
        )


class _TransformersReader:
    """Keeps the cache of a model of transformers, which needs texts that end together: they are padded in front."""

    def __init__(self, decoder: Any, longest: int, max_length: int) -> None:
        self._decoder, self._longest, self._max_length = decoder, longest, max_length
        # With the padding, a short text takes as many positions of the cache as the longest one.
        self._capacity = getattr(decoder.config, "max_position_embeddings", None) or max_length
        self._past: Any = None
        self._seen = self._positions = torch.empty(0)

    def has_room(self, length: int, added: int) -> bool:
        return length + added <= self._max_length and self._longest + added <= self._capacity

    def first(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        longest = tokens.shape[1]
        positions = torch.arange(longest, device=tokens.device) - (longest - lengths)[:, None]
        self._seen = (positions >= 0).long()
        positions = positions.clamp(min=0)
        self._positions = lengths - 1
        return self._read(tokens.gather(1, positions), positions)

    def following(self, tokens: Tensor) -> Tensor:
        self._seen = F.pad(self._seen, (0, 1), value=1)
        # Rows that have ended are read as well, and there may be no embedding for positions beyond the last.
        self._positions = (self._positions + 1).clamp(max=self._max_length - 1)
        return self._read(tokens[:, None], self._positions[:, None])

    def _read(self, tokens: Tensor, positions: Tensor) -> Tensor:
        output = self._decoder(
            input_ids=tokens,
            attention_mask=self._seen,
            position_ids=positions,
            past_key_values=self._past,
            use_cache=True,
        )
        self._past = output.past_key_values
        logits: Tensor = output.logits[:, -1]
        return logits
