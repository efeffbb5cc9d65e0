"""Rows of a dataset that are drawn by lot, as a validation share: by their places in the files, without reading them.

Each row group gives its share, so that the drawn rows are spread over the dataset as evenly as its row groups allow.
Pure functions of row counts; the same on the *driver* and on every *rank*.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkdl.data.shards import random_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


_LOTS = 0x6C6F7473
"""Tells these bits from those that shuffle rows with the same seed."""


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
