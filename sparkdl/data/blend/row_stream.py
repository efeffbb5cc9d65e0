"""An endless stream of the rows of one feed, epoch after epoch, in portions of any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.checks import check_state
from sparkdl.data.feed.feed import ParquetFeed
from sparkdl.data.feed.planned_feed import Batch, num_rows, slice_batch
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator


_FORMAT = 1


class Feed(Protocol):
    """Interface of feeds that can be blended.

    The state of a :class:`sparkdl.data.ParquetFeed` holds the position of all ranks, so that another number of ranks
    can continue from it. For other feeds a stream counts the batches of its rank, and reads them again to resume.
    """

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of every epoch, the same on all ranks."""

    def rows_in_step(self, step: int) -> list[int]:
        """Return how many rows each rank has in a step of an epoch."""

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, which depend only on its number; a batch may have no rows."""


class RowStream:
    """Stream of the rows of a feed's epochs 0, 1, 2, ... one after the other, each epoch as a whole.

    Args:
        name: name of the feed in error messages.
        feed: the feed; a ParquetFeed is copied, so that its position does not change.
    """

    def __init__(self, name: str, feed: Feed) -> None:
        self.name = name
        self.feed = feed.twin() if isinstance(feed, ParquetFeed) else feed
        self.epoch = 0
        self.step = 0
        """Number of batches of this epoch that have been begun."""
        self.row = 0
        """Number of rows that have been taken of the current batch."""
        self._first_epoch = 0
        self._rows_taken = 0
        self._batches: Iterator[Batch] | None = None
        self._batch: Batch | None = None

    def take(self, rows: int) -> list[Batch]:
        """Return the next ``rows`` rows as views, one for each batch that they lie in. All ranks take the same number.

        Raises:
            DataError: if an epoch has no rows at all on this rank.
        """
        parts = []
        without_rows = 0
        self._rows_taken += rows
        while rows:
            rest = num_rows(self._batch) - self.row if self._batch is not None else 0
            if not rest:
                without_rows += self._next_batch()
                # The rests of several epochs can have no rows for this rank; a whole epoch of such a feed has some.
                if without_rows > 1 and not isinstance(self.feed, ParquetFeed):
                    raise DataError(
                        f"An epoch of the feed {self.name!r} has no rows on this rank, so the blend cannot take any "
                        "from it. Give it more rows, or leave it out."
                    )
                continue
            assert self._batch is not None, "there is a rest of it"
            count = min(rest, rows)
            parts.append(slice_batch(self._batch, self.row, self.row + count))
            self.row += count
            rows -= count
            without_rows = 0
        return parts

    def take_batch(self) -> Batch:
        """Return the next batch as the feed yields it.

        Raises:
            DataError: if an epoch has no batches.
        """
        if self._next_batch() and self._next_batch():
            raise DataError(
                f"An epoch of the feed {self.name!r} has no batches, so the blend cannot take any from it. Give it "
                "more rows or a smaller batch_size, or leave it out."
            )
        assert self._batch is not None, "it is not at an end"
        self.row = num_rows(self._batch)
        return self._batch

    def rows_of_ranks(self) -> list[int]:
        """Return how many rows each rank has in the batch that :meth:`take_batch` returned."""
        if isinstance(self.feed, ParquetFeed):
            return self.feed.rows_in_step(self.step - 1, self.epoch)
        return self.feed.rows_in_step(self.step - 1)

    def left_of_first_epoch(self, *, in_rows: bool) -> int:
        """Return the smallest number of rows (or batches) of epoch 0 that a rank has still to get.

        Only a ParquetFeed that was resumed has less than the whole epoch left.
        """
        if isinstance(self.feed, ParquetFeed):
            if self._first_epoch:
                return 0
            return min(self.feed.rows_in_epoch(0)) if in_rows else self.feed.steps_in(0)
        steps = self.feed.steps_per_epoch
        if not in_rows or not steps:
            return steps
        first, last = self.feed.rows_in_step(0), self.feed.rows_in_step(steps - 1)
        return min(full * (steps - 1) + rest for full, rest in zip(first, last, strict=True))

    def state(self, *, in_rows: bool) -> dict[str, Any]:
        """Return the position of the stream as plain values for JSON.

        For a ParquetFeed it is the same on every rank; for another feed it is the position of this rank.

        Args:
            in_rows: whether rows were taken rather than whole batches.
        """
        if isinstance(self.feed, ParquetFeed):
            if in_rows:
                return self.feed.state_across_epochs(self._first_epoch, self._rows_taken)
            return self.feed.state()
        world_size = len(self.feed.rows_in_step(0))
        place = {"epoch": self.epoch, "step": self.step, "row": self.row, "world_size": world_size}
        return {"format": _FORMAT, **place}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that another stream returned.

        A ParquetFeed does not read the earlier rows. Other feeds read the earlier batches of the epoch, which are
        discarded.

        Raises:
            ParamError: if ``state`` is not a state of such a stream.
            DataError: for a ParquetFeed, as its ``resume`` raises; for another feed, if the state has a newer format,
                if the number of ranks differs, or if the feed has no such position. Other changes of the data are not
                detected.
        """
        self.close()
        if isinstance(self.feed, ParquetFeed):
            self.feed.resume(state)
            self.epoch = self._first_epoch = int(state["epoch"])
            self.step = self.row = self._rows_taken = 0
        else:
            self._take_until(state)

    def _take_until(self, position: Mapping[str, Any]) -> None:
        check_state(position, f"feed {self.name!r}", _FORMAT, "epoch", "step", "row", "world_size")
        world_size = len(self.feed.rows_in_step(0))
        if position["world_size"] != world_size:
            raise DataError(
                f"The state of feed {self.name!r} is from {position['world_size']} ranks, and now there are "
                f"{world_size}. Only a feed such as ParquetFeed can resume on another number of ranks. Resume on "
                f"{position['world_size']} ranks."
            )
        self.epoch, self.step, self.row = position["epoch"], 0, 0
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
        """Close the iterator of the current epoch."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
        self._batches = self._batch = None

    def _next_batch(self) -> bool:
        """Move to the next batch, or to the beginning of the next epoch; return True in the latter case."""
        if self._batches is None:
            self._batches = iter(self.feed.epoch(self.epoch))
        self._batch, self.row = next(self._batches, None), 0
        if self._batch is not None:
            self.step += 1
            return False
        self.close()
        self.epoch, self.step = self.epoch + 1, 0
        return True
