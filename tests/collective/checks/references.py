"""Inputs of every rank, and their results in NumPy, with which the checks of the contract compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.collective.checks.bfloat16_array import Bfloat16Array

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OPS = ("sum", "min", "max", "product", "avg")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "bool",
)
OPS_OF = {dtype: OPS[:-1] if dtype == "bool" else OPS for dtype in DTYPES}
"""Reductions by dtype; bool has no average."""

SIZES = (0, 1, 7, 1000, 20_011)

Array = np.ndarray[Any, Any]


def inputs(world_size: int, size: int, dtype: str) -> list[Array]:
    """The array of every rank; products stay exact and sums do not overflow with a few ranks."""
    generators = [np.random.default_rng([rank, size]) for rank in range(world_size)]
    if dtype == "bool":
        return [generator.integers(0, 4, size) > 0 for generator in generators]
    if dtype.startswith("uint"):
        return [generator.integers(0, 4, size).astype(dtype) for generator in generators]
    if dtype.startswith("int"):
        bound = 4 if dtype == "int8" else 10
        return [generator.integers(1 - bound, bound, size).astype(dtype) for generator in generators]
    values = [generator.uniform(-2, 2, size).astype(np.float32) for generator in generators]
    if dtype == "bfloat16":
        return [Bfloat16Array(value).values for value in values]
    return [value.astype(dtype) for value in values]


def reference(arrays: Sequence[Array], op: str, prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """The reduction of the arrays of all ranks."""
    if arrays[0].dtype == bool:
        function = np.any if op in ("sum", "max") else np.all
        return np.asarray(function(np.stack(arrays), axis=0))
    is_integer = arrays[0].dtype.kind in "iu"
    wide = np.stack(arrays).astype(np.int64 if is_integer else np.float64)
    if prescale != 1.0:
        wide = _scale(wide, prescale)
    if op == "avg" and is_integer:
        reduced = np.trunc(wide.sum(axis=0) / len(arrays)).astype(np.int64)
    else:
        functions = {"sum": np.sum, "avg": np.mean, "min": np.min, "max": np.max, "product": np.prod}
        reduced = functions[op](wide, axis=0)
    return reduced if postscale == 1.0 else _scale(reduced, postscale)


def compare(actual: Array, expected: Array, dtype: str, what: str) -> None:
    """Assert that they agree up to one rounding to ``dtype``, and up to sums in float32 for the smaller types."""
    relative = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 0.0)
    np.testing.assert_allclose(
        actual.astype(np.float64), expected, rtol=relative, atol=relative * 4, err_msg=what, strict=False
    )


def wrap(values: Array, dtype: str) -> tuple[Any, Callable[[], Array]]:
    """The argument for a collective, and a function that reads it afterwards."""
    if dtype == "bfloat16":
        wrapped = Bfloat16Array(values)
        return wrapped, lambda: wrapped.values
    copy = values.copy()
    return copy, lambda: copy


def blocks(whole: Array, counts: Sequence[int]) -> list[Array]:
    """An array cut into blocks of the given sizes."""
    return np.split(whole, np.cumsum(counts)[:-1])


def uneven_counts(world_size: int, scale: int = 100) -> list[int]:
    """Number of elements of each rank's block, all different, one of them 0."""
    return [rank * scale + rank % 3 for rank in range(world_size)]


def _scale(values: Array, factor: float) -> Array:
    scaled = values * factor
    return np.trunc(scaled).astype(np.int64) if values.dtype == np.int64 else scaled
