"""What reductions come to, to the bit, in NumPy.

Ranks of one host are folded from the left in the order of their ranks, in the type that reductions calculate in:
``((r0 op r1) op r2) ...``. What the hosts have is then folded from the left, too, going around the hosts from some
first one: in ``reduce`` it is the one after the root's, in ``reduce_scatter`` the one after that of the block's rank;
in ``allreduce`` it depends on where in the array an element lies.

MPI leaves the order open: of three ranks, any two may come first. With infinities, zeros and numbers near them that
is more than a matter of rounding: a product may be infinite in one order and NaN in another.

Scales: what goes in is rounded to the dtype when it was multiplied, what comes out is multiplied before it is
rounded. Integers are multiplied as float64 and rounded toward zero; what does not fit becomes the nearest that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from tests.collective.element_types import FLOATS, Array, counted_type, decode, encode


def reduced(
    arrays: Sequence[Array | None],
    dtype: str,
    *,
    op: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    host_of_rank: Sequence[int],
    first_host: int | None = None,
    is_order_fixed: bool = True,
    rounds_prescaled: bool = True,
) -> list[Array]:
    """Reduce the arrays of all ranks.

    Args:
        arrays: by rank; None stands for the zeros of a rank that has joined.
        dtype: of the arrays.
        op: how to reduce.
        prescale: factor of what goes in.
        postscale: factor of what comes out.
        host_of_rank: the hosts, as the core sees them.
        first_host: where folding over hosts begins; any when None.
        is_order_fixed: whether it is the one above; any of the ranks otherwise.
        rounds_prescaled: whether what goes in is rounded to the dtype when it was multiplied, as the core does.

    Returns:
        The results that are right; one if ``first_host`` is given and the order is fixed.
    """
    given = next(array for array in arrays if array is not None)
    zeros = np.zeros(given.shape, counted_type(dtype))
    with np.errstate(all="ignore"):
        numbers = [
            zeros if array is None else _prescaled(array, dtype, prescale, rounds=rounds_prescaled)
            for array in arrays
        ]
        if op == "avg" and numbers[0].dtype.kind in "iu":
            numbers = [
                number.astype(np.int64 if number.dtype.kind == "i" else np.uint64) for number in numbers
            ]
        if is_order_fixed:
            totals = _folded_over_hosts(numbers, op, dtype, host_of_rank, first_host)
        else:
            totals = [_folded(order, op, dtype) for order in permutations(numbers)]
        divisor = len(arrays) if op == "avg" else 1
        return [_finished(total, dtype, divisor=divisor, postscale=postscale) for total in totals]


def _prescaled(array: Array, dtype: str, factor: float, *, rounds: bool) -> Array:
    numbers = decode(array, dtype)
    if factor == 1.0:
        return numbers
    scaled = _scaled(numbers, dtype, factor)
    return decode(encode(scaled, dtype), dtype) if rounds or dtype not in FLOATS else scaled


def _folded_over_hosts(
    numbers: Sequence[Array], op: str, dtype: str, host_of_rank: Sequence[int], first_host: int | None
) -> list[Array]:
    num_hosts = max(host_of_rank) + 1
    of_host = [
        _folded([numbers[rank] for rank, host in enumerate(host_of_rank) if host == wanted], op, dtype)
        for wanted in range(num_hosts)
    ]
    firsts = range(num_hosts) if first_host is None else [first_host]
    return [
        _folded([of_host[(first + step) % num_hosts] for step in range(num_hosts)], op, dtype)
        for first in firsts
    ]


def _folded(parts: Sequence[Array], op: str, dtype: str) -> Array:
    total = parts[0]
    for part in parts[1:]:
        if op == "min" or (op == "product" and dtype == "bool"):
            total = np.where((total < part) | np.isnan(total), total, part)
        elif op == "max" or dtype == "bool":
            total = np.where((total > part) | np.isnan(total), total, part)
        else:
            total = total * part if op == "product" else total + part
    return total


def _finished(total: Array, dtype: str, *, divisor: int, postscale: float) -> Array:
    if divisor != 1:
        total = _divided(total, divisor)
    if postscale != 1.0:
        total = _scaled(total, dtype, postscale)
    return encode(total, dtype)


def _divided(total: Array, divisor: int) -> Array:
    if total.dtype.kind == "f":
        return total / total.dtype.type(divisor)
    # NumPy rounds down; here it is toward zero.
    below = (total % divisor != 0) & (total < 0)
    return total // divisor + below.astype(total.dtype)


def _scaled(numbers: Array, dtype: str, factor: float) -> Array:
    if numbers.dtype.kind == "f":
        return numbers * numbers.dtype.type(factor)
    limits = np.iinfo(counted_type(dtype))
    products = np.trunc(numbers.astype(np.float64) * factor)
    # The largest integer need not be a float64; the one after it is.
    fits = (products >= float(limits.min)) & (
        products < float(limits.max) + (1.0 if limits.bits < 64 else 0.0)
    )
    inside = np.where(fits, products, 0.0).astype(counted_type(dtype))
    return np.where(fits, inside, np.where(products < 0, limits.min, limits.max).astype(inside.dtype))
