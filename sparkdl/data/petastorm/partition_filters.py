"""The filters of pyarrow's former ``ParquetDataset``: which partition folders are read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "in": lambda value, wanted: value in wanted,
    "not in": lambda value, wanted: value not in wanted,
}


def accepts(filters: Any, values: Mapping[str, Any]) -> bool:
    """Tell whether a piece passes the filters.

    Args:
        filters: (column, operator, value) triples that all hold, or a list of such lists of which one holds.
        values: the piece's values of the partition columns. A triple on any other column holds, as rows are
            not looked at.

    Raises:
        ValueError: if an operator is unknown or does not suit its value.
    """
    if not filters:
        return True
    alternatives = [filters] if isinstance(filters[0][0], str) else filters
    return any(all(_holds(condition, values) for condition in conditions) for conditions in alternatives)


def _holds(condition: tuple[str, str, Any], values: Mapping[str, Any]) -> bool:
    column, name, wanted = condition
    if column not in values:
        return True
    if name not in _OPERATORS:
        raise ValueError(f"Unknown filter operator {name!r}; there are {', '.join(_OPERATORS)}.")
    is_membership = name.endswith("in")
    is_collection = isinstance(wanted, Collection) and not isinstance(wanted, str)
    if is_membership != is_collection:
        raise ValueError(f"Filter operator {name!r} cannot be used with the value {wanted!r}.")
    if is_membership and not wanted:
        return name == "not in"
    sample = next(iter(wanted)) if is_membership else wanted
    return _OPERATORS[name](type(sample)(values[column]), wanted)
