"""Packed sequences: rows of a fixed length that hold whole documents, with what attention and the loss need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Tokens = npt.NDArray[Any]

IGNORED_LABEL = -100
"""The label that ``torch.nn.functional.cross_entropy`` leaves out by default."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows of packed documents.

    Attributes:
        tokens: shape ``(rows, length)``; padding at the end of a row is the packer's ``pad_token``.
        position_ids: int64 of the same shape: place inside the document, from 0 in each of them.
        document_ids: int32 of the same shape: number of the document inside its row, from 0; -1 on padding.
        cu_seqlens: int32: borders of all sequences in the batch laid out in one line of ``rows * length`` tokens,
            from 0 on, as ``flash_attn_varlen_func`` and torch's ``varlen_attn`` take them. The padding of a row is a
            sequence of its own.
        max_seqlen: tokens of the longest of those sequences.
    """

    tokens: Tokens
    position_ids: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    max_seqlen: int

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(np.count_nonzero(self.document_ids >= 0))

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """Where the next token is one of the same document, so that it can be predicted; ``(rows, length)``."""
        mask = np.zeros(self.tokens.shape, np.bool_)
        here, following = self.document_ids[:, :-1], self.document_ids[:, 1:]
        mask[:, :-1] = (here == following) & (here >= 0)
        return mask

    def labels(self, ignored: int = IGNORED_LABEL) -> npt.NDArray[np.int64]:
        """Return for every token the next one of its document, and ``ignored`` where there is none."""
        following = np.roll(self.tokens, -1, axis=1).astype(np.int64)
        return np.where(self.loss_mask, following, ignored)


def lay_out(
    rows: Sequence[Sequence[Tokens]], length: int, pad_token: int, dtype: np.dtype[Any]
) -> PackedBatch:
    """Return rows of documents as a batch; every document has tokens, and those of a row fit into ``length``."""
    tokens = np.full((len(rows), length), pad_token, dtype)
    sequence_lengths: list[int] = []
    numbers: list[int] = []
    for row, documents in zip(tokens, rows, strict=True):
        lengths = [len(document) for document in documents]
        filled = sum(lengths)
        row[:filled] = np.concatenate(documents)
        sequence_lengths += lengths
        numbers += range(len(documents))
        if filled < length:
            sequence_lengths.append(length - filled)
            numbers.append(-1)
    borders = np.concatenate([[0], np.cumsum(sequence_lengths)])
    positions = np.arange(tokens.size) - np.repeat(borders[:-1], sequence_lengths)
    return PackedBatch(
        tokens=tokens,
        position_ids=positions.reshape(tokens.shape),
        document_ids=np.repeat(np.asarray(numbers, np.int32), sequence_lengths).reshape(tokens.shape),
        cu_seqlens=borders.astype(np.int32),
        max_seqlen=max(sequence_lengths),
    )
