"""How much memory values take that NumPy holds as Python objects, from the first rows of a dataset.

Runs where a folder is described, mostly on the *driver*. A footer tells how many bytes values take as they are
encoded, which for a string out of a dictionary is a fraction of one, while Python takes 49 and more for each.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.data.arrow_columns import to_numpy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from sparkdl.data.dataset import Column

NUM_SAMPLED = 256
"""How many rows are looked at, at most."""

SAMPLED_BYTES = 8 << 20
"""About how much memory the rows that are looked at take, at most."""

_LARGE_BYTES = SAMPLED_BYTES // NUM_SAMPLED
"""What an object adds to a value as large as this is not worth a look."""


def with_object_sizes(
    columns: Sequence[Column],
    read_rows: Callable[[list[str], int, int], pa.Table],
    chunk_bytes: Callable[[str], int],
) -> tuple[Column, ...]:
    """Return the columns with what an object of each takes on average: the sampled, or the encoded if that is more.

    Args:
        columns: as the footers describe them.
        read_rows: reads the first rows of some columns: so many at most, and fewer once they take so many bytes.
        chunk_bytes: tells how much of a column lies together in the file. Of large values nothing is read where it is
            much, as a single page or dictionary can be all of it; they count as they are encoded, which is too
            little where they come again and again out of a large dictionary.
    """
    sampled = [
        column.name
        for column in columns
        if column.dtype == "object"
        and not (column.object_bytes >= _LARGE_BYTES and chunk_bytes(column.name) > SAMPLED_BYTES)
    ]
    if not sampled:
        return tuple(columns)
    encoded_bytes = sum(column.object_bytes for column in columns if column.name in sampled)
    num_rows = min(NUM_SAMPLED, max(1, SAMPLED_BYTES // max(1, encoded_bytes)))
    sample = read_rows(sampled, num_rows, SAMPLED_BYTES)
    return tuple(
        replace(column, object_bytes=max(column.object_bytes, _mean_bytes(sample, column)))
        if column.name in sampled
        else column
        for column in columns
    )


def _mean_bytes(sample: pa.Table, column: Column) -> int:
    values = sample.column(column.name).drop_null()
    if not len(values):
        return 0
    objects: npt.NDArray[Any] = to_numpy(values, column)
    return objects.itemsize + sum(map(bytes_of, objects)) // len(objects)


def bytes_of(value: Any) -> int:
    """Return the bytes that an object takes, with those that it holds."""
    if isinstance(value, list):  # of arrays, where inner lists differ in length
        return sys.getsizeof(value) + sum(map(bytes_of, value))
    if not isinstance(value, np.ndarray):
        return sys.getsizeof(value)
    # An array that is a view says nothing of the memory it looks at.
    held = value.nbytes + (sum(map(bytes_of, value.flat)) if value.dtype == object else 0)
    return sys.getsizeof(np.empty(0)) + held
