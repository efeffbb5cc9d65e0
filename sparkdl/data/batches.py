"""From blocks as they are read to batches: in the order of the files, or drawn from a shuffle buffer.

Runs on the training thread of every *rank*; the cost per batch is a few NumPy calls, whatever the number of
rows.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sparkdl.data.blocks import Block, BlockLayout, concatenate, num_rows, slice_rows, take_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np


def file_order_batches(blocks: Iterable[Block], batch_size: int) -> Iterator[Block]:
    """Cut blocks into batches of ``batch_size`` rows, the last one with what remains.

    Batches are views of the blocks unless they span several.
    """
    queue = _RowQueue(iter(blocks))
    while batch := queue.take(batch_size):
        yield batch


def shuffled_batches(
    blocks: Iterable[Block],
    layout: BlockLayout,
    *,
    total_rows: int,
    batch_size: int,
    buffer_rows: int,
    random: np.random.Generator,
) -> Iterator[Block]:
    """Shuffle rows through a buffer: a batch is drawn from it at random, the next rows take the places.

    With ``buffer_rows >= total_rows`` this is a shuffle of all rows.

    Args:
        blocks: the rows in reading order.
        layout: layout of the blocks.
        total_rows: rows of all blocks together.
        batch_size: rows of a batch; the last one holds what remains.
        buffer_rows: rows of the buffer, at least ``batch_size``.
        random: source of the draws.
    """
    queue = _RowQueue(iter(blocks))
    size = min(buffer_rows, total_rows)
    buffer = layout.allocate(size)
    filled = 0
    while filled < size and (part := queue.take_up_to(size - filled)):
        _put_rows(buffer, slice(filled, filled + num_rows(part)), part)
        filled += num_rows(part)
    remaining = total_rows - size
    while remaining >= batch_size and (incoming := queue.take(batch_size)):
        chosen = random.choice(size, batch_size, replace=False)
        batch = take_rows(buffer, chosen)
        _put_rows(buffer, chosen, incoming)
        remaining -= batch_size
        yield batch
    if remaining and (incoming := queue.take(remaining)):
        buffer = concatenate([buffer, incoming])
    order = random.permutation(filled + remaining)
    for start in range(0, len(order), batch_size):
        yield take_rows(buffer, order[start : start + batch_size])


def _put_rows(buffer: Block, where: slice | np.ndarray, rows: Block) -> None:
    for target, source in zip(buffer, rows, strict=True):
        target[where] = source


class _RowQueue:
    """Hands out the rows of a stream of blocks in any portions."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks = blocks
        self._waiting: deque[Block] = deque()

    def take_up_to(self, rows: int) -> Block | None:
        """Return at most ``rows`` next rows as views of one block, or None at the end."""
        block = self._waiting.popleft() if self._waiting else next(self._blocks, None)
        if block is None:
            return None
        if num_rows(block) > rows:
            self._waiting.appendleft(slice_rows(block, rows, num_rows(block)))
            block = slice_rows(block, 0, rows)
        return block

    def take(self, rows: int) -> Block | None:
        """Return the next ``rows`` rows, fewer at the end, or None when there are no more."""
        parts: list[Block] = []
        while rows and (part := self.take_up_to(rows)) is not None:
            parts.append(part)
            rows -= num_rows(part)
        return concatenate(parts) if parts else None
