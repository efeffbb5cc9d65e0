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
"""How many rows are looked at."""


def with_object_sizes(
    columns: Sequence[Column], read_rows: Callable[[list[str], int], pa.Table]
) -> tuple[Column, ...]:
    """Return the columns with what an object of each takes on average: the sampled, or the encoded if that is more.

    Args:
        columns: as the footers describe them.
        read_rows: reads the first rows of some columns, so many at most.
    """
    names = [column.name for column in columns if column.dtype == "object"]
    if not names:
        return tuple(columns)
    sample = read_rows(names, NUM_SAMPLED)
    return tuple(
        replace(column, object_bytes=max(column.object_bytes, _mean_bytes(sample, column)))
        if column.dtype == "object"
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
