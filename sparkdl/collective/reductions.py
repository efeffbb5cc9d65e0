"""Reducing in a type that is wide enough: what to hand another library, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np

OPS = ("sum", "avg", "min", "max", "product")

_INTEGERS = ("int32", "int64", "uint8")


def widen(data: np.ndarray[Any, Any], dtype: str, op: str) -> np.ndarray[Any, Any]:
    """The array in which to reduce ``data``: itself, or a wider copy.

    bfloat16 (given as uint16) and float16 are reduced in float32; averages of integers in int64, lest their
    sum overflows.
    """
    if dtype == "bfloat16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return data.astype(np.float32)
    if op == "avg" and dtype in _INTEGERS:
        return data.astype(np.int64)
    return data


def narrow_into(
    out: np.ndarray[Any, Any], reduced: np.ndarray[Any, Any], dtype: str, op: str, world_size: int
) -> None:
    """Write the reduced array of :func:`widen` to ``out``, divided by ``world_size`` for an average."""
    if op == "avg" and dtype in _INTEGERS:
        # Toward zero, where // would round toward minus infinity.
        reduced = np.sign(reduced) * (np.abs(reduced) // world_size)
    elif op == "avg":
        np.divide(reduced, world_size, out=reduced)
    if dtype == "bfloat16":
        out[:] = _round_to_bfloat16(reduced)
    elif reduced is not out:
        out[:] = reduced.astype(out.dtype)


def _round_to_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    bits = values.view(np.uint32)
    # To nearest, ties to even: add just under half of the last place that stays, and one more if that place
    # is odd.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
