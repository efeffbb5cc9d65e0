"""Nested lists as an array, or an error where they differ in length, in every version of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def rectangular_array(value: Any) -> npt.NDArray[Any]:
    """Return the array of a value or of nested lists of equal lengths.

    Raises:
        ValueError: if lists differ in length, of which NumPy before 1.24 makes an array of lists.
    """
    array = np.asarray(value)
    if array.dtype == object and any(isinstance(each, list | tuple | np.ndarray) for each in array.flat):
        raise ValueError("lists of one level differ in length")
    return array
