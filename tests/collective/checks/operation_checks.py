"""Every operation on every dtype, over systematically chosen sizes, reductions, roots and memory. Runs on ranks.

Results are compared with those of :mod:`~tests.collective.checks.exact_results`.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from tests.collective.checks.element_types import DTYPES, FLOATS, SPECIAL, WIDE
from tests.collective.scenes.program_runner import run_program
from tests.collective.scenes.programs import OPS, Operation, Step, Strand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sparkdl.collective import Communicator

SIZES = (0, 1, 7, 1000, 20_011)
NUM_LARGE = 3_000_001
OF_EACH_KIND = ("float32", "bfloat16", "int64", "bool")
"""Dtypes of different sizes and kinds, for operations that treat elements of one size alike."""

SCALES = ((0.5, 1.0), (1.0, 3.0), (2.0, 0.25))


def _reductions(dtype: str, world_size: int) -> Iterator[Operation]:
    ops = OPS if dtype != "bool" else [op for op in OPS if op != "avg"]
    for size in SIZES:
        each = (size,) * world_size
        for op in ops:
            yield Operation("allreduce", dtype, (size,), op=op)
            yield Operation("reduce_scatter", dtype, each, op=op)
        yield Operation("reduce_scatter", dtype, each, in_place=True)
        for root in range(world_size if dtype in OF_EACH_KIND else 0):
            yield Operation("reduce", dtype, (size,), op=ops[1], root=root)
    for prescale, postscale in SCALES if dtype != "bool" else ():
        for op in ("sum", "avg", "max"):
            yield Operation("allreduce", dtype, (1000,), op=op, prescale=prescale, postscale=postscale)
    uneven = _uneven(world_size)
    for in_place in (False, True):
        yield Operation(
            "reduce_scatter", dtype, uneven, op=ops[1], prescale=2.0, uneven=True, in_place=in_place
        )
    yield Operation("allreduce_group", dtype, (3, 0, 1, 4096, 70_001), op=ops[1], postscale=2.0)
    yield Operation("allreduce", dtype, (12,), shape=(3, 4))
    yield Operation("allreduce", dtype, (1,), op="max", shape=())
    if dtype not in FLOATS:  # averages do not overflow, unless the sum exceeds 64 bits
        yield Operation("allreduce", dtype, (1000,), op=ops[1], numbers=WIDE)
        return
    for op in ("min", "max"):  # NaN on any rank is the result; zeros of either sign are equal
        special = {"op": op, "prescale": 2.0, "postscale": 0.5, "numbers": SPECIAL}
        yield Operation("allreduce", dtype, (1000,), **special)
        yield Operation("allreduce_group", dtype, (0, 1000), **special)
        yield Operation("reduce", dtype, (1000,), root=world_size - 1, **special)
        for in_place in (False, True):
            yield Operation("reduce_scatter", dtype, (300,) * world_size, in_place=in_place, **special)


def _movements(dtype: str, world_size: int) -> Iterator[Operation]:
    for size in SIZES:
        each, uneven = (size,) * world_size, _uneven(world_size, size)
        yield Operation("allgather", dtype, each)
        for root in range(world_size):
            yield Operation("broadcast", dtype, (size,), root=root)
        if dtype not in OF_EACH_KIND:
            continue
        yield Operation("allgather", dtype, each, in_place=True)
        for in_place in (False, True):
            yield Operation("allgather", dtype, uneven, uneven=True, in_place=in_place)
        for kind in ("gather", "scatter"):
            for root in range(world_size):
                yield Operation(kind, dtype, each, root=root)
                yield Operation(kind, dtype, uneven, root=root, uneven=True)
        yield Operation("alltoall", dtype, (size,) * world_size**2)
        amounts = tuple(number % 5 * (size // 3) for number in range(world_size**2))  # some are 0
        yield Operation("alltoall", dtype, amounts, uneven=True)


def _in_any_memory(dtype: str, world_size: int) -> Iterator[Operation]:
    """Operations on arrays with misaligned elements or with gaps between them."""
    each = (9,) * world_size
    for memory in ({"misaligned": True}, {"strided": True}):
        for kind in ("allreduce", "broadcast", "reduce"):
            yield Operation(kind, dtype, (9,), root=world_size - 1, **memory)
        for kind in ("reduce_scatter", "allgather", "gather", "scatter"):
            yield Operation(kind, dtype, each, **memory)
        yield Operation("allreduce_group", dtype, (3, 5), **memory)
        yield Operation("alltoall", dtype, (3,) * world_size**2, **memory)
        if world_size > 1:
            yield Operation("messages", dtype, each, **memory)


def _large(dtype: str, world_size: int) -> Iterator[Operation]:
    """Arrays larger than any buffer on the way; of messages, each rank sends its own before it receives."""
    yield Operation("allreduce", dtype, (NUM_LARGE,))
    yield Operation("allreduce_group", dtype, (65_536,) * 20)
    if world_size > 1:
        yield Operation("messages", dtype, (1_000_003,) * world_size)


def _uneven(world_size: int, scale: int = 100) -> tuple[int, ...]:
    """Number of elements of each rank's block, all different, one of them 0."""
    return tuple(rank * scale + rank % 3 for rank in range(world_size))


def _check(draw: Callable[[str, int], Iterator[Operation]], dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        world_size = communicator.world_size
        # Two of three are asynchronous, so that ranks wait for each other less often.
        steps = tuple(
            Step(operation, asynchronous=tuple(range(world_size)) if number % 3 else ())
            for number, operation in enumerate(draw(dtype, world_size))
        )
        is_order_fixed = communicator.transport != "mpi"
        outcome = run_program(communicator, (Strand(steps=steps),), None, is_order_fixed=is_order_fixed)
        own = np.array([zlib.crc32(repr(outcome.shared).encode())])
        all_ranks = np.empty((world_size, 1), np.int64)
        communicator.allgather(own, all_ranks)
        assert not outcome.failures, outcome.failures[0]
        assert (all_ranks == own).all(), "the ranks differ in a result that all of them have"

    return check


OPERATION_CHECKS: dict[str, Callable[[Communicator], None]] = {
    **{f"reductions of {dtype}": _check(_reductions, dtype) for dtype in DTYPES},
    **{f"movements of {dtype}": _check(_movements, dtype) for dtype in DTYPES},
    **{f"{dtype} in any memory": _check(_in_any_memory, dtype) for dtype in DTYPES},
    "large arrays": _check(_large, "float32"),
}
