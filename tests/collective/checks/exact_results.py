"""The results of reductions, to the bit, in NumPy.

Ranks of one host are folded from the left in the order of their ranks, in the type in which reductions compute:
``((r0 op r1) op r2) ...``. The results of the hosts are then folded from the left, too, going around the hosts from
some first host. In ``reduce`` it is the host after the root's, in ``reduce_scatter`` the host after that of the
block's rank; in ``allreduce`` it depends on the position of an element in the array.

MPI leaves the order open: of three ranks, any two may come first. With infinities, zeros and numbers near them this
affects more than rounding: a product may be infinite in one order and NaN in another.

Scales: inputs are multiplied by the prescale and then rounded to the dtype; the result is multiplied by the postscale
before it is rounded. Integers are multiplied as float64 and rounded toward zero; a value out of range becomes the
nearest value in range.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from tests.collective.checks.element_types import FLOATS, Array, counted_type, decode, encode


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
        arrays: arrays by rank; None stands for the zeros of a rank that has joined.
        dtype: dtype of the arrays.
        op: name of the reduction.
        prescale: factor applied to the inputs.
        postscale: factor applied to the result.
        host_of_rank: host of each rank, as the core sees them.
        first_host: first host of the fold over hosts; any host when None.
        is_order_fixed: whether ranks are folded in the order described above; if not, in any order.
        rounds_prescaled: whether the multiplied inputs are rounded to the dtype, as the core does.

    Returns:
        The correct results; exactly one if ``first_host`` is given and the order is fixed.
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
    # NumPy rounds down; the core rounds toward zero.
    below = (total % divisor != 0) & (total < 0)
    return total // divisor + below.astype(total.dtype)


def _scaled(numbers: Array, dtype: str, factor: float) -> Array:
    if numbers.dtype.kind == "f":
        return numbers * numbers.dtype.type(factor)
    limits = np.iinfo(counted_type(dtype))
    products = np.trunc(numbers.astype(np.float64) * factor)
    # The largest integer may not be representable as float64; the next integer is.
    fits = (products >= float(limits.min)) & (
        products < float(limits.max) + (1.0 if limits.bits < 64 else 0.0)
    )
    inside = np.where(fits, products, 0.0).astype(counted_type(dtype))
    least, most = (inside.dtype.type(limit) for limit in (limits.min, limits.max))
    return np.where(fits, inside, np.where(products < 0, least, most))
