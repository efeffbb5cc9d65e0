"""Selection of the rows that a feed yields: a random share of the rows, or a filter on some columns.

A random share, such as a validation share, is drawn by the rows' positions in the files, without reading the rows.
Each row group contributes its share, so that the drawn rows are spread over the dataset as evenly as its row groups
allow. The draw is a pure function of row counts, the same on the *driver* and on every *rank*.

For a filter, each rank counts the matching rows of its part of the row groups before the first epoch, and the ranks
exchange the counts; from then on a filtered dataset is sharded like any other. Filters run on every *rank*.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from sparkdl import errors
from sparkdl.errors import DataError
from sparkdl.foreign_errors import errors_as
from sparkdl.lazy import load_entry

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkdl.collective import Communicator


_LOTS = 0x6C6F7473
"""Part of the key that distinguishes these random bits from those that shuffle rows with the same seed."""


def random_bits(*key: int) -> np.random.PCG64:
    """Return a source of random bits that depends only on the integers of ``key``, which may be negative."""
    return np.random.PCG64(np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in key]))


@dataclass(frozen=True, kw_only=True)
class DrawnRows:
    """Randomly drawn rows, or all rows that were not drawn.

    Attributes:
        seed: any integer.
        num_drawn: number of rows drawn from every row group.
        row_counts: number of rows of every row group.
        is_rest: whether the selected rows are those that were not drawn.
    """

    seed: int
    num_drawn: tuple[int, ...] = field(repr=False)
    row_counts: tuple[int, ...] = field(repr=False)
    is_rest: bool = False
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns that have to be read: none."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of selected rows of every row group."""
        if not self.is_rest:
            return self.num_drawn
        return tuple(rows - drawn for rows, drawn in zip(self.row_counts, self.num_drawn, strict=True))

    def rest(self) -> DrawnRows:
        """Return the complement: the rows that this selection leaves out."""
        return replace(self, is_rest=not self.is_rest)

    def rows_kept(self, table: pa.Table, row_group: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the selected rows of a row group, ascending."""
        del table
        # Raw bits, because NumPy guarantees the same ones in every version.
        lots = random_bits(self.seed, row_group, _LOTS).random_raw(self.row_counts[row_group])
        order = np.argsort(lots, kind="stable")
        first = self.num_drawn[row_group]
        return np.sort(order[first:] if self.is_rest else order[:first])


def draw_rows(row_counts: Sequence[int], share: float, *, seed: int) -> DrawnRows:
    """Draw a share of the rows: ``share * N`` of N rows, rounded, and the same share of each row group to within a row.

    Args:
        row_counts: number of rows of every row group.
        share: share of the rows, from 0 to 1.
        seed: any integer; the same seed draws the same rows from the same row groups.
    """
    ends = itertools.accumulate(row_counts, initial=0)
    drawn_until = [min(end, int(end * share + 0.5)) for end in ends]
    return DrawnRows(
        seed=seed,
        num_drawn=tuple(stop - start for start, stop in itertools.pairwise(drawn_until)),
        row_counts=tuple(row_counts),
    )


Values = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class RowFilter:
    """Selects the rows for which a function returns True.

    Attributes:
        columns: names of the columns that the function uses, or the name of one; the feed does not have to yield them.
        keep: function that takes the values of a row group by column name, each an array with one item per row
            (strings and lists as objects), and returns a boolean array with one item per row. It must return the same
            result for the same rows every time, on every rank.
        counts: number of rows of every row group that pass, if known; otherwise the ranks read rows to count them.
    """

    columns: Sequence[str]
    keep: Callable[[Values], npt.NDArray[np.bool_]]
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            object.__setattr__(self, "columns", (self.columns,))

    def rows_kept(self, table: pa.Table, row_group: int = 0) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows of a table that pass; the number of the row group is ignored.

        Raises:
            DataError: if a column is missing, the function fails, or it returns anything but one boolean per row.
        """
        del row_group
        missing = [name for name in self.columns if name not in table.column_names]
        if missing:
            raise DataError(f"the row filter uses column {missing[0]!r}, which does not exist")
        values = _values_of(table, self.columns)
        with errors_as(DataError, "the row filter failed"):
            mask = np.asarray(self.keep(values))
        if mask.shape != (table.num_rows,) or mask.dtype != np.bool_:
            raise DataError(
                f"the row filter returned {mask.dtype} of shape {mask.shape} for {table.num_rows} rows; it must "
                "return one boolean per row"
            )
        return np.flatnonzero(mask)


@dataclass(frozen=True, kw_only=True)
class RepeatedRows:
    """Rows that an epoch has once or several times, such as those of a rare class.

    Attributes:
        names: names of the columns that the function uses.
        repeat: function that takes the values of rows by column name, as for :class:`RowFilter`, and returns how often
            an epoch has each of them.
        counts: number of rows of every row group, with repetitions.
        among: rows among which the function decides; None for all rows.
    """

    names: tuple[str, ...]
    repeat: Callable[[Values], npt.NDArray[np.int64]]
    counts: tuple[int, ...] = field(repr=False)
    among: RowChoice | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that have to be read."""
        return tuple(dict.fromkeys((*self.names, *(self.among.columns if self.among else ()))))

    def rows_kept(self, table: pa.Table, row_group: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows of a row group, ascending, each as often as an epoch has it."""
        rows = np.arange(table.num_rows) if self.among is None else self.among.rows_kept(table, row_group)
        return np.repeat(rows, self.repeat(_values_of(table, self.names))[rows])


@dataclass(frozen=True, kw_only=True)
class SpreadRows:
    """Some rows of some row groups, at equal distances.

    Attributes:
        counts: number of rows of every row group.
        among: larger choice that these rows belong to; None for all rows.
    """

    counts: tuple[int, ...] = field(repr=False)
    among: RowChoice | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that have to be read."""
        return () if self.among is None else tuple(self.among.columns)

    def rows_kept(self, table: pa.Table, row_group: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the selected rows of a row group, ascending."""
        rows = np.arange(table.num_rows) if self.among is None else self.among.rows_kept(table, row_group)
        count = self.counts[row_group]
        return rows[np.arange(count) * len(rows) // max(count, 1)]


_NUM_SPREAD = 16


def spread_rows(row_counts: Sequence[int], among: RowChoice | None, num_rows: int) -> SpreadRows:
    """Return some rows of a dataset, or among chosen ones whose number is known, without reading all row groups.

    They come from 16 row groups, or from more if these have too few rows. The row groups are at equal distances, and so
    are the rows inside each.

    Args:
        row_counts: number of rows of every row group of the dataset.
        among: chosen rows; None for all.
        num_rows: number of rows; all if there are fewer.
    """
    counts = np.array(row_counts if among is None else among.counts)
    present = np.flatnonzero(counts)
    num_groups = _NUM_SPREAD
    while True:
        places = np.linspace(0, len(present) - 1, min(num_groups, len(present)))
        chosen = present[np.unique(places.astype(np.int64))]
        total = int(counts[chosen].sum())
        if total >= num_rows or len(chosen) == len(present):
            break
        num_groups *= 2
    taken = np.zeros(len(counts), np.int64)
    ends = np.concatenate([[0], np.cumsum(counts[chosen])]) * min(num_rows, total) // total
    taken[chosen] = np.diff(ends)
    return SpreadRows(counts=tuple(taken.tolist()), among=among)


RowChoice: TypeAlias = RowFilter | DrawnRows | RepeatedRows | SpreadRows
"""Rows of a dataset that a feed yields."""


def _values_of(table: pa.Table, names: Iterable[str]) -> Values:
    from sparkdl.data.dataset.arrow import values_or_nulls  # the data floor is imported without Arrow

    return {name: values_or_nulls(table.column(name).combine_chunks()) for name in names}


def as_row_choice(row_filter: Any) -> RowChoice | None:
    """Return the row choice of a ``row_filter``: a :class:`RowFilter`, drawn rows, a Petastorm predicate, or None.

    Raises:
        DataError: if it is something else.
    """
    if row_filter is None or isinstance(row_filter, RowFilter | DrawnRows | RepeatedRows | SpreadRows):
        return row_filter
    if hasattr(row_filter, "do_include"):
        chosen: RowFilter = load_entry("a predicate of Petastorm").filter_of(row_filter)
        return chosen
    raise DataError(
        f"row_filter is a {type(row_filter).__name__}; give a sparkdl.data.RowFilter(columns, function) or a predicate "
        "of Petastorm."
    )


def count_rows(
    num_row_groups: int,
    count: Callable[[Iterable[int]], Iterable[int]],
    communicator: Communicator | None,
) -> tuple[int, ...]:
    """Return how many rows of every row group pass; one rank counts each row group. Collective with a communicator.

    Args:
        num_row_groups: number of row groups.
        count: function that reads row groups and returns the number of passing rows of each, in the order given.
        communicator: communicator of all ranks; with None this rank counts all row groups.

    Raises:
        DataError: if a row group could not be read. A rank that failed raises its own error; the other ranks raise one
            with the class and message of the first rank that failed.
    """
    if communicator is None or communicator.world_size == 1:
        return tuple(count(range(num_row_groups)))
    from sparkdl.collective.byte_exchange import agree, allgather_json

    rank, world_size = communicator.rank, communicator.world_size

    def explain(failures: Mapping[int, Any]) -> DataError:
        first = min(failures)
        kind, text = failures[first]
        known = getattr(errors, kind, None)
        kept = known if isinstance(known, type) and issubclass(known, DataError) else DataError
        return kept(f"The rows that pass the filter could not be counted on rank {first}: {text}")

    counts = [0] * num_row_groups
    counted = agree(
        partial(allgather_json, communicator, name="numbers of rows"),
        lambda: list(count(range(rank, num_row_groups, world_size))),
        explain,
        raises_own=True,
    )
    for start, counts_of_rank in enumerate(counted):
        counts[start::world_size] = counts_of_rank
    return tuple(counts)
