"""Packs token sequences of any length into rows of one fixed length and keeps the document boundaries.

A row holds whole documents, and batches have the arrays that attention and the loss need. The result depends only on
the documents and their order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from sparkdl.checks import check_counts, check_state
from sparkdl.errors import DataError, ParamError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


Tokens = npt.NDArray[Any]

_FORMAT = 1

IGNORED_LABEL = -100
"""The label that ``torch.nn.functional.cross_entropy`` ignores by default."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows of packed documents.

    Attributes:
        tokens: tokens of shape ``(rows, length)``; the end of a row is padded with the packer's ``pad_token``.
        position_ids: position of each token inside its document, from 0; int64 of the same shape.
        document_ids: number of each token's document inside its row, from 0, and -1 on padding; int32 of the same
            shape.
        cu_seqlens: cumulative lengths, from 0 on, of all sequences of the batch flattened to ``rows * length`` tokens,
            as ``flash_attn_varlen_func`` and torch's ``varlen_attn`` take them; int32. The padding of a row is a
            sequence of its own.
        max_seqlen: number of tokens of the longest of those sequences.
    """

    tokens: Tokens
    position_ids: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    max_seqlen: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(np.count_nonzero(self.document_ids >= 0))

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """Whether the next token is of the same document, so that it can be predicted; shape ``(rows, length)``."""
        mask = np.zeros(self.tokens.shape, np.bool_)
        here, following = self.document_ids[:, :-1], self.document_ids[:, 1:]
        mask[:, :-1] = (here == following) & (here >= 0)
        return mask

    def labels(self, ignored: int = IGNORED_LABEL) -> npt.NDArray[np.int64]:
        """Return the next token of the same document for every token, and ``ignored`` where there is none."""
        following = np.roll(self.tokens, -1, axis=1).astype(np.int64)
        return np.where(self.loss_mask, following, ignored)


class SequencePacker:
    """Packs documents by first fit into a bounded number of open rows.

    A document goes into the first open row that has room for it. If none has, a new row is opened; if more than
    ``num_open_rows`` would then be open, the oldest one is finished. A full row is finished at once. With
    one open row, documents keep their order.

    A document is divided between rows only if it is longer than a row and ``long_documents`` is ``split``. Its pieces
    then count as documents of their own, because attention cannot reach from one row to another.

    Args:
        length: number of tokens of a row.
        batch_size: number of rows of a batch.
        num_open_rows: maximum number of open rows; more of them need less padding.
        long_documents: treatment of documents longer than a row: ``split`` divides them into pieces of a row's
            length and a rest, ``refuse`` raises an error.
        pad_token: token that fills a row after its last document.
        dtype: integer dtype of the tokens.

    Raises:
        ParamError: if an argument is out of range.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        num_open_rows: int = 1,
        long_documents: Literal["split", "refuse"] = "split",
        pad_token: int = 0,
        dtype: npt.DTypeLike = np.int64,
    ) -> None:
        check_counts(least=1, length=length, batch_size=batch_size, num_open_rows=num_open_rows)
        if long_documents not in ("split", "refuse"):
            raise ParamError(f"long_documents must be 'split' or 'refuse', got {long_documents!r}.")
        self._dtype = np.dtype(dtype)
        if self._dtype.kind not in "iu":
            raise ParamError(f"dtype must be an integer dtype, got {self._dtype}.")
        # Integers of NumPy become Python's, which JSON can hold.
        self._length, self._batch_size, self._num_open_rows = map(int, (length, batch_size, num_open_rows))
        self._splits_long_documents = long_documents == "split"
        self._pad_token = pad_token
        self._open: list[_Row] = []
        self._done: deque[_Row] = deque()

    def pack(self, batches_of_documents: Iterable[Iterable[npt.ArrayLike]]) -> Iterator[PackedBatch]:
        """Yield batches of packed documents; the last one can have fewer rows.

        The number of batches in an epoch depends on the documents, so ranks get different numbers of them. Pass
        documents without end, as from a :class:`~sparkdl.data.BlendedFeed`, and take the same number of steps on all
        ranks.

        Args:
            batches_of_documents: batches of documents, such as ``(batch["tokens"] for batch in feed.epoch(0))``. The
                next item is requested only after all batches that the earlier items complete have been yielded, so that
                the state of a feed matches the state of the packer.

        Raises:
            DataError: if a document is not a sequence of integers, or is too long and ``long_documents`` is ``refuse``.
        """
        for documents in itertools.chain([()], batches_of_documents):
            self.add(documents)
            while (batch := self.pop()) is not None:
                yield batch
        while (last := self.finish()) is not None:
            yield last

    def add(self, documents: Iterable[npt.ArrayLike]) -> None:
        """Add documents, each a sequence of integers; empty ones are left out.

        Raises:
            DataError: if one is not a sequence of integers, or is too long and ``long_documents`` is ``refuse``; the
                documents before it have been added.
        """
        for document in documents:
            tokens = self._as_tokens(document)
            if len(tokens) > self._length and not self._splits_long_documents:
                raise DataError(
                    f"A document has {len(tokens)} tokens, but rows have {self._length}. Cut it, make rows longer, "
                    "or set long_documents='split'."
                )
            for start in range(0, len(tokens), self._length):
                self._place(tokens[start : start + self._length])

    def pop(self) -> PackedBatch | None:
        """Return the next batch if enough rows are finished, or else None."""
        return self._lay_out(self._batch_size) if len(self._done) >= self._batch_size else None

    def finish(self) -> PackedBatch | None:
        """Return the next batch of the remaining rows, including open ones; None if no rows are left."""
        self._done.extend(self._open)
        self._open.clear()
        return self._lay_out(min(self._batch_size, len(self._done))) if self._done else None

    def state(self) -> dict[str, Any]:
        """Return the rows that are not in a batch yet, as plain values for JSON.

        Together with the state of the feed, taken at the same time, it is all that a later run needs to continue.
        """
        rows_of = {"open": self._open, "done": self._done}
        lists = {
            name: [[document.tolist() for document in row.documents] for row in rows]
            for name, rows in rows_of.items()
        }
        return {"format": _FORMAT, "length": self._length, **lists}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that :meth:`state` returned.

        Raises:
            ParamError: if it is not a state of a packer, or its rows have another length.
            DataError: if it has a newer format.
        """
        check_state(state, "packer", _FORMAT, "length", "open", "done")
        if state["length"] != self._length:
            raise ParamError(
                f"Rows have {self._length} tokens, but the state is of rows of {state['length']}. Resume "
                "with that length."
            )
        self._open = [self._row_of(documents) for documents in state["open"]]
        self._done = deque(self._row_of(documents) for documents in state["done"])

    def _place(self, document: Tokens) -> None:
        row = next((row for row in self._open if row.free >= len(document)), None)
        if row is None:
            if len(self._open) == self._num_open_rows:
                self._done.append(self._open.pop(0))
            row = _Row(self._length)
            self._open.append(row)
        row.add(document)
        if not row.free:
            self._open.remove(row)
            self._done.append(row)

    def _as_tokens(self, document: npt.ArrayLike) -> Tokens:
        tokens = np.asarray(document)
        if not tokens.size and tokens.ndim == 1:
            return tokens.astype(self._dtype)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"A document must be a sequence of integers, but one is an array of {tokens.dtype} with the shape "
                f"{tokens.shape}. Encode text before it is packed."
            )
        kept = tokens.astype(self._dtype)  # a copy, so that a document does not keep its batch in memory
        if not np.can_cast(tokens.dtype, self._dtype) and (kept != tokens).any():
            raise DataError(
                f"A document has tokens from {tokens.min()} to {tokens.max()}, which {self._dtype} cannot hold. "
                "Choose a wider dtype."
            )
        return kept

    def _row_of(self, documents: Iterable[Iterable[int]]) -> _Row:
        row = _Row(self._length)
        for document in documents:
            row.add(np.asarray(document, self._dtype))
        return row

    def _lay_out(self, num_rows: int) -> PackedBatch:
        """Return the next finished rows as a batch."""
        tokens = np.full((num_rows, self._length), self._pad_token, self._dtype)
        sequence_lengths: list[int] = []
        numbers: list[int] = []
        for row in tokens:
            documents = self._done.popleft().documents
            lengths = [len(document) for document in documents]
            filled = sum(lengths)
            row[:filled] = np.concatenate(documents)
            sequence_lengths += lengths
            numbers += range(len(documents))
            if filled < self._length:
                sequence_lengths.append(self._length - filled)
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


@dataclass(slots=True, eq=False)
class _Row:
    """Documents of one row, and the number of free tokens after them."""

    free: int
    documents: list[Tokens] = field(default_factory=list)

    def add(self, document: Tokens) -> None:
        self.documents.append(document)
        self.free -= len(document)
