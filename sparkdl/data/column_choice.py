"""Which columns a feed gives, as its caller names them: by names, or by names of its own for one or several columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.data.blocks import BlockLayout
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from sparkdl.data.dataset import ParquetDataset
    from sparkdl.data.preparation import Preparation


def names_and_fields(columns: Any, transform: Any) -> tuple[list[str] | None, Any]:
    """The columns that are read, and those that are given as :func:`layout_of` takes them; None for all.

    A folder has to have the former described; a filter's may be of types that only it understands.

    Raises:
        ParamError: if the choice is none, or no choice of names.
    """
    names = _names(columns)
    if transform is None:
        return names, columns
    return (None, columns) if isinstance(columns, Mapping) else (names, transform.selected_fields)


def _names(columns: Any) -> list[str] | None:
    if columns is None:
        return None
    is_collection = isinstance(columns, Collection) and not isinstance(columns, (str, bytes))
    if not is_collection or not len(columns) or not _are_names(columns) or len(set(columns)) != len(columns):
        raise _no_choice(columns)
    if not isinstance(columns, Mapping):
        return list(columns)
    groups = [[field] if isinstance(field, str) else field for field in columns.values()]
    if not all(isinstance(group, Collection) and _are_names(group) for group in groups):
        raise _no_choice(columns)
    return list(dict.fromkeys(name for group in groups for name in group))


def layout_of(dataset: ParquetDataset | Preparation, columns: Any) -> BlockLayout:
    """The layout of the columns that were asked for; all of them when None.

    Raises:
        DataError: if a column does not exist, or cannot be given.
    """
    if columns is None:
        return BlockLayout(dataset.columns)
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


def _are_names(names: Iterable[Any]) -> bool:
    return all(isinstance(name, str) for name in names)


def _no_choice(columns: Any) -> ParamError:
    return ParamError(
        f"A feed needs columns, each named once; got {columns!r}. Give a list of names, or a dict of a name or "
        "a list of names for each name of your own."
    )
