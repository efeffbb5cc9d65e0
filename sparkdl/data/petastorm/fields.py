"""Between the fields of Petastorm's Unischema and the columns of the feed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.data.dataset import Column
from sparkdl.data.petastorm.containment import install

install()
from petastorm.unischema import Unischema, UnischemaField

if TYPE_CHECKING:
    from collections.abc import Iterable

_KINDS = "biuf"


def schema_of(columns: Iterable[Column]) -> Unischema:
    """Return the Unischema of columns as they lie in plain Parquet files."""
    fields = [
        UnischemaField(column.name, np.dtype(column.dtype).type, column.shape, None, False)
        for column in columns
    ]
    return Unischema("sparkdl", fields)


def columns_of(schema: Any, known: Iterable[Column] = ()) -> tuple[tuple[Column, ...], dict[str, str]]:
    """Return the fields that can be fed as columns, and by name why the others cannot.

    Args:
        schema: the Unischema.
        known: columns that are described already.
    """
    columns, unusable = [], {}
    by_name = {column.name: column for column in known}
    for field in schema.fields.values():
        if field.name in by_name:
            columns.append(by_name[field.name])
            continue
        reason = _obstacle(field)
        if reason is None:
            columns.append(_column_of(field))
        else:
            unusable[field.name] = reason
    return tuple(columns), unusable


def _obstacle(field: Any) -> str | None:
    try:
        kind = np.dtype(field.numpy_dtype).kind
    except TypeError:
        kind = "O"
    if kind == "U" and not field.shape:
        return None
    if kind not in _KINDS:
        name = getattr(field.numpy_dtype, "__name__", field.numpy_dtype)
        return f"its type is {name}; have a TransformSpec make numbers of it"
    if None in tuple(field.shape or ())[1:]:
        return (
            f"its shape {tuple(field.shape)} varies in more than the first dimension; have a TransformSpec give it "
            "another with edit_fields"
        )
    return None


def _column_of(field: Any) -> Column:
    dtype, shape = np.dtype(field.numpy_dtype), tuple(field.shape or ())
    if dtype.kind == "U":
        return Column(name=field.name, dtype="object", kind="string")
    if None in shape:
        return Column(
            name=field.name, dtype="object", kind="ragged", lengths=shape, element=("number", dtype.name)
        )
    return Column(name=field.name, dtype=dtype.name, shape=shape)
