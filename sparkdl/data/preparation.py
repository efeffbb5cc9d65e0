"""What happens to a row group between reading and batching: columns in, other columns out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.data.dataset import Column, missing_column_error
from sparkdl.errors import DataError, ParamError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

_PARTS_OF_SPEC = ("func", "edit_fields", "removed_fields", "selected_fields")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A function of tables, applied by the reader threads.

    Attributes:
        source_names: the columns that it takes, as they lie in the files.
        columns: the columns that it can give.
        unusable: by name why a column that might be asked for cannot be given.
        apply: takes a table of the sources and names of ``columns``, and returns a table of those with as many rows,
            in types that :meth:`sparkdl.data.blocks.BlockLayout.pack` takes.
    """

    source_names: tuple[str, ...]
    columns: tuple[Column, ...]
    unusable: dict[str, str]
    apply: Callable[[pa.Table, Sequence[str]], pa.Table]

    def column(self, name: str) -> Column:
        """Return the column of that name.

        Raises:
            DataError: if there is none, or it cannot be given.
        """
        for column in self.columns:
            if column.name == name:
                return column
        if name in self.unusable:
            raise DataError(f"Column {name!r} cannot be fed: {self.unusable[name]}.")
        raise missing_column_error(name, [column.name for column in self.columns])


def check_transform(transform: Any) -> None:
    """Check that what a feed was given as a transform is a ``TransformSpec`` of Petastorm, or None.

    Raises:
        ParamError: if it is something else.
    """
    if transform is None or all(hasattr(transform, part) for part in _PARTS_OF_SPEC):
        return
    example = (
        "TransformSpec(function)" if callable(transform) else "TransformSpec(function, edit_fields=[...])"
    )
    raise ParamError(
        f"transform is a {type(transform).__name__}; give a petastorm.transform.TransformSpec, such as {example}."
    )
