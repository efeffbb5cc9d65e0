"""A small transformer for texts (Vaswani et al., 2017, Attention Is All You Need)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparkdl.training.ready_made.tokenizers import PADDING


class TextNetwork(nn.Module):
    """Embeds tokens and their places, has them attend to each other, and tells by their mean.

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
