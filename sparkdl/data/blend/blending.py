"""Mixes several feeds into one stream of batches by weights, as Megatron's blended datasets do.

The ranks do not communicate. Which dataset supplies which row depends only on (seed, step) and is the same on all
ranks, so all ranks reach the end of a dataset in the same step, to within one row. The state of a blend is a dict for
JSON; its settings determine which blends can resume from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from sparkdl.checks import check_counts, check_integer, check_state
from sparkdl.closing import Closing
from sparkdl.data.blend.mixture import Mixture
from sparkdl.data.blend.row_stream import Feed, RowStream
from sparkdl.data.feed.feed import ParquetFeed, not_indexable_error
from sparkdl.data.feed.planned_feed import Batch, num_rows
from sparkdl.errors import DataError, ParamError, SparkdlError, list_names

if TYPE_CHECKING:
    from collections.abc import Iterator


_FORMAT = 1
_LOOK_AHEAD = 1 << 14


class BlendedFeed(Closing):
    """Batches of several feeds, in shares that follow weights at every step.

    Iterating continues where the last iteration stopped. :class:`~sparkdl.data.Mixture` chooses the feeds.

    Args:
        feeds: the feeds by name, such as one :class:`~sparkdl.data.ParquetFeed` for each dataset; on every rank
            the same ones with its own ``rank``. Each feed shuffles with its own seed, differently in each of its
            epochs. The blend takes whole epochs of a feed, starting with the first one; it neither uses nor changes
            the feed's own position.
        weights: positive weights of the feeds, by the same names; only their ratios matter.
        batch_size: rows per batch and rank, drawn row by row; the feeds then need the same columns. With None
            every batch comes as a whole from one feed, the same feed on all ranks; columns may differ, and
            weights count batches.
        seed: any integer; the same on every rank.
        at_end: what happens after the last row of a dataset: ``repeat`` continues with its next epoch, ``stop`` ends
            the blend, in the same step on all ranks.
        num_steps: number of batches after which the blend ends in any case; None for no limit.
        source_column: name of an additional int64 column with the index in ``feeds`` of each row's feed.

    Attributes:
        rows_of_ranks: number of rows that each rank has in the batch that was taken last, for weighting averages over
            the ranks.

    Raises:
        ParamError: if names do not match, or a number is out of range.
    """

    def __init__(
        self,
        feeds: Mapping[str, Feed],
        weights: Mapping[str, float],
        *,
        batch_size: int | None = None,
        seed: int = 0,
        at_end: Literal["repeat", "stop"] = "repeat",
        num_steps: int | None = None,
        source_column: str | None = None,
    ) -> None:
        if set(feeds) != set(weights):
            raise ParamError(f"The feeds are {list(feeds)}, but weights are given for {list(weights)}.")
        for name, value in (("batch_size", batch_size), ("num_steps", num_steps)):
            if value is not None:
                check_counts(least=1, **{name: value})
        check_integer(seed=seed)
        if at_end not in ("repeat", "stop"):
            raise ParamError(f"at_end must be 'repeat' or 'stop', got {at_end!r}.")
        self._mixture = Mixture([weights[name] for name in feeds], seed=seed)
        self._streams = [RowStream(name, feed) for name, feed in feeds.items()]
        world_sizes = {stream.name: len(stream.feed.rows_in_step(0)) for stream in self._streams}
        if len(set(world_sizes.values())) > 1:
            raise ParamError(
                f"All feeds of a blend must have the same world_size, but these have {world_sizes}."
            )
        self._batch_size, self._num_steps, self._source_column = batch_size, num_steps, source_column
        self._settings: dict[str, Any] = {
            "feeds": list(feeds),
            "weights": [float(weights[name]) for name in feeds],
            "batch_size": batch_size if batch_size is None else int(batch_size),
            "seed": int(seed),
            "at_end": at_end,
        }
        self._steps_done = 0
        self.rows_of_ranks: list[int] = []
        self._begin()

    def __len__(self) -> int:
        """Number of batches of the whole blend, including those before it was resumed.

        Raises:
            TypeError: if the blend repeats its datasets without end.
        """
        lengths = [] if self._num_steps is None else [self._num_steps]
        if self._limits is not None:
            mixture = Mixture(self._settings["weights"], seed=self._settings["seed"])
            mixture.drawn = self._drawn_before
            samples = _samples_within(mixture, self._limits)
            lengths.append(self._steps_before + -(-samples // (self._batch_size or 1)))
        if not lengths:
            raise TypeError("A blend that repeats its datasets has no length; give num_steps.")
        return min(lengths)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches.

        Yields:
            Batches like those of the feeds, with ``source_column`` at the end if there is one. With a ``batch_size``
            all batches have that many rows on every rank; only the last one before a stop can have fewer, the same
            number on every rank. Without ``batch_size``, a batch is as the feed yields it, and may have no rows on a
            rank whose shard is one row shorter.

        Raises:
            DataError: if a feed cannot be read, or the columns of feeds in one batch differ.
        """
        while self._num_steps is None or self._steps_done < self._num_steps:
            before = self._mixture.drawn
            chosen = self._mixture.draw(self._batch_size or 1)
            allowed = len(chosen) if self._limits is None else _first_over(before, chosen, self._limits)
            if allowed < len(chosen):
                self._mixture.drawn = before
                chosen = self._mixture.draw(allowed)
            if not allowed:
                return
            yield self._next_mixed(chosen) if self._batch_size else self._next_whole(int(chosen[0]))

    def __getitem__(self, index: object) -> NoReturn:
        """Raise an error that says what to do: a DataLoader asks for items if it gets no ``IterableDataset``."""
        raise not_indexable_error(self)

    def set_epoch(self, epoch: int) -> NoReturn:
        """Raise an error: a blend runs continuously through the epochs of its feeds.

        Raises:
            ParamError: always.
        """
        raise ParamError(
            f"A blend has no epochs of its own, so epoch {epoch} cannot be chosen. Do not call set_epoch on it."
        )

    def state(self) -> dict[str, Any]:
        """Return the position of the blend after the batches that were taken, as plain values for JSON.

        It is the same on every rank if all feeds are resumable as :class:`~sparkdl.data.ParquetFeed` is; for other
        feeds it has the position of this rank.
        """
        feeds = {stream.name: stream.state(in_rows=self._batch_size is not None) for stream in self._streams}
        return {
            "format": _FORMAT,
            "blend": dict(self._settings),
            "steps_done": self._steps_done,
            "drawn": list(self._mixture.drawn),
            "feeds": feeds,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that had been taken when :meth:`state` was called.

        With the same number of ranks and the same shuffle buffers, the batches are the same as without the
        interruption. On another number of ranks, every feed divides the unread rows of its epoch again, and each of
        them comes once; which feed supplies which row of a step stays the same. If the state is refused, the position
        of the blend does not change.

        Raises:
            ParamError: if it is not a state of a blend, or has other feeds, weights, batch size, seed or ``at_end``.
            DataError: if a feed has other rows, another seed or another order than in the state, or cannot continue
                on another number of ranks; the message names the feed.
        """
        check_state(state, "blend", _FORMAT, "blend", "steps_done", "drawn", "feeds")
        then = state["blend"]
        for key, value in self._settings.items():
            if then.get(key) != value:
                raise ParamError(
                    f"The setting {key} of this blend is {value}, but the state was saved with {then.get(key)}. Resume "
                    "with the same settings, or start without the state."
                )
        before = [stream.state(in_rows=self._batch_size is not None) for stream in self._streams]
        try:
            for stream in self._streams:
                _resume(stream, state["feeds"][stream.name])
        except SparkdlError:
            for stream, position in zip(self._streams, before, strict=True):
                stream.resume(position)
            raise
        self._mixture.drawn = state["drawn"]
        self._steps_done = state["steps_done"]
        self._begin()

    def close(self) -> None:
        """Close all feeds; calling it again does nothing."""
        for stream in self._streams:
            stream.close()
            close = getattr(stream.feed, "close", None)
            if close is not None:
                close()

    def _begin(self) -> None:
        """Record the current position as the one from which the end of the blend is computed."""
        self._steps_before, self._drawn_before = self._steps_done, self._mixture.drawn
        self._limits = None
        if self._settings["at_end"] == "stop":
            left = [
                stream.left_of_first_epoch(in_rows=self._batch_size is not None) for stream in self._streams
            ]
            self._limits = [
                drawn + rows if isinstance(stream.feed, ParquetFeed) else rows
                for stream, drawn, rows in zip(self._streams, self._drawn_before, left, strict=True)
            ]

    def _next_whole(self, source: int) -> Batch:
        stream = self._streams[source]
        batch = stream.take_batch()
        self._steps_done += 1
        self.rows_of_ranks = stream.rows_of_ranks()
        if self._source_column is None:
            return batch
        return self._with_source(batch, np.full(num_rows(batch), source))

    def _next_mixed(self, chosen: npt.NDArray[np.intp]) -> Batch:
        """Return a batch whose i-th row is the next row of the feed ``chosen[i]``."""
        batch: Batch = {}
        for source, stream in enumerate(self._streams):
            places = np.flatnonzero(chosen == source)
            start = 0
            for part in stream.take(len(places)):
                if not batch:
                    first, kinds = stream, _kinds(part)
                    batch = {
                        name: np.empty((len(chosen), *rows.shape[1:]), rows.dtype)
                        for name, rows in part.items()
                    }
                elif (others := _kinds(part)) != kinds:
                    one, other = (
                        list_names(
                            f"{name}: {dtype}{list(shape) or ''}"
                            for name, (dtype, shape) in columns.items()
                            if compared.get(name) != (dtype, shape)
                        )
                        for columns, compared in ((kinds, others), (others, kinds))
                    )
                    raise DataError(
                        f"Rows of the feeds {first.name!r} and {stream.name!r} cannot lie in one batch: one has "
                        f"{one or 'fewer columns'}, the other {other or 'fewer columns'}. Read equal columns, or leave "
                        "batch_size out for batches of one feed each."
                    )
                stop = start + num_rows(part)
                for name, rows in part.items():
                    batch[name][places[start:stop]] = rows
                start = stop
        self._steps_done += 1
        self.rows_of_ranks = [len(chosen)] * len(self._streams[0].feed.rows_in_step(0))
        return batch if self._source_column is None else self._with_source(batch, chosen)

    def _with_source(self, batch: Batch, sources: npt.NDArray[Any]) -> Batch:
        assert self._source_column is not None, "it is asked for"
        if self._source_column in batch:
            raise ParamError(
                f"The feeds have a column {self._source_column!r} of their own; give source_column another name."
            )
        return {**batch, self._source_column: sources.astype(np.int64)}


def _first_over(before: Sequence[int], chosen: npt.NDArray[np.intp], limits: Sequence[int]) -> int:
    """Return how many of the chosen samples come before the first one that its dataset no longer has."""
    allowed = len(chosen)
    for source, (drawn, limit) in enumerate(zip(before, limits, strict=True)):
        places = np.flatnonzero(chosen == source)
        if drawn + len(places) > limit:
            allowed = min(allowed, int(places[limit - drawn]))
    return allowed


def _samples_within(mixture: Mixture, limits: Sequence[int]) -> int:
    """Return how many samples a mixture draws from its position before the first one that its dataset no longer has."""
    samples = 0
    while True:
        before = mixture.drawn
        allowed = _first_over(before, mixture.draw(_LOOK_AHEAD), limits)
        samples += allowed
        if allowed < _LOOK_AHEAD:
            return samples


def _resume(stream: RowStream, state: Any) -> None:
    try:
        stream.resume(state)
    except SparkdlError as error:
        raise type(error)(f"The feed {stream.name!r} of the blend cannot continue: {error}") from error


def _kinds(batch: Batch) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    return {name: (array.dtype, array.shape[1:]) for name, array in batch.items()}
