"""Selection of the rows that a feed yields: a random share of the rows, or a filter on some columns.

A random share, such as a validation share, is drawn by the rows' positions in the files, without reading them. Each
row group contributes its share, so that the drawn rows are spread over the dataset as evenly as its row groups allow.
The draw is a pure function of row counts, the same on the *driver* and on every *rank*.

For a filter each rank counts the matching rows of its part of the row groups before the first epoch, and the ranks
exchange the counts; from then on a filtered dataset is sharded like any other. This part runs on every *rank*.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl import errors
from sparkdl.errors import CommunicatorError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkdl.collective import Communicator


_LOTS = 0x6C6F7473
"""Separates these bits from those that shuffle rows with the same seed."""


def random_bits(*key: int) -> np.random.PCG64:
    """Return a source of random bits that depends on these integers alone; they may be negative."""
    return np.random.PCG64(np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in key]))


@dataclass(frozen=True, kw_only=True)
class DrawnRows:
    """Rows that were drawn by lot, or all the others.

    Attributes:
        seed: any integer.
        num_drawn: how many rows of every row group are drawn.
        row_counts: rows of every row group.
        is_rest: whether the rows are those that were not drawn.
    """

    seed: int
    num_drawn: tuple[int, ...] = field(repr=False)
    row_counts: tuple[int, ...] = field(repr=False)
    is_rest: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """None: no column has to be read."""
        return ()

    @property
    def counts(self) -> tuple[int, ...]:
        """How many rows of every row group are given."""
        if not self.is_rest:
            return self.num_drawn
        return tuple(rows - drawn for rows, drawn in zip(self.row_counts, self.num_drawn, strict=True))

    def rest(self) -> DrawnRows:
        """Return the rows that these leave."""
        return replace(self, is_rest=not self.is_rest)

    def rows_kept(self, table: pa.Table, row_group: int) -> npt.NDArray[np.int64]:
        """Return the numbers, ascending, of the rows that are given of a row group."""
        del table
        # Raw bits, as NumPy promises the same ones in every version.
        lots = random_bits(self.seed, row_group, _LOTS).random_raw(self.row_counts[row_group])
        order = np.argsort(lots, kind="stable")
        first = self.num_drawn[row_group]
        return np.sort(order[first:] if self.is_rest else order[:first])


def draw_rows(row_counts: Sequence[int], share: float, *, seed: int) -> DrawnRows:
    """Draw a share of the rows: of N rows ``share * N``, rounded, and of each row group its part, give or take a row.

    Args:
        row_counts: rows of every row group.
        share: from 0 to 1.
        seed: any integer; the same rows of the same row groups are drawn again.
    """
    ends = itertools.accumulate(row_counts, initial=0)
    drawn_until = [min(end, int(end * share + 0.5)) for end in ends]
    return DrawnRows(
        seed=seed,
        num_drawn=tuple(stop - start for start, stop in itertools.pairwise(drawn_until)),
        row_counts=tuple(row_counts),
    )


Values = Mapping[str, npt.NDArray[Any]]


class RowChoice(Protocol):
    """Which rows of a dataset a feed gives: a :class:`RowFilter`, or :class:`sparkdl.data.dataset.rows.DrawnRows`."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns that have to be read to decide."""

    @property
    def counts(self) -> tuple[int, ...] | None:
        """How many rows of every row group are given; None where that has to be found out by reading."""

    def rows_kept(self, table: pa.Table, row_group: int) -> npt.NDArray[np.int64]:
        """Return the numbers, ascending, of the rows that are given of a row group, which was read as a table."""


