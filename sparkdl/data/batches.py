"""From blocks as they are read to batches: in the order of the files, or through a shuffle buffer.

Runs on every *rank*; the cost per batch is a few NumPy calls, whatever the number of rows.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.data.blocks import Block, BlockLayout, concatenate, num_rows, put_rows, slice_rows, take_rows

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from sparkdl.data.shuffle_order import Indices, ShuffleOrder

_BLOCK_BYTES = 1 << 20


def cut_batches(blocks: Iterable[Block], batch_size: int) -> Iterator[Block]:
    """Cut blocks into batches of ``batch_size`` rows, the last one with what remains.

    Batches are views of the blocks unless they span several.
    """
    queue = _RowQueue(iter(blocks))
    while batch := queue.take(batch_size):
        yield batch


def shuffled_blocks(
    blocks: Iterable[Block], layout: BlockLayout, order: ShuffleOrder, num_taken: int = 0
) -> Generator[Block, None, None]:
    """Shuffle rows through a buffer, from where ``num_taken`` rows have left it.

    Args:
        blocks: the rows that are left, in reading order: those that the buffer holds at that point, then the others.
        layout: layout of the blocks.
        order: which rows leave the buffer when; it is used up.
        num_taken: rows that left before.

    Yields:
        Blocks in memory of their own, of :func:`rows_at_once` rows or fewer.
    """
    queue = _RowQueue(iter(blocks))
    point = order.start_at(num_taken)
    is_last = point.draws_done == order.num_draws
    # The buffer is filled in the order of reading, to the slots that the rows have by now.
    empty = point.slots[point.offset :] if is_last else _slots_but(point.slots[: point.offset], order.size)
    empty = empty[np.argsort(point.positions[empty], kind="stable")]
    buffer = layout.allocate(order.size + order.num_last)
    _fill(buffer, empty, queue)
    step = rows_at_once(layout, order)
    slots, offset, following = point.slots, point.offset, order.draws_after(point.draws_done + 1)
    for _ in range(point.draws_done, order.num_draws):
        _fill(buffer, slots[:offset], queue)
        for start in range(offset, len(slots), step):
            leaving = take_rows(buffer, slots[start : start + step])
            _fill(buffer, slots[start : start + step], queue)
            yield leaving
        slots, offset = next(following), 0
    if not is_last:
        _fill(buffer, np.arange(order.size, order.size + order.num_last), queue)
    for start in range(offset, len(slots), step):
        yield take_rows(buffer, slots[start : start + step])


def rows_at_once(layout: BlockLayout, order: ShuffleOrder) -> int:
    """Return how many rows leave the shuffle buffer as one block: those of a draw, or of 1 MiB where that is less.

    A power of two, as draws are. Larger blocks would be new memory from the system every time.
    """
    fitting = _BLOCK_BYTES // max(1, layout.row_bytes)
    return min(order.rows_per_draw, 1 << max(0, fitting.bit_length() - 1))


def _slots_but(taken: Indices, size: int) -> Indices:
    is_empty = np.ones(size, np.bool_)
    is_empty[taken] = False
    return np.flatnonzero(is_empty)


def _fill(buffer: Block, slots: Indices, queue: _RowQueue) -> None:
    filled = 0
    while filled < len(slots) and (part := queue.take_up_to(len(slots) - filled)):
        put_rows(buffer, slots[filled : filled + num_rows(part)], part)
        filled += num_rows(part)
    assert filled == len(slots), "the reader gives every row of the plan or an error"


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
