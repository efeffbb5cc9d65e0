"""Columns whose values stand in the names of folders (``part=7/rows.parquet``), as ``partitionBy`` writes them.

Runs on the *driver*, and on the reader threads of every *rank*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NULL = "__HIVE_DEFAULT_PARTITION__"


def folder_values(path: str) -> dict[str, str | None]:
    """Return by name the values in the folders of a path inside a dataset, as text; None for a null."""
    pairs = (folder.partition("=") for folder in path.split("/")[:-1])
    return {
        unquote(name): None if value == _NULL else unquote(value) for name, equals, value in pairs if equals
    }


def with_folder_values(
    table: pa.Table, values: Mapping[str, str | None], names: Sequence[str] | None
) -> pa.Table:
    """Return a table with those columns of folders among ``names``, or all, that it does not hold itself."""
    for name, value in values.items():
        if name not in table.column_names and (names is None or name in names):
            table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), table.num_rows))
    return table
