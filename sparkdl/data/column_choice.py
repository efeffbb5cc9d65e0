"""Which columns a feed gives, as its caller names them: by names, or by names of its own for one or several columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.data.blocks import BlockLayout
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from sparkdl.data.dataset import ParquetDataset
    from sparkdl.data.preparation import Preparation


def names_to_scan(columns: Any) -> list[str] | None:
    """The columns that a folder has to have described; a filter's may be of types that only it understands."""
    if columns is None:
        return None
    fields = columns.values() if isinstance(columns, Mapping) else columns
    names = [name for field in fields for name in ([field] if isinstance(field, str) else field)]
    return list(dict.fromkeys(names))


def layout_of(dataset: ParquetDataset | Preparation, columns: Any) -> BlockLayout:
    """The layout of the columns that were asked for; all of them when None.

    Raises:
        DataError: if a column does not exist, or the choice is none.
    """
    if columns is None:
        return BlockLayout(dataset.columns)
    if isinstance(columns, str) or not columns or len(set(columns)) != len(columns):
        raise DataError(f"A feed needs columns, each named once; got {columns!r}.")
    if not isinstance(columns, Mapping):
        return BlockLayout([dataset.column(name) for name in columns])
    return BlockLayout(
        {
            name: dataset.column(field)
            if isinstance(field, str)
            else [dataset.column(column) for column in field]
            for name, field in columns.items()
        }
    )
