"""Floats as integers of the same order, for libraries whose minimum and maximum of floats leave NaN open.

MPI's depend on which operand comes first: of a number and NaN, and of 0.0 and -0.0, one rank may get the one and
another rank the other. Integers have no such pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Data = np.ndarray[Any, Any]


def to_ordered(values: Data, op: str) -> Data:
    """New signed integers of the width of the floats and in their order, -0.0 below 0.0.

    Args:
        values: float16, float32 or float64.
        op: ``"min"`` or ``"max"``; NaN becomes the integer that wins it against all numbers.
    """
    ordered = _turn(values.view(f"i{values.itemsize}"))
    ends = np.iinfo(ordered.dtype)
    ordered[np.isnan(values)] = ends.min if op == "min" else ends.max
    return ordered


def from_ordered(ordered: Data) -> Data:
    """The floats, in new memory, that :func:`to_ordered` made integers of; every NaN is quiet."""
    return _turn(ordered).view(f"f{ordered.itemsize}")


def _turn(integers: Data) -> Data:
    """Floats are a sign and a magnitude: those below zero are in order when their magnitude is complemented.

    It is its own inverse, and takes the least and the greatest integer to a NaN.
    """
    turned = integers >> (8 * integers.itemsize - 1)
    turned &= np.iinfo(integers.dtype).max
    turned ^= integers
    return turned
