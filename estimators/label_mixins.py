"""Param ``labels`` of estimators that tell classes; :mod:`.params` puts it together with the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from pyspark.ml.param import Param, Params

from sparkdl.errors import ParamError
from sparkdl.estimators.param_mixins import P

Labels: TypeAlias = Sequence[Any]
"""What the label column calls the classes: strings, booleans or whole numbers."""


_LISTS = (list, tuple, range, np.ndarray)


def _to_labels(value: Any) -> list[Any]:
    """Convert to a list of labels, or to a list of such lists, with None for a column whose labels are not named."""
    if isinstance(value, _LISTS) and any(one is None or isinstance(one, _LISTS) for one in value):
        return [None if one is None else _to_list(one) for one in value]
    return _to_list(value)


def _to_list(value: Any) -> list[Any]:
    given = list(value) if isinstance(value, _LISTS) else []
    each = [one.item() if isinstance(one, np.generic) else one for one in given]
    labels = [int(one) if isinstance(one, float) and one.is_integer() else one for one in each]
    kinds = {type(label) for label in labels}
    if len(labels) < 2 or len(kinds) > 1 or not kinds <= {str, bool, int} or len(set(labels)) < len(labels):
        raise TypeError(
            f"{value!r} are not two labels or more, each once, that are all strings, booleans or whole numbers"
        )
    return labels


class HasLabels(Params):
    """Param ``labels``."""

    labels: Param[Any] = Param(
        Params._dummy(),
        "labels",
        "labels of the classes, in the order of the model's outputs, or a list of such lists for several label "
        "columns; default: those that the rows hold, in ascending order",
        _to_labels,
    )

    def getLabels(self) -> list[Any] | None:
        """Return the labels of the classes, where they were named."""
        return self.getOrDefault(self.labels) if self.isSet(self.labels) else None

    def setLabels(self: P, value: Labels | Sequence[Labels | None]) -> P:
        """Set the labels of the classes."""
        return self._set(labels=value)


def labels_by_column(given: list[Any] | None, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the labels that the Param names by label column; a column whose labels are not named is left out.

    Raises:
        ParamError: if they are those of more or fewer columns.
    """
    if given is None:
        return {}
    each = given if any(one is None or isinstance(one, list) for one in given) else [given]
    if len(each) != len(names):
        raise ParamError(
            f"Param labels has the labels of {len(each)} columns, and labelCol names {len(names)}: "
            f"{', '.join(names)}. Give a list for each, or None."
        )
    return {name: labels for name, labels in zip(names, each, strict=True) if labels is not None}
