"""Columns of numbers and categories as a tabular network takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NUMBERS = "numeric features"
CODES = "categorical features"


@dataclass(frozen=True, kw_only=True)
class TabularInputs:
    """Makes a matrix of numbers and one of category numbers from columns; saved with the model.

    Attributes:
        numeric: names of the columns of numbers, scalars or arrays of fixed length.
        categories: by the name of each categorical column what was found in it, in ascending order. The first has the
            number 1; 0 stands for whatever is none of them.
    """

    numeric: tuple[str, ...] = ()
    categories: Mapping[str, tuple[Any, ...]]

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return ``(rows, numbers)`` as float32 and ``(rows, categorical columns)`` as int64, those that there are."""
        made: dict[str, npt.NDArray[Any]] = {}
        if self.numeric:
            made[NUMBERS] = joined(columns, self.numeric)
        if self.categories:
            codes = [category_codes(columns[name], known) for name, known in self.categories.items()]
            made[CODES] = np.stack(codes, axis=1)
        return made


def joined(columns: Mapping[str, npt.NDArray[Any]], names: tuple[str, ...]) -> npt.NDArray[np.float32]:
    """Return columns of numbers side by side, arrays flattened, as ``(rows, numbers)``."""
    parts = [np.asarray(columns[name], np.float32) for name in names]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def category_codes(values: npt.NDArray[Any], known: tuple[Any, ...]) -> npt.NDArray[np.int64]:
    """Return for each value its place among the known categories, from 1; 0 where it is none of them."""
    if values.dtype == object:
        places = {category: place for place, category in enumerate(known, start=1)}
        return np.fromiter((places.get(value, 0) for value in values), np.int64, len(values))
    categories = np.array(known)
    places_found = np.minimum(np.searchsorted(categories, values), len(categories) - 1)
    return np.where(categories[places_found] == values, places_found + 1, 0).astype(np.int64)
