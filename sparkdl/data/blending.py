"""Several datasets as one stream of batches, mixed by weights, as Megatron's blended datasets are.

Runs on every *rank*; no rank has to ask another. Which dataset serves which row depends on (seed, step) alone and is
the same on all ranks, so that all of them come to the end of a dataset in the same step, but for a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from sparkdl.data.mixture import Mixture
from sparkdl.data.row_stream import Batch, Feed, RowStream, num_rows
from sparkdl.errors import DataError, ParamError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

_LOOK_AHEAD = 1 << 14


class BlendedFeed:
    """Batches of several feeds, in shares that follow weights at every step.

    Iterating goes on where the last iteration stopped. The rule that chooses is :class:`~sparkdl.data.Mixture`'s.

    Args:
        feeds: by name the feeds, such as one :class:`~sparkdl.data.ParquetFeed` for each dataset; on every rank
            the same ones with its own ``rank``. Each shuffles by its own seed, and anew in each of its epochs.
            All their epochs are given whole, from the first one: where a feed stood of itself does not matter.
        weights: by the same names positive numbers; only their ratios matter.
        batch_size: rows per batch and rank, drawn row by row; the feeds then need the same columns. With None
            every batch comes as a whole from one feed, the same feed on all ranks; columns may differ, and
            weights count batches.
        seed: any integer; the same on every rank.
        at_end: what follows the last row of a dataset: ``repeat``, its next epoch; or ``stop``, the end of the
            blend, in the same step on all ranks.
        num_steps: batches after which the blend ends in any case.
        source_column: name of an additional int64 column that tells each row's feed by its place in ``feeds``.

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
            if value is not None and value < 1:
                raise ParamError(f"{name} must be at least 1, got {value}.")
        if at_end not in ("repeat", "stop"):
            raise ParamError(f"at_end must be 'repeat' or 'stop', got {at_end!r}.")
        self._mixture = Mixture([weights[name] for name in feeds], seed=seed)
        self._streams = [RowStream(name, feed) for name, feed in feeds.items()]
        self._batch_size, self._num_steps, self._source_column = batch_size, num_steps, source_column
        self._limits = (
            [self._available(stream.feed) for stream in self._streams] if at_end == "stop" else None
        )
        self._settings: dict[str, Any] = {
            "feeds": list(feeds),
            "weights": [float(weights[name]) for name in feeds],
            "batch_size": batch_size,
            "seed": seed,
        }
        self._steps_done = 0
        self._rows_of_ranks: list[int] = []

    @property
    def rows_of_ranks(self) -> list[int]:
        """How many rows each rank has in the batch that was taken last, to weight what ranks average."""
        return list(self._rows_of_ranks)

    def __len__(self) -> int:
        """Batches of the whole blend.

        Raises:
            TypeError: if it repeats its datasets without end.
        """
        lengths = [] if self._num_steps is None else [self._num_steps]
        if self._limits is not None:
            samples = _samples_within(self._settings["weights"], self._settings["seed"], self._limits)
            lengths.append(-(-samples // (self._batch_size or 1)))
        if not lengths:
            raise TypeError("A blend that repeats its datasets has no length; give num_steps.")
        return min(lengths)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left.

        Yields:
            As the feeds do, with ``source_column`` at the end if there is one. With a ``batch_size`` all
            batches have that many rows on every rank; only the last one before a stop can have fewer, equally
            many on every rank. Without one a batch is as the feed made it, and may have no rows on a rank whose
            shard is a row shorter.

        Raises:
            DataError: if a feed cannot be read, or the feeds differ in columns that are to lie in one batch.
        """
        while self._num_steps is None or self._steps_done < self._num_steps:
            before = self._mixture.drawn
            chosen = self._mixture.draw(self._batch_size or 1)
            allowed = self._within_limits(before, chosen)
            if allowed < len(chosen):
                chosen = chosen[:allowed]
                self._mixture.drawn = _counted(before, chosen)
            if not allowed:
                return
            yield self._next_mixed(chosen) if self._batch_size else self._next_whole(int(chosen[0]))

    def state(self) -> dict[str, Any]:
        """Return where the blend stands after the batches that were taken, as plain values for JSON.

        It is this rank's: where a shard is a row shorter than others its next epoch begins a row earlier.
        """
        return {
            **self._settings,
            "steps_done": self._steps_done,
            "drawn": list(self._mixture.drawn),
            "positions": {stream.name: stream.position() for stream in self._streams},
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch after those that had been taken when :meth:`state` was called.

        Raises:
            ParamError: if the state is that of a blend of other feeds, weights, batch size or seed.
            DataError: if a feed has fewer rows than the state says.
        """
        for key, value in self._settings.items():
            if state[key] != value:
                raise ParamError(
                    f"This blend has {key} {value}, but the state is of one with {state[key]}. Resume with the same "
                    "settings, or begin anew."
                )
        for stream in self._streams:
            stream.seek(state["positions"][stream.name])
        self._mixture.drawn = state["drawn"]
        self._steps_done = state["steps_done"]

    def close(self) -> None:
        """Close all feeds; calling it again does nothing."""
        for stream in self._streams:
            stream.close()
            close = getattr(stream.feed, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> BlendedFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _available(self, feed: Feed) -> int:
        """Samples that one epoch of a feed has on every rank: of rows, those of the shortest shard."""
        steps = feed.steps_per_epoch
        if self._batch_size is None or not steps:
            return steps
        first, last = feed.rows_in_step(0), feed.rows_in_step(steps - 1)
        return min(full * (steps - 1) + rest for full, rest in zip(first, last, strict=True))

    def _within_limits(self, before: Sequence[int], chosen: npt.NDArray[np.intp]) -> int:
        if self._limits is None:
            return len(chosen)
        return _first_over(before, chosen, self._limits)

    def _next_whole(self, source: int) -> Batch:
        stream = self._streams[source]
        batch = stream.take_batch()
        self._steps_done += 1
        self._rows_of_ranks = stream.feed.rows_in_step(stream.step - 1)
        if self._source_column is None:
            return batch
        return self._with_source(batch, np.full(num_rows(batch), source))

    def _next_mixed(self, chosen: npt.NDArray[np.intp]) -> Batch:
        """Return a batch whose i-th row is the next one of the i-th chosen feed."""
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
                elif _kinds(part) != kinds:
                    raise _unequal_columns(first.name, batch, stream.name, part)
                stop = start + num_rows(part)
                for name, rows in part.items():
                    batch[name][places[start:stop]] = rows
                start = stop
        self._steps_done += 1
        self._rows_of_ranks = [len(chosen)] * len(self._streams[0].feed.rows_in_step(0))
        return batch if self._source_column is None else self._with_source(batch, chosen)

    def _with_source(self, batch: Batch, sources: npt.NDArray[Any]) -> Batch:
        assert self._source_column is not None, "it is asked for"
        if self._source_column in batch:
            raise ParamError(
                f"The feeds have a column {self._source_column!r} of their own; give source_column another name."
            )
        return {**batch, self._source_column: sources.astype(np.int64)}


def _counted(before: Sequence[int], chosen: npt.NDArray[np.intp]) -> list[int]:
    counts = np.bincount(chosen, minlength=len(before))
    return [drawn + int(count) for drawn, count in zip(before, counts, strict=True)]


def _first_over(before: Sequence[int], chosen: npt.NDArray[np.intp], limits: Sequence[int]) -> int:
    """Return how many of the chosen samples come before one that its dataset no longer has."""
    allowed = len(chosen)
    for source, (drawn, limit) in enumerate(zip(before, limits, strict=True)):
        places = np.flatnonzero(chosen == source)
        if drawn + len(places) > limit:
            allowed = min(allowed, int(places[limit - drawn]))
    return allowed


def _samples_within(weights: Sequence[float], seed: int, limits: Sequence[int]) -> int:
    mixture = Mixture(weights, seed=seed)
    while True:
        before = mixture.drawn
        allowed = _first_over(before, mixture.draw(_LOOK_AHEAD), limits)
        if allowed < _LOOK_AHEAD:
            return sum(before) + allowed


def _kinds(batch: Batch) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    return {name: (array.dtype, array.shape[1:]) for name, array in batch.items()}


def _unequal_columns(first: str, batch: Batch, name: str, part: Batch) -> DataError:
    return DataError(
        f"Rows of the feeds {first!r} and {name!r} cannot lie in one batch: one has {_listed(batch)}, the other "
        f"{_listed(part)}. Read equal columns, or leave batch_size out for batches of one feed each."
    )


def _listed(batch: Batch) -> str:
    kinds = ((name, array.dtype, list(array.shape[1:]) or "") for name, array in batch.items())
    return ", ".join(f"{name}: {dtype}{shape}" for name, dtype, shape in kinds)
