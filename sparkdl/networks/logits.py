"""Logits of packed rows, computed by a decoder of sparkdl or a causal language model of transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from sparkdl.model.inputs import positions_in
from sparkdl.networks.decoder import Decoder


def logits_of(
    decoder: Any, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """The logits of a decoder of sparkdl or of transformers, ``(rows, positions, vocabulary)``.

    For the arguments see :meth:`sparkdl.networks.language.LanguageNetwork.forward`.
    """
    if isinstance(decoder, Decoder):
        ours: Tensor = decoder(tokens, positions, documents)
        return ours
    keywords: dict[str, Any] = {}
    if positions is not None:  # attention was set to one over shared sequences, which takes documents
        keywords = {"position_ids": positions[None], "documents": documents}
    elif documents is not None:
        keywords = {"attention_mask": _masks(decoder.config, documents)}
        if takes_positions(decoder):
            keywords["position_ids"] = positions_in(documents)
    logits: Tensor = decoder(input_ids=tokens, use_cache=False, **keywords).logits
    return logits


def takes_positions(decoder: Any) -> bool:
    """Whether a model of transformers, or the model to which adapters were added, takes the numbers of positions."""
    model = decoder.get_base_model() if hasattr(decoder, "get_base_model") else decoder
    return "position_ids" in inspect.signature(type(model).forward).parameters


ATTENTION_TYPES = ("full_attention", "sliding_attention")
"""Layer types of transformers in which masks keep the texts of a row apart."""


def _masks(config: Any, documents: Tensor) -> Tensor | dict[str, Tensor]:
    """The mask of packed rows in the form of models of transformers: 0 where a position is attended to.

    Models with layers of several types take a dict of masks by layer type.
    """
    length = documents.shape[1]
    pairs = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    seen = (documents[:, None, :, None] == documents[:, None, None, :]) & pairs
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is None or window >= length:
        return _to_mask(seen)
    types = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    masks = {"full_attention": _to_mask(seen), "sliding_attention": _to_mask(seen & pairs.triu(1 - window))}
    return masks if len(types) > 1 else masks[types.pop()]


def _to_mask(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, torch.finfo(torch.float32).min)
