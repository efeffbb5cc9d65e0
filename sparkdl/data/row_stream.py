"""The rows of one feed without end, pass after pass, in any portions. Runs on a *rank*."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy.typing as npt

from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

Batch = dict[str, npt.NDArray[Any]]
"""By column name an array of rows; all arrays have equally many."""


class Feed(Protocol):
    """What can be blended: :class:`sparkdl.data.ParquetFeed`, or anything of this shape."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches of every epoch, the same number on all ranks."""

    def rows_in_step(self, step: int) -> list[int]:
        """Return how many rows each rank has in a step of an epoch."""

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch; they depend on its number alone, and may have no rows."""


@runtime_checkable
class SeekableFeed(Feed, Protocol):
    """A feed that can begin in the middle of an epoch without reading what comes before."""

    def seek(self, epoch: int, step: int = 0) -> None:
        """Have :meth:`epoch` begin at a batch of the whole epoch; where it began before is forgotten."""


class RowStream:
    """Hands out the rows of a feed's epochs 0, 1, 2, ... one after the other, all of them whole.

    Args:
        name: what error messages call the feed.
        feed: the feed.
    """

    def __init__(self, name: str, feed: Feed) -> None:
        self.name = name
        self.feed = feed
        self.epoch = 0
        self.step = 0
        """Batches of this epoch that have been begun."""
        self.row = 0
        """Rows of the batch begun last that have been handed out."""
        self._batches: Iterator[Batch] | None = None
        self._batch: Batch | None = None

    def take(self, rows: int) -> list[Batch]:
        """Return the next ``rows`` rows in as few parts as they lie in; parts are views.

        Raises:
            DataError: if an epoch has no rows at all on this rank.
        """
        parts = []
        without_rows = 0
        while rows:
            rest = num_rows(self._batch) - self.row if self._batch is not None else 0
            if not rest:
                without_rows += self._next_batch()
                if without_rows > 1:
                    raise DataError(f"The feed {self.name!r} has no rows on this rank, so it cannot repeat.")
                continue
            assert self._batch is not None, "there is a rest of it"
            count = min(rest, rows)
            parts.append(slice_batch(self._batch, self.row, self.row + count))
            self.row += count
            rows -= count
            without_rows = 0
        return parts

    def take_batch(self) -> Batch:
        """Return the next batch as the feed made it.

        Raises:
            DataError: if an epoch has no batches.
        """
        if self._next_batch() and self._next_batch():
            raise DataError(f"The feed {self.name!r} has no batches, so it cannot repeat.")
        assert self._batch is not None, "it is not at an end"
        self.row = num_rows(self._batch)
        return self._batch

    def position(self) -> dict[str, int]:
        """Return where the next row lies."""
        return {"epoch": self.epoch, "step": self.step, "row": self.row}

    def seek(self, position: dict[str, int]) -> None:
        """Go to a position that :meth:`position` returned.

        A feed that can seek skips what comes before it; of others it is read and left out.

        Raises:
            DataError: if the feed has fewer rows than that.
        """
        self.close()
        self.epoch, self.step, self.row = position["epoch"], 0, 0
        skipped = position["step"] - 1
        if skipped > 0 and isinstance(self.feed, SeekableFeed) and skipped < self.feed.steps_per_epoch:
            self.step = skipped
        while self.step < position["step"] and not self._next_batch():
            pass
        self.row = position["row"]
        if (self.epoch, self.step) != (position["epoch"], position["step"]) or self.row > num_rows(
            self._batch or {}
        ):
            raise DataError(
                f"The feed {self.name!r} has no step {position['step']} with {position['row']} rows in epoch "
                f"{position['epoch']}. Resume with the same data, number of ranks and batch size."
            )

    def close(self) -> None:
        """Let go of the epoch under way."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
        self._batches = self._batch = None

    def _next_batch(self) -> bool:
        """Go to the next batch, or to the beginning of the next epoch; return whether it is the latter."""
        if self._batches is None:
            if isinstance(self.feed, SeekableFeed):
                # Steps count from the beginning of the epoch, wherever the feed was told to begin before.
                self.feed.seek(self.epoch, self.step)
            self._batches = iter(self.feed.epoch(self.epoch))
        self._batch, self.row = next(self._batches, None), 0
        if self._batch is not None:
            self.step += 1
            return False
        self.close()
        self.epoch, self.step = self.epoch + 1, 0
        return True


def num_rows(batch: Batch) -> int:
    """Return how many rows a batch has."""
    return next((len(array) for array in batch.values()), 0)


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Return rows ``[start, stop)`` of a batch as views."""
    return {name: array[start:stop] for name, array in batch.items()}
