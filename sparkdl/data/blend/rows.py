"""One epoch of rows of several corpora in fixed proportions, as a DataFrame.

:class:`~sparkdl.data.BlendedFeed` blends datasets as they are read, without end. Here the rows themselves are repeated
or left out, for a training on a DataFrame: planned on the *driver* by :func:`plan_shares`, done on the *executors* by
:func:`blended`. What is drawn depends on the counts of the rows, the weights and the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.data.blend.mixture import Mixture
from sparkdl.data.dataset.rows import random_bits
from sparkdl.errors import DataError, ParamError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

MOST_REPEATS = 100
"""An epoch with more rows than so many times those that there are is taken for a mistake."""

_CHUNK = 1 << 14


@dataclass(frozen=True, kw_only=True)
class CorpusShare:
    """What an epoch has of a corpus.

    Rows are numbered from 0. They are drawn in the order of ``(factor * number + shift) % num_rows``, after the last
    one from the first one again.

    Attributes:
        num_rows: of the corpus.
        num_held_out: how many of them are for validation, the first ones in that order.
        num_drawn: how many rows the epoch has of the others, each counted as often as it comes.
        weight: of the corpus, in parts of all weights.
        factor: without a common divisor with ``num_rows``.
        shift: any number.
    """

    num_rows: int
    num_held_out: int
    num_drawn: int
    weight: float
    factor: int
    shift: int

    def places(self, number: int) -> tuple[list[float], bool]:
        """Return the places at which a row is in the epoch, from 0, and whether it is for validation.

        Every stretch of the epoch has, to within a row, as many rows of each corpus as its weight says.
        """
        turn = (self.factor * number + self.shift) % self.num_rows
        if turn < self.num_held_out:
            return [turn / self.weight], True
        turns = range(turn - self.num_held_out, self.num_drawn, self.num_rows - self.num_held_out)
        return [(each + 0.5) / self.weight for each in turns], False


def plan_shares(
    counts: Mapping[str, int],
    weights: Mapping[str, float],
    *,
    num_rows: int | None = None,
    held_out: float = 0.0,
    seed: int = 0,
) -> list[CorpusShare]:
    """Plan an epoch: how many rows of each corpus it has follows :class:`~sparkdl.data.Mixture`.

    Args:
        counts: rows of each corpus, by its name.
        weights: by the same names positive numbers; only their ratios matter.
        num_rows: rows of an epoch; None for so many that every row is in it.
        held_out: part of the rows of each corpus that is for validation, each of them once.
        seed: any integer.

    Returns:
        What the epoch has of each corpus, in the order of the weights.

    Raises:
        DataError: if a corpus has no rows to train on.
        ParamError: if the weights cannot be used, or every row can be in an epoch only if it has very many.
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
                f"An epoch with every row would have {needed[rarest]:.0f} rows, and there are {sum(inside.values())}, "
                f"of which {rarest!r} has {inside[rarest]} and a weight of {weights[rarest] / total:.2g} in all. Say "
                "how many rows an epoch has, or raise that weight."
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
    """How many samples of each dataset there are among the next ones."""
    for start in range(0, num_samples, _CHUNK):
        mixture.draw(min(_CHUNK, num_samples - start))
    return mixture.drawn


def _until_all(mixture: Mixture, wanted: Sequence[int]) -> Sequence[int]:
    """How many samples of each dataset there are once there are as many of each as are wanted."""
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
    """A number without a common divisor with that of the rows, so that its multiples go through all of them."""
    factor = drawn % num_rows or 1
    while math.gcd(factor, num_rows) > 1:
        factor = factor % num_rows + 1
    return factor


CORPUS_COLUMNS = "corpus int, part int, number bigint"
"""What :func:`blended` needs of a row: the number of its corpus, of the partition that it is made in, and its own
number among the rows of both."""


def blended(
    rows: DataFrame,
    shares: Sequence[CorpusShare],
    counts: Mapping[tuple[int, int], int],
    *,
    num_partitions: int,
    held_out: str | None = None,
) -> DataFrame:
    """Return the rows of an epoch, among which those of every corpus are spread evenly.

    Args:
        rows: with :data:`CORPUS_COLUMNS`, which are left out of the result, and others.
        shares: of the corpora.
        counts: rows of each part and corpus.
        num_partitions: of the result.
        held_out: name of a column of booleans that says which rows are for validation; None for none.
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
            yield _drawn(batch, names, shares, first, num_rows / num_partitions)

    kinds = [f"{field.name} {field.dataType.simpleString()}" for field in rows.schema if field.name in names]
    made = ", ".join([*kinds, "held_out boolean", "stretch int", "place double", "source int"])
    placed = (
        rows.mapInArrow(draw, made)
        .repartition(num_partitions, "stretch")
        .sortWithinPartitions("stretch", "place", "source")
    )
    return placed.select(*names, *([] if held_out is None else [F.col("held_out").alias(held_out)]))


def _drawn(
    batch: pa.RecordBatch,
    names: Sequence[str],
    shares: Sequence[CorpusShare],
    first: Mapping[tuple[int, int], int],
    stretch: float,
) -> pa.RecordBatch:
    """The rows of a batch as often as they are in the epoch, with their places."""
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
