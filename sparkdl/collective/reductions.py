"""Reducing in a type that is wide enough: what to hand another library, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkdl.collective.ordered_bits import from_ordered, to_ordered
from sparkdl.errors import ParamError

OPS = ("sum", "avg", "min", "max", "product")

Data = np.ndarray[Any, Any]

_EXTREMES = ("min", "max")

_FLOATS = ("float16", "bfloat16", "float32", "float64")

_OF_BOOLS = {"sum": "max", "min": "min", "max": "max", "product": "min"}
"""How the numbers 0 and 1 are reduced that stand for bools."""

_SATURATED = ("int8", "uint8", "int16", "uint16")
"""Whose sums end at the limits of their type in Open MPI, where it adds with AVX, and wrap around everywhere else."""


def check_op(op: str, dtype: str) -> str:
    """Return ``op``.

    Raises:
        ParamError: if it is not one of :data:`OPS`, or elements of this dtype cannot be reduced by it.
    """
    if op == "avg" and dtype == "bool":
        raise ParamError("bools have no average; convert them to a number first")
    if op not in OPS:
        raise ParamError(f"op={op!r} is unknown; it may be one of {', '.join(OPS)}")
    return op


def elementary_op(op: str, dtype: str) -> str:
    """What to reduce the arrays of :func:`widen` by: ``"sum"``, ``"min"``, ``"max"`` or ``"product"``."""
    if dtype == "bool":
        return _OF_BOOLS[op]
    # An average is a sum that is divided afterwards.
    return "sum" if op == "avg" else op


def widen(data: Data, dtype: str, op: str, prescale: float = 1.0) -> Data:
    """The array in which to reduce ``data``: itself, or a wider or scaled copy.

    bfloat16 (given as uint16) and float16 are reduced in float32; averages of integers in 64 bits, lest the sum
    of narrower ones overflows; sums of integers of 8 and 16 bits in 32 bits; the least and the greatest of floats
    as integers of their order, among which NaN and the sign of zero count, too (see ``ordered_bits``).
    """
    wide = data
    if dtype == "bfloat16":
        wide = (data.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float16":
        wide = data.astype(np.float32)
    if prescale != 1.0:
        wide = _scale(wide, dtype, prescale)
    if op == "avg" and wide.dtype.kind in "iu":
        wide = wide.astype(np.uint64 if dtype == "uint64" else np.int64)
    elif op == "sum" and dtype in _SATURATED:
        wide = wide.astype(np.int32)
    elif op in _EXTREMES and wide.dtype.kind == "f":
        wide = to_ordered(wide, op)
    return wide


def narrow_into(
    out: Data, reduced: Data, dtype: str, op: str, world_size: int, postscale: float = 1.0
) -> None:
    """Write the reduced array of :func:`widen` to ``out``: divided by ``world_size`` for an average, then scaled."""
    if op == "avg":
        reduced = _divide(reduced, world_size)
    elif op in _EXTREMES and dtype in _FLOATS:
        reduced = from_ordered(reduced)
    elif dtype in _SATURATED:
        # Sums wrap around before they are scaled, as those of wider integers do.
        reduced = reduced.astype(out.dtype, copy=False)
    if postscale != 1.0:
        reduced = _scale(reduced, dtype, postscale, out=reduced)
    if dtype == "bfloat16":
        out[:] = _round_to_bfloat16(reduced)
    elif reduced is not out:
        out[:] = reduced.astype(out.dtype)


def _divide(values: Data, divisor: int) -> Data:
    if values.dtype.kind == "u":
        return values // np.uint64(divisor)
    if values.dtype.kind == "i":
        # Toward zero, where // rounds toward minus infinity. The lowest number has no absolute value.
        quotients = values // divisor
        quotients += (values < 0) & (values % divisor != 0)
        return np.asarray(quotients)
    return np.divide(values, divisor, out=values)


def _scale(values: Data, dtype: str, factor: float, out: Data | None = None) -> Data:
    if values.dtype.kind == "f":
        return np.asarray(np.multiply(values, values.dtype.type(factor), out=out))
    scaled = np.trunc(values.astype(np.float64) * factor)
    if dtype == "bool":
        # 0 and 1 are all that fits.
        return np.asarray(scaled >= 1, values.dtype)
    ends = np.iinfo(dtype)
    # The upper end of 64 bits is no float64: the next one is just beyond.
    within = np.where(scaled < float(ends.max), np.maximum(scaled, float(ends.min)), 0.0)
    limited = np.asarray(within.astype(values.dtype))
    limited[scaled >= float(ends.max)] = ends.max
    return limited


def _round_to_bfloat16(values: Data) -> Data:
    bits = values.view(np.uint32)
    # To nearest, ties to even: add just under half of the last place that stays, and one more if that place
    # is odd.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
