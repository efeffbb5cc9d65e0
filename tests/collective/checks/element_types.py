"""Array elements of every dtype as NumPy can hold them, and the numbers that reductions compute with.

NumPy has no bfloat16: its elements are stored as uint16 bits, and computed as float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tests.collective.checks.bfloat16_array import Bfloat16Array

Array = np.ndarray[Any, Any]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool")

SMALL, WIDE, SPECIAL = "small", "wide", "special"
"""Kinds of numbers: with exact sums and products over a few ranks; of all magnitudes; with infinities, NaN and -0.0."""

_SPECIAL_VALUES = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-40, 1.0], np.float32)


def stored_type(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype that holds elements of ``dtype``."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def counted_type(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype in which reductions of ``dtype`` compute."""
    narrow = {"bfloat16": np.float32, "float16": np.float32, "bool": np.uint8}
    return np.dtype(narrow.get(dtype, dtype))


def decode(stored: Array, dtype: str) -> Array:
    """Convert stored elements to numbers."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(counted_type(dtype))


def encode(numbers: Array, dtype: str) -> Array:
    """Convert numbers to stored elements: floats rounded to nearest even, any number but zero true."""
    if dtype == "bool":
        return numbers != 0
    if dtype != "bfloat16":
        return numbers.astype(dtype)
    bits = numbers.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), (bits >> 16) | 0x40, rounded).astype(np.uint16)


@lru_cache(maxsize=8)
def draw_elements(dtype: str, numbers: str, shape: tuple[int, ...], seed: tuple[int, ...]) -> Array:
    """Draw the elements of one rank's array, which is read-only; the same seed gives the same elements."""
    elements = _draw(np.random.default_rng(seed), dtype, numbers, shape)
    elements.setflags(write=False)
    return elements


def _draw(generator: np.random.Generator, dtype: str, numbers: str, shape: tuple[int, ...]) -> Array:
    if dtype == "bool":
        return generator.integers(0, 2, shape, bool)
    if numbers == SMALL:
        lowest = 0 if dtype.startswith("u") else -4
        return encode(generator.integers(lowest, 5, shape, np.int8).astype(counted_type(dtype)), dtype)
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return generator.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    values = generator.uniform(-2, 2, shape) * np.exp2(generator.integers(-8, 9, shape))
    if numbers == SPECIAL:
        values = np.where(generator.random(shape) < 0.3, generator.choice(_SPECIAL_VALUES, shape), values)
    return encode(values.astype(counted_type(dtype)), dtype)


def at_odd_address(array: Array) -> Array:
    """A copy whose elements are misaligned, unless their size is 1."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    copy = memory[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def as_argument(stored: Array, dtype: str) -> Any:
    """The argument for a communicator that makes it work on the memory of ``stored``."""
    return Bfloat16Array.of_bits(stored) if dtype == "bfloat16" else stored


def same_elements(actual: Array, expected: Array, dtype: str) -> Array:
    """Which elements are equal to the bit; all NaN are equal."""
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    same: Array = actual.view(bits) == expected.view(bits)
    if dtype in FLOATS:
        same |= np.isnan(decode(actual, dtype)) & np.isnan(decode(expected, dtype))
    return same
