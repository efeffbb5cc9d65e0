"""One epoch of rows of several corpora in fixed proportions, as a DataFrame.

:class:`~sparkdl.data.BlendedFeed` blends datasets as they are read, without end. This module repeats or leaves out rows
of a DataFrame: :func:`plan_shares` plans this on the *driver*, and :func:`blend_corpora` does it on the *executors*.
The drawn rows depend only on the row counts, the weights and the seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.data.blend.mixture import Mixture
from sparkdl.data.dataset.row_choice import random_bits
from sparkdl.errors import DataError, ParamError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

MOST_REPEATS = 100
"""Maximum ratio of the rows of an epoch to the existing rows; an epoch with more rows is taken for a mistake."""

_CHUNK = 1 << 14


@dataclass(frozen=True, kw_only=True)
class CorpusShare:
    """The rows of a corpus in an epoch.

    Rows are numbered from 0. They are drawn in the order of ``(factor * number + shift) % num_rows``; after the last
    row, the first one follows again.

    Attributes:
        num_rows: number of rows of the corpus.
        num_held_out: number of rows for validation, which are the first ones in that order.
        num_drawn: number of other rows in the epoch, each counted as often as it occurs.
        weight: weight of the corpus, divided by the sum of all weights.
        factor: factor of the order, coprime to ``num_rows``.
        shift: offset of the order, any integer.
    """

    num_rows: int
    num_held_out: int
    num_drawn: int
    weight: float
    factor: int
    shift: int

    def places(self, number: int) -> tuple[list[float], bool]:
        """Return the places of a row in the epoch, from 0, and whether the row is for validation.

        Every stretch of the epoch has the rows of each corpus in proportion to its weight, to within a row.
        """
        turn = (self.factor * number + self.shift) % self.num_rows
        if turn < self.num_held_out:
            return [turn / self.weight], True
        turns = range(turn - self.num_held_out, self.num_drawn, self.num_rows - self.num_held_out)
        return [(turn + 0.5) / self.weight for turn in turns], False


def plan_shares(
    counts: Mapping[str, int],
    weights: Mapping[str, float],
    *,
    num_rows: int | None = None,
    held_out: float = 0.0,
    seed: int = 0,
) -> list[CorpusShare]:
    """Plan the rows of each corpus in an epoch; the row counts follow :class:`~sparkdl.data.Mixture`.

    Args:
        counts: number of rows of each corpus, by its name.
        weights: positive weights of the corpora, by the same names; only their ratios matter.
        num_rows: number of rows of an epoch; None for as many as it takes to include every row.
        held_out: share of the rows of each corpus that is for validation, each of them once.
        seed: any integer.

    Returns:
        The share of each corpus, in the order of ``weights``.

    Raises:
        DataError: if a corpus has no rows to train on.
        ParamError: if the weights cannot be used, or an epoch with every row would exceed :data:`MOST_REPEATS`.
    """
    mixture = Mixture(list(weights.values()), seed=seed)
    total = sum(weights.values())
    outside = {name: round(counts.get(name, 0) * held_out) for name in weights}
    inside = {name: counts.get(name, 0) - outside[name] for name in weights}
    for name, count in inside.items():
        if not count:
            raise DataError(
                f"The corpus {name!r} has a weight of {weights[name]:g}, and no rows to train on. Leave it out, or "
                "give it more."
            )
    if num_rows is None:
        needed = {name: inside[name] * total / weights[name] for name in weights}
        rarest = max(needed, key=lambda name: needed[name])
        if needed[rarest] > MOST_REPEATS * sum(inside.values()):
            raise ParamError(
                f"An epoch with every row would have {needed[rarest]:.0f} rows, and the corpora have "
                f"{sum(inside.values())}: {rarest!r} has {inside[rarest]} rows, and only {weights[rarest] / total:.2g} "
                "of all weights. Say how many rows an epoch has, or raise that weight."
            )
        drawn = _until_all(mixture, list(inside.values()))
    else:
        drawn = _after(mixture, num_rows)
    bits = random_bits(seed)
    return [
        CorpusShare(
            num_rows=counts[name],
            num_held_out=outside[name],
            num_drawn=count,
            weight=weights[name] / total,
            factor=_factor(int(bits.random_raw()), counts[name]),
            shift=int(bits.random_raw()) % counts[name],
        )
        for name, count in zip(weights, drawn, strict=True)
    ]


def _after(mixture: Mixture, num_samples: int) -> Sequence[int]:
    """Return how many of the next samples each dataset has."""
    for start in range(0, num_samples, _CHUNK):
        mixture.draw(min(_CHUNK, num_samples - start))
    return mixture.drawn


def _until_all(mixture: Mixture, wanted: Sequence[int]) -> Sequence[int]:
    """Return how many samples each dataset has once all of them have at least the wanted number."""
    while True:
        before = mixture.drawn
        chosen = mixture.draw(_CHUNK)
        if all(drawn >= count for drawn, count in zip(mixture.drawn, wanted, strict=True)):
            missing = [max(0, count - drawn) for count, drawn in zip(wanted, before, strict=True)]
            stop = max(
                int(np.flatnonzero(chosen == source)[count - 1]) + 1
                for source, count in enumerate(missing)
                if count
            )
            counts = np.bincount(chosen[:stop], minlength=len(wanted))
            return [drawn + int(count) for drawn, count in zip(before, counts, strict=True)]


def _factor(drawn: int, num_rows: int) -> int:
    """Return a number coprime to ``num_rows``, so that its multiples reach all rows."""
    factor = drawn % num_rows or 1
    while math.gcd(factor, num_rows) > 1:
        factor = factor % num_rows + 1
    return factor


CORPUS_COLUMNS = "corpus int, part int, number bigint"
"""Columns that :func:`blend_corpora` needs: the number of a row's corpus, the number of the partition in which the row
is made, and the number of the row among those of this corpus and partition."""


def blend_corpora(
    rows: DataFrame,
    shares: Sequence[CorpusShare],
    counts: Mapping[tuple[int, int], int],
    *,
    num_partitions: int,
    held_out: str | None = None,
) -> DataFrame:
    """Return the rows of an epoch, in which the rows of every corpus are spread evenly.

    Args:
        rows: DataFrame with :data:`CORPUS_COLUMNS`, which are left out of the result, and other columns.
        shares: shares of the corpora, by number of the corpus.
        counts: number of rows of each partition and corpus.
        num_partitions: number of partitions of the result.
        held_out: name of a boolean column to add, which is true in rows for validation; None for no such column.
    """
    from pyspark.sql import functions as F

    names = [field.name for field in rows.schema if field.name not in ("corpus", "part", "number")]
    first: dict[tuple[int, int], int] = {}
    before = [0] * len(shares)
    for part, corpus in sorted(counts):
        first[part, corpus] = before[corpus]
        before[corpus] += counts[part, corpus]
    num_rows = sum(share.num_drawn for share in shares)

    def draw(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield _draw_rows(batch, names, shares, first, num_rows / num_partitions)

    kinds = [f"{field.name} {field.dataType.simpleString()}" for field in rows.schema if field.name in names]
    made = ", ".join([*kinds, "held_out boolean", "stretch int", "place double", "source int"])
    placed = (
        rows.mapInArrow(draw, made)
        .repartition(num_partitions, "stretch")
        .sortWithinPartitions("stretch", "place", "source")
    )
    return placed.select(*names, *([] if held_out is None else [F.col("held_out").alias(held_out)]))


def _draw_rows(
    batch: pa.RecordBatch,
    names: Sequence[str],
    shares: Sequence[CorpusShare],
    first: Mapping[tuple[int, int], int],
    stretch: float,
) -> pa.RecordBatch:
    """Return the rows of a batch, repeated as often as they are in the epoch, with their places."""
    import pyarrow as pa

    keys = (batch.column(name).to_pylist() for name in ("corpus", "part", "number"))
    indices: list[int] = []
    made: list[tuple[bool, int, float, int]] = []
    for index, (corpus, part, number) in enumerate(zip(*keys, strict=True)):
        places, is_held_out = shares[corpus].places(first[part, corpus] + number)
        indices += [index] * len(places)
        made += [(is_held_out, int(place / stretch), place, corpus) for place in places]
    columns = list(zip(*made, strict=True)) or [()] * 4
    kinds = (pa.bool_(), pa.int32(), pa.float64(), pa.int32())
    taken = batch.select(list(names)).take(pa.array(indices, pa.int64()))
    return pa.RecordBatch.from_arrays(
        [*taken.columns, *(pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True))],
        names=[*names, "held_out", "stretch", "place", "source"],
    )
