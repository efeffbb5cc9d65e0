"""Continuations of texts, token by token, from the keys and values of earlier tokens. Runs wherever a model predicts.

Each token costs the decoder one position, as the keys and values of earlier positions are kept. A text that has grown
beyond the positions that the decoder was trained on is continued from its last ``max_length`` tokens, behind those
that begin every text. The positions of all of these change with each token, so their keys are computed again.

Models of transformers are continued by the same loop and not by their ``generate``. There, the draws of a text depend
on the other texts of the batch, and a text that has grown too long is not continued from its last tokens.
:class:`Decoder`, which runs without transformers, needs the loop in any case.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkdl.networks.decoder import Decoder
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
        max_length: number of positions that the decoder was trained on.
        before: tokens at the beginning of every text; they stay before the last tokens of a text that grew too long.
    """
    texts = [row[: int(length)].tolist() for row, length in zip(tokens, lengths, strict=True)]
    generators = [
        torch.Generator().manual_seed(zlib.crc32(np.array(text, np.int64).tobytes(), generation.seed))
        for text in texts
    ]
    generated: list[list[int]] = [[] for _ in texts]
    open_rows = list(range(len(texts)))
    reader = _Reader(decoder, tokens.shape[1], max_length) if _keeps_keys(decoder) else None
    for number in range(generation.max_tokens):
        if not open_rows:
            break
        kept = [row for row in open_rows if reader and reader.has_room(len(texts[row]), number)]
        moved = [row for row in open_rows if row not in kept]
        parts = []
        if reader and kept:
            last = torch.tensor([added[-1] if added else 0 for added in generated], device=tokens.device)
            parts.append((reader.following(last) if number else reader.first(tokens, lengths))[kept])
        if moved:
            windows = [last_tokens(texts[row] + generated[row], max_length, before) for row in moved]
            parts.append(_last_logits(decoder, windows, tokens.device))
        rows = [*kept, *moved]
        logits = torch.cat([part.cpu().float()[:, :num_tokens] for part in parts])
        chosen = _choose(logits, [generators[row] for row in rows], generation)
        open_rows = []
        for row, token in zip(rows, chosen, strict=True):
            if token != end:
                generated[row].append(token)
                open_rows.append(row)
    return generated


def last_tokens(tokens: list[int], num_tokens: int, before: tuple[int, ...]) -> list[int]:
    """Return at most ``num_tokens`` tokens of a text: those that begin every text, if they fit, and its last tokens."""
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
        int(torch.multinomial(row, 1, generator=generator))
        for row, generator in zip(shares, generators, strict=True)
    ]


def _last_logits(decoder: nn.Module, texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The logits after each text, ``(texts, vocabulary)``, computed from all of its tokens."""
    lengths = torch.tensor([len(text) for text in texts], device="cpu")
    tokens = torch.zeros((len(texts), int(lengths.max())), dtype=torch.int64, device="cpu")
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text, device="cpu")
    return logits_of(decoder, tokens.to(device))[torch.arange(len(texts)), lengths - 1]


def _keeps_keys(decoder: Any) -> bool:
    """Whether a decoder's layers are all attention, and it takes the keys and values of earlier tokens again."""
    if isinstance(decoder, Decoder):
        return True
    model = decoder.get_base_model() if hasattr(decoder, "get_base_model") else decoder
    types = getattr(model.config, "layer_types", None) or ["full_attention"]
    return (
        "past_key_values" in inspect.signature(type(model).forward).parameters
        and takes_positions(decoder)
        and set(types) <= set(ATTENTION_TYPES)
        and not getattr(model, "_is_stateful", False)
    )


class _Reader:
    """Reads texts, then one more token of each text at a time, and keeps the keys and values of what it has read.

    Texts are padded on the left, so that all end at the same position, as models of transformers require.

    Args:
        decoder: decoder that takes keys and values of earlier tokens.
        longest: number of tokens of the longest text.
        max_length: number of positions that the decoder was trained on.
    """

    def __init__(self, decoder: Any, longest: int, max_length: int) -> None:
        self._decoder, self._longest, self._max_length = decoder, longest, max_length
        # With the padding, a short text takes as many positions of a cache as the longest one.
        self._capacity: float = math.inf
        if not isinstance(decoder, Decoder):
            self._capacity = getattr(decoder.config, "max_position_embeddings", None) or max_length
        self._past: Any = None
        self._seen = self._positions = torch.empty(0)

    def has_room(self, length: int, added: int) -> bool:
        """Return whether a text of so many tokens can be read with so many more."""
        return length + added <= self._max_length and self._longest + added <= self._capacity

    def first(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits after each text, ``(rows, vocabulary)``; texts are padded at their ends."""
        longest = tokens.shape[1]
        positions = torch.arange(longest, device=tokens.device) - (longest - lengths)[:, None]
        self._seen = (positions >= 0).long()
        positions = positions.clamp(min=0)
        self._positions = lengths - 1
        return self._read(tokens.gather(1, positions), positions)

    def following(self, tokens: Tensor) -> Tensor:
        """Return the logits after one more token of each text, ``(rows,)``; meaningless for rows that have ended."""
        self._seen = F.pad(self._seen, (0, 1), value=1)
        # Rows that have ended are read as well, and there may be no embedding for positions beyond the last.
        self._positions = (self._positions + 1).clamp(max=self._max_length - 1)
        return self._read(tokens[:, None], self._positions[:, None])

    def _read(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if isinstance(self._decoder, Decoder):
            self._past = self._past or [_KeysAndValues() for _ in self._decoder.blocks]
            mask = _causal_mask(self._seen, tokens.shape[1])
            pasts = [partial(layer.attend, mask) for layer in self._past]
            last = self._decoder.states(tokens, positions, pasts=pasts)[:, -1]
            return self._decoder.head(last)  # type: ignore[no-any-return]  # modules return Any
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


def _causal_mask(seen: Tensor, num_new: int) -> Tensor:
    """The mask of the last positions, ``(rows, 1, new, positions)``: True for tokens up to the position itself.

    Padding attends to itself, as attention to nothing is not a number.
    """
    places = torch.arange(seen.shape[1], device=seen.device)
    new = places[-num_new:, None]
    return ((seen[:, None].bool() & (places <= new)) | (places == new))[:, None]


class _KeysAndValues:
    """Keys and values of one layer of a :class:`Decoder`, ``(rows, key heads, positions, head size)``."""

    _keys: Tensor | None = None
    _values: Tensor | None = None

    def attend(self, mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep the keys and values of further positions, and compute their attention."""
        if self._keys is not None and self._values is not None:
            key, value = torch.cat([self._keys, key], dim=2), torch.cat([self._values, value], dim=2)
        self._keys, self._values = key, value
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
        )