@dataclass(frozen=True)
class RowFilter:
    """Rows for which a function says so.

    Attributes:
        columns: names of the columns that the function looks at, or the name of one; the feed need not give them.
        keep: takes the values of a row group by column name, each an array with an item per row (strings and lists
            as objects), and returns a boolean array. It must give the same answer for the same rows every
            time, on every rank.
        counts: how many rows of every row group pass, where that is known; ranks otherwise read to count them.
    """

    columns: Sequence[str]
    keep: Callable[[Values], npt.NDArray[np.bool_]]
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            object.__setattr__(self, "columns", (self.columns,))

    @classmethod
    def from_predicate(cls, predicate: Any) -> RowFilter:
        """Return the filter of a Petastorm predicate (``in_lambda``, ``in_set``, ...), asked for row by row."""
        columns = sorted(predicate.get_fields())

        def keep(values: Values) -> npt.NDArray[np.bool_]:
            rows = zip(*(values[name] for name in columns), strict=True)
            answers = (predicate.do_include(dict(zip(columns, row, strict=True))) for row in rows)
            return np.fromiter((bool(answer) for answer in answers), np.bool_)

        return cls(columns, keep)

    def rows_kept(self, table: pa.Table, row_group: int = 0) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows of a table that pass; its number among the row groups changes nothing.

        Raises:
            DataError: if a column is missing, the function fails, or it returns anything but one boolean per row.
        """
        del row_group
        missing = [name for name in self.columns if name not in table.column_names]
        if missing:
            raise DataError(f"the row filter looks at column {missing[0]!r}, which is not there")
        values = {
            name: table.column(name).combine_chunks().to_numpy(zero_copy_only=False) for name in self.columns
        }
        try:
            mask = np.asarray(self.keep(values))
        except Exception as error:
            raise DataError(f"the row filter failed: {type(error).__name__}: {error}") from error
        if mask.shape != (table.num_rows,) or mask.dtype != np.bool_:
            raise DataError(
                f"the row filter returned {mask.dtype} of shape {mask.shape} for {table.num_rows} rows; it must "
                "return one boolean per row"
            )
        return np.flatnonzero(mask)


def as_row_choice(given: Any) -> RowChoice | None:
    """Return what a feed was given as a filter: a :class:`RowFilter`, drawn rows, a Petastorm predicate, or None.

    Raises:
        DataError: if it is something else.
    """
    if given is None or isinstance(given, RowFilter | DrawnRows):
        return given
    if callable(getattr(given, "get_fields", None)) and callable(getattr(given, "do_include", None)):
        return RowFilter.from_predicate(given)
    raise DataError(
        f"row_filter is a {type(given).__name__}; give a sparkdl.data.RowFilter(columns, function) or a predicate "
        "of Petastorm."
    )


def count_rows(
    num_row_groups: int,
    count: Callable[[Iterable[int]], Iterable[int]],
    communicator: Communicator | None,
) -> tuple[int, ...]:
    """Return how many rows of every row group pass, each counted by one rank. Collective with a communicator.

    Args:
        num_row_groups: how many there are.
        count: reads some of them and counts the rows of each, in the order in which they are given.
        communicator: open over all ranks; without one this rank counts all.

    Raises:
        DataError: if a row group could not be read: on every rank of the class and with the words of the first rank
            that failed to, or of this one if it failed, too.
    """
    if communicator is None or communicator.world_size == 1:
        return tuple(count(range(num_row_groups)))
    # The last places say which ranks failed, so that all of them stop here together.
    counts = np.zeros(num_row_groups + communicator.world_size, np.int64)
    failure: Exception | None = None
    try:
        mine = range(communicator.rank, num_row_groups, communicator.world_size)
        for row_group, number in zip(mine, count(mine), strict=True):
            counts[row_group] = number
    except Exception as error:
        failure = error
        counts[num_row_groups + communicator.rank] = 1
    communicator.allreduce(counts, op="sum")
    if counts[num_row_groups:].any():
        raise _failure_of_all(failure, communicator)
    return tuple(int(number) for number in counts[:num_row_groups])


def _failure_of_all(failure: Exception | None, communicator: Communicator) -> Exception:
    """Return what to raise on this rank once all of them know that some failed; collective."""
    from sparkdl.collective.byte_exchange import allgather_bytes

    said = "" if failure is None else json.dumps([type(failure).__name__, str(failure)])
    try:
        told = allgather_bytes(communicator, said.encode(), name="failures to count")
    except CommunicatorError:
        if failure is None:
            raise
        return failure
    if failure is not None:
        return failure
    rank, (kind, text) = next((rank, json.loads(words)) for rank, words in enumerate(told) if words)
    known = getattr(errors, kind, None)
    kept = known if isinstance(known, type) and issubclass(known, DataError) else DataError
    return kept(f"The rows that pass the filter could not be counted on rank {rank}: {text}")
