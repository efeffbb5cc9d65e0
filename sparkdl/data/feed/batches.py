"""Cuts blocks of rows into batches, in the order of the files or through a shuffle buffer.

A batch costs a few NumPy calls, whatever the number of rows.

The buffer takes the rows of a shard as they are read. Whenever it is full, some of its slots are drawn; their rows
leave in the order of the draw, and the next rows of the shard take their places. The rows left at the end leave in
random order. :class:`ShuffleOrder` computes the order from row counts only, without reading or holding a row. The order
can therefore be replayed without the rows, which is how an epoch is resumed in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkdl.data.dataset.blocks import (
    Block,
    BlockLayout,
    concatenate,
    num_rows,
    put_rows,
    slice_rows,
    take_rows,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator


_BLOCK_BYTES = 1 << 20


def cut_batches(blocks: Iterable[Block], batch_size: int) -> Iterator[Block]:
    """Cut blocks into batches of ``batch_size`` rows, the last one with what remains.

    Batches are views of the blocks unless they span several.
    """
    queue = _RowQueue(iter(blocks))
    while batch := queue.take(batch_size):
        yield batch


def shuffle_blocks(
    blocks: Iterable[Block], layout: BlockLayout, order: ShuffleOrder, num_taken: int = 0
) -> Generator[Block, None, None]:
    """Shuffle rows through a buffer, starting after ``num_taken`` rows have left it.

    Args:
        blocks: remaining rows, in reading order: those that the buffer holds at that point, then the others.
        layout: layout of the blocks.
        order: order in which rows leave the buffer; it cannot be used again.
        num_taken: number of rows that have already left the buffer.

    Yields:
        Blocks of at most :func:`rows_at_once` rows, which share no memory with the buffer.
    """
    queue = _RowQueue(iter(blocks))
    point = order.start_at(num_taken)
    is_last = point.draws_done == order.num_draws
    # The buffer is filled in reading order; each row goes to the slot that it has at this point.
    empty = point.slots[point.offset :]
    if not is_last:
        empty = np.setdiff1d(np.arange(order.size), point.slots[: point.offset], assume_unique=True)
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
    """Return how many rows leave the shuffle buffer as one block: those of a draw, or of 1 MiB if that is less.

    The number is a power of two, as in draws. Larger blocks would take new memory from the system every time.
    """
    fitting = _BLOCK_BYTES // max(1, layout.row_bytes)
    return min(order.rows_per_draw, 1 << max(0, fitting.bit_length() - 1))


def _fill(buffer: Block, slots: Indices, queue: _RowQueue) -> None:
    filled = 0
    while filled < len(slots) and (part := queue.take_up_to(len(slots) - filled)):
        put_rows(buffer, slots[filled : filled + num_rows(part)], part)
        filled += num_rows(part)
    assert filled == len(slots), "the reader gives every row of the plan or an error"


class _RowQueue:
    """The rows of a stream of blocks, which can be taken in portions of any size."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks = blocks
        self._block: Block | None = None
        self._start = 0

    def take_up_to(self, rows: int) -> Block | None:
        """Return the next rows, at most ``rows``, as views of one block, or None at the end."""
        block, start = self._block, self._start
        if block is None:
            block, start = next(self._blocks, None), 0
            if block is None:
                return None
        end = num_rows(block)
        stop = min(start + rows, end)
        self._block, self._start = (block, stop) if stop < end else (None, 0)
        return block if stop - start == end else slice_rows(block, start, stop)

    def take(self, rows: int) -> Block | None:
        """Return the next ``rows`` rows, fewer at the end, or None when there are no more."""
        parts: list[Block] = []
        while rows and (part := self.take_up_to(rows)) is not None:
            parts.append(part)
            rows -= num_rows(part)
        return concatenate(parts) if parts else None


Indices = npt.NDArray[np.int64]

_MAX_DRAW_ROWS = 4096


