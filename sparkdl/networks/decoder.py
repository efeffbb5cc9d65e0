"""A decoder for language models: RMSNorm, rotary positions, grouped queries, SwiGLU.

The network has the attributes that :mod:`sparkdl.parallel` needs: ``tensor_plan`` says how its layers are divided among
ranks, and ``blocks`` is the list of its layers, for sharding and for cutting it into pipeline stages.

Sources: H. Touvron et al., "LLaMA" (2023), for the architecture; J. Su et al., "RoFormer" (2021), for rotary positions;
J. Ainslie et al., "GQA" (2023), for grouped queries; N. Shazeer, "GLU Variants Improve Transformer" (2020), for SwiGLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkdl.errors import ParamError

Past: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes the attention of new positions to earlier ones and to themselves, from their queries, keys and values."""


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """The sizes of a :class:`Decoder`.

    Attributes:
        vocabulary: number of tokens in the vocabulary.
        width: number of features of a position between the layers.
        layers: number of layers.
        heads: number of attention heads of a layer; each has ``width / heads`` features, an even number.
        key_heads: number of heads of keys and values; each serves ``heads / key_heads`` heads; ``heads`` if
            None.
        hidden: number of features inside of a feed-forward part; 8/3 of the width, rounded up to a multiple of 32, if
            None.
        rope_base: base of the wavelengths of rotary positions.
        norm_epsilon: number that a norm adds to the mean square.
        is_tied: whether the head shares the embedding's weights.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int | None = None
    hidden: int | None = None
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    is_tied: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ParamError(
                f"A decoder of width {self.width} cannot have {self.heads} heads: each needs an even number of "
                f"features. Use a width that is a multiple of {2 * self.heads}."
            )
        if self.key_heads is not None and self.heads % self.key_heads:
            raise ParamError(f"key_heads {self.key_heads} must divide heads {self.heads}.")

    @property
    def hidden_features(self) -> int:
        """Number of features inside of a feed-forward part."""
        return self.hidden or math.ceil(8 * self.width / 3 / 32) * 32


class Decoder(nn.Module):
    """Computes the logits of the next token from token numbers.

    Args:
        sizes: sizes of the decoder.

    Attributes:
        sizes: sizes of the decoder.
        blocks: layers of the decoder, a ``ModuleList`` of :class:`DecoderBlock`.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(DecoderBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=sizes.norm_epsilon)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.is_tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from a normal distribution with standard deviation 0.02; those of norms become 1.

        For ``output`` layers, which add to their input, the deviation is divided by ``sqrt(2 * layers)``.
        """
        for name, parameter in self.named_parameters():
            self.draw_weight(name, parameter)

    def draw_weight(self, name: str, weight: Tensor) -> None:
        """Draw one weight, in place; see :func:`sparkdl.parallel.draw_weights`."""
        narrower = 0.02 / math.sqrt(2 * self.sizes.layers)
        if weight.ndim == 1:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, std=narrower if name.endswith("output.weight") else 0.02)

    pipeline_parts = (("embedding",), "blocks", ("norm", "head"))
    """The modules before the blocks, the blocks, and the modules after them, for cutting pipeline stages."""

    @property
    def tensor_plan(self) -> dict[str, str]:
        """The style in which tensor parallelism divides each layer; the logits are divided by the vocabulary."""
        return {
            "embedding": "embedding_rowwise",
            "blocks.*.attention.query": "colwise",
            "blocks.*.attention.key": "colwise",
            "blocks.*.attention.value": "colwise",
            "blocks.*.attention.output": "rowwise",
            "blocks.*.feed_forward.gate": "colwise",
            "blocks.*.feed_forward.up": "colwise",
            "blocks.*.feed_forward.output": "rowwise",
            "head": "colwise",
        }

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of the token after each position.

        Args:
            tokens: token numbers, ``(batch, positions)`` integers.
            positions: position numbers, ``(positions,)`` or ``(batch, positions)`` integers; counted from 0 if None.
            documents: document number of each position, ``(batch, positions)`` integers; a position attends only to
                positions with the same number, as packed sequences need it. To all earlier positions if None.

        Returns:
            Logits, ``(batch, positions, vocabulary)``.
        """
        return self.head(self.states(tokens, positions, documents))  # type: ignore[no-any-return]  # modules return Any

    def states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        pasts: Sequence[Past] | None = None,
    ) -> Tensor:
        """Compute the input of the head, ``(batch, positions, width)``.

        Args:
            tokens: token numbers, see :meth:`forward`.
            positions: position numbers, see :meth:`forward`.
            documents: document numbers, see :meth:`forward`; ignored with ``pasts``.
            pasts: function of each layer that computes the attention to earlier positions, whose keys and values it
                keeps; None if ``tokens`` are whole sequences.
        """
        hidden = self.embedding(tokens)
        rotation = self.rotation(positions, tokens)
        for number, block in enumerate(self.blocks):
            past = () if pasts is None else (pasts[number],)
            hidden = block(hidden, rotation, documents, *past)
        return self.norm(hidden)  # type: ignore[no-any-return]  # modules return Any

    def rotation(self, positions: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's rotary angles, ``(1 or batch, 1, positions, head size)`` in float32."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        size = self.sizes.width // self.sizes.heads
        exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
        angles = positions.to(torch.float32).unsqueeze(-1) * self.sizes.rope_base**-exponents
        angles = torch.cat([angles, angles], dim=-1)
        angles = angles[None, None] if angles.ndim == 2 else angles[:, None]
        return angles.cos(), angles.sin()


class DecoderBlock(nn.Module):
    """One layer: attention and a feed-forward part. Each adds to its input."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width, eps=sizes.norm_epsilon)
        self.attention = GroupedAttention(sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.width, eps=sizes.norm_epsilon)
        self.feed_forward = FeedForward(sizes)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        documents: Tensor | None,
        past: Past | None = None,
    ) -> Tensor:
        """Take and return ``(batch, positions, width)``."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, documents, past)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))  # type: ignore[no-any-return]  # modules return Any


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
    """Causal attention over whole sequences.

    Args:
        query: queries, ``(batch, heads, positions, head size)``.
        key: keys, ``(batch, key heads, positions, head size)``; the number of key heads divides the number of heads.
        value: values, in the shape of ``key``.
        documents: document number of each position, see :meth:`Decoder.forward`.
    """
    mask = None
    if documents is not None:
        mask = documents[:, None, :, None] == documents[:, None, None, :]
        mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
    )


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions, in which several heads share keys and values.

    Attributes:
        attend: function that computes the attention: :func:`attend`, or one that works over the ranks that share a
            sequence.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.head_size = sizes.width // sizes.heads
        key_features = (sizes.key_heads or sizes.heads) * self.head_size
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, key_features, bias=False)
        self.value = nn.Linear(sizes.width, key_features, bias=False)
        self.output = nn.Linear(sizes.width, sizes.width, bias=False)
        self.attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = attend

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        documents: Tensor | None,
        past: Past | None = None,
    ) -> Tensor:
        """Take and return ``(batch, positions, width)``."""
        # The number of heads follows from the layers' outputs: a tensor-parallel rank has some of the heads.
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        attended = self.attend(query, key, value, documents) if past is None else past(query, key, value)
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # modules return Any


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (part.to(heads.dtype) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


class FeedForward(nn.Module):
    """SwiGLU: two linear layers, with a third one that gates the features of the first."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden_features, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden_features, bias=False)
        self.output = nn.Linear(sizes.hidden_features, sizes.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Take and return ``(batch, positions, width)``."""
        return self.output(F.silu(self.gate(hidden)) * self.up(hidden))  # type: ignore[no-any-return]  # modules return Any