def rows_per_draw(buffer_rows: int) -> int:
    """Return how many rows leave a buffer at once: at most an eighth of it.

    The number is a power of two, so that batches of usual sizes rarely span two draws. It is small enough that a row
    stays for eight draws on average, and large enough that a draw costs next to nothing per row.
    """
    return min(_MAX_DRAW_ROWS, 1 << max(0, (buffer_rows // 8).bit_length() - 1))


@dataclass(frozen=True)
class BufferPoint:
    """Position of a shuffle.

    Attributes:
        positions: position in the shard of the row that each slot holds or will hold.
        slots: slots of the current draw.
        offset: number of these slots whose rows have left the buffer.
        draws_done: number of completed draws.
        next_position: position in the shard of the next row that enters the buffer.
    """

    positions: Indices
    slots: Indices
    offset: int
    draws_done: int
    next_position: int


class ShuffleOrder:
    """The order of one shard in one epoch, which can be iterated once.

    Args:
        num_rows: number of rows of the shard.
        buffer_rows: number of rows of the buffer, at least 1; with ``buffer_rows >= num_rows`` all orders are possible.
        bits: random source of the draws. Only raw bits are used, which NumPy guarantees to be the same in every
            version.

    Attributes:
        size: number of slots that the buffer uses.
        rows_per_draw: number of rows of every draw but the last.
        num_draws: number of draws before the last one, which empties the buffer.
        num_last: number of rows of the shard, fewer than a draw, that enter the buffer only for the last draw.
    """

    def __init__(self, num_rows: int, buffer_rows: int, bits: np.random.PCG64) -> None:
        self.num_rows = num_rows
        self.size = min(buffer_rows, num_rows)
        self.rows_per_draw = rows_per_draw(buffer_rows)
        self.num_draws, self.num_last = divmod(num_rows - self.size, self.rows_per_draw)
        self._bits = bits
        self._stamp = np.empty(self.size, np.int32)
        self._is_taken = np.zeros(self.size, np.bool_)

    def start_at(self, num_taken: int) -> BufferPoint:
        """Advance the order to the point where ``num_taken`` rows have left.

        This takes about 15 ns per row, and memory only for the positions of the buffer.
        """
        capacity = self.size + self.num_last
        positions = np.arange(capacity)
        positions[self.size :] = np.arange(self.num_rows - self.num_last, self.num_rows)
        draws_done, offset = divmod(num_taken, self.rows_per_draw)
        if draws_done >= self.num_draws:
            draws_done, offset = self.num_draws, num_taken - self.num_draws * self.rows_per_draw
        next_position = self.size
        for _ in range(draws_done):
            positions[self._draw()] = np.arange(next_position, next_position + self.rows_per_draw)
            next_position += self.rows_per_draw
        return BufferPoint(positions, next(self.draws_after(draws_done)), offset, draws_done, next_position)

    def draws_after(self, draws_done: int) -> Iterator[Indices]:
        """Yield the slots of the remaining draws. The last draw has all slots."""
        for _ in range(draws_done, self.num_draws):
            yield self._draw()
        yield _permutation(self.size + self.num_last, self._bits)

    def _draw(self) -> Indices:
        """Draw distinct slots: a slot that was already drawn is replaced by another one."""
        slots = self._random_slots(self.rows_per_draw)
        taken = np.empty(0, np.int64)
        while True:
            # If a slot was drawn twice, the first draw counts: it is the last one to write its number there.
            numbers = np.arange(len(slots), dtype=np.int32)
            self._stamp[slots[::-1]] = numbers[::-1]
            slots = slots[(self._stamp[slots] == numbers) & ~self._is_taken[slots]]
            taken = np.concatenate([taken, slots]) if len(taken) else slots
            if len(taken) == self.rows_per_draw:
                self._is_taken[taken] = False
                return taken
            self._is_taken[slots] = True
            slots = self._random_slots(self.rows_per_draw - len(taken))

    def _random_slots(self, count: int) -> Indices:
        # Multiplying and shifting, with a bias below size / 2**32, is faster than one division per number.
        bits = self._bits.random_raw(count) >> np.uint64(32)
        return ((bits * np.uint64(self.size)) >> np.uint64(32)).astype(np.int64)


def remaining_positions(order: ShuffleOrder, num_taken: int) -> tuple[Indices, int]:
    """Return which rows of a shard are left once ``num_taken`` rows have left its buffer.

    Returns:
        Sorted positions of the rows in the buffer, and the position from which on all rows are left.
    """
    point = order.start_at(num_taken)
    if point.draws_done == order.num_draws:
        return np.sort(point.positions[point.slots[point.offset :]]), order.num_rows
    in_buffer = np.ones(order.size, np.bool_)
    in_buffer[point.slots[: point.offset]] = False
    return np.sort(point.positions[: order.size][in_buffer]), point.next_position


def _permutation(count: int, bits: np.random.PCG64) -> Indices:
    """Return the numbers below ``count`` in random order."""
    # The low bits of each random key hold its number, so that no two keys are equal; sorting the keys is enough.
    low = np.uint64((1 << max(1, count).bit_length()) - 1)
    keys = (bits.random_raw(count) & ~low) | np.arange(count, dtype=np.uint64)
    keys.sort()
    return (keys & low).astype(np.int64)
