"""Results of reductions, compared with NumPy. Runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.collective.checks.references import (
    DTYPES,
    OPS_OF,
    SIZES,
    blocks,
    compare,
    inputs,
    reference,
    uneven_counts,
    wrap,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.collective import Communicator
    from tests.collective.checks.references import Array

NUM_LARGE = 3_000_001
SCALES = ((0.5, 1.0), (1.0, 3.0), (2.0, 0.25))


def _allreduce(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        for size in SIZES:
            arrays = inputs(communicator.world_size, size, dtype)
            for op in OPS_OF[dtype]:
                array, read = wrap(arrays[communicator.rank], dtype)
                communicator.allreduce(array, op=op)
                compare(read(), reference(arrays, op), dtype, f"{op} of {size}")

    return check


def _scaled(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        arrays = inputs(communicator.world_size, 1000, dtype)
        for prescale, postscale in SCALES:
            for op in ("sum", "avg", "max"):
                array, read = wrap(arrays[communicator.rank], dtype)
                communicator.allreduce(array, op=op, prescale=prescale, postscale=postscale)
                expected = reference(arrays, op, prescale, postscale)
                compare(read(), expected, dtype, f"{op} of {prescale} and {postscale}")

    return check


def _reduce_scatter(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        world_size, rank = communicator.world_size, communicator.rank
        for size in SIZES:
            arrays = inputs(world_size, size * world_size, dtype)
            for op in OPS_OF[dtype]:
                array, read_array = wrap(arrays[rank], dtype)
                out, read = wrap(np.zeros(size, arrays[rank].dtype), dtype)
                communicator.reduce_scatter(array, out, op=op)
                expected = reference(arrays, op)[rank * size : (rank + 1) * size]
                compare(read(), expected, dtype, f"{op} of {size}")
                np.testing.assert_array_equal(read_array(), arrays[rank], err_msg="the input was changed")

    return check


def _reduce_scatter_of_uneven_blocks(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    counts = uneven_counts(world_size)
    for dtype in ("float32", "bfloat16", "int16"):
        arrays = inputs(world_size, sum(counts), dtype)
        array, read_array = wrap(arrays[rank], dtype)
        out, read = wrap(np.zeros(counts[rank], arrays[rank].dtype), dtype)
        communicator.reduce_scatter(array, out, counts=counts, op="avg", prescale=2.0)
        compare(read(), blocks(reference(arrays, "avg", 2.0), counts)[rank], dtype, dtype)
        np.testing.assert_array_equal(read_array(), arrays[rank], err_msg="the input was changed")


def _reduce_scatter_in_place(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    for size in SIZES:
        arrays = inputs(world_size, size * world_size, "float32")
        array = arrays[rank].copy()
        out = array[rank * size : (rank + 1) * size]
        communicator.reduce_scatter(array, out)
        expected = reference(arrays, "sum")[rank * size : (rank + 1) * size]
        compare(out, expected, "float32", f"{size}")
    # The first block is empty, and begins at the beginning of the array.
    counts = uneven_counts(world_size)
    arrays = inputs(world_size, sum(counts), "float32")
    array = arrays[rank].copy()
    out = blocks(array, counts)[rank]
    communicator.reduce_scatter(array, out, counts=counts)
    compare(out, blocks(reference(arrays, "sum"), counts)[rank], "float32", "uneven blocks")


def _allreduce_group(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    sizes = (3, 0, 1, 4096, 70_001)
    for dtype in ("float32", "float16", "int64"):
        arrays = [inputs(world_size, size, dtype) for size in sizes]
        wrapped = [wrap(of_ranks[rank], dtype) for of_ranks in arrays]
        communicator.allreduce_group([array for array, _ in wrapped], op="avg", postscale=2.0)
        for of_ranks, (_, read) in zip(arrays, wrapped, strict=True):
            compare(
                read(), reference(of_ranks, "avg", postscale=2.0), dtype, f"{dtype} of {len(of_ranks[0])}"
            )


def _large_group(communicator: Communicator) -> None:
    rank, world_size = communicator.rank, communicator.world_size
    arrays = [np.full(65_536, rank + number, np.float32) for number in range(20)]
    communicator.allreduce_group(arrays)
    for number, array in enumerate(arrays):
        assert (array == number * world_size + sum(range(world_size))).all()


def _reduce(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    for dtype in ("float32", "bfloat16", "int32", "uint64"):
        for size in SIZES:
            arrays = inputs(world_size, size, dtype)
            for root in range(world_size):
                array, read = wrap(arrays[rank], dtype)
                communicator.reduce(array, root=root, op="avg")
                expected = reference(arrays, "avg") if rank == root else arrays[rank]
                compare(read(), expected, dtype, f"{size} to {root}")


def _large(communicator: Communicator) -> None:
    array = np.arange(NUM_LARGE, dtype=np.float32) % 1024 + communicator.rank
    communicator.allreduce(array)
    world_size = communicator.world_size
    expected = (np.arange(NUM_LARGE) % 1024) * world_size + sum(range(world_size))
    np.testing.assert_array_equal(array, expected.astype(np.float32))


def _averages_of_integers_do_not_overflow(communicator: Communicator) -> None:
    for dtype, value in (("uint8", 250), ("int8", -120), ("int16", 32_000), ("uint32", 4_000_000_000)):
        array = np.full(5, value, dtype)
        communicator.allreduce(array, op="avg")
        assert array.tolist() == [value] * 5


def _averages_of_64_bits_are_of_the_sum_that_wrapped_around(communicator: Communicator) -> None:
    world_size = communicator.world_size
    for dtype, value in (("uint64", 2**63), ("int64", 2**62)):
        array = np.full(5, value, dtype)
        communicator.allreduce(array, op="avg")
        total = value * world_size % 2**64
        if dtype == "int64" and total >= 2**63:
            total -= 2**64
        assert array.tolist() == [abs(total) // world_size * (-1 if total < 0 else 1)] * 5


def _same_bits_everywhere(communicator: Communicator) -> None:
    world_size = communicator.world_size
    for size in (5, 1000, 300_000):
        array = inputs(world_size, size, "float32")[communicator.rank]
        again = array.copy()
        communicator.allreduce(array)
        communicator.allreduce(again)
        np.testing.assert_array_equal(array, again, err_msg="two runs differ")
        all_ranks = np.empty((world_size, size), np.float32)
        communicator.allgather(array, all_ranks)
        np.testing.assert_array_equal(all_ranks, np.broadcast_to(array, all_ranks.shape))


def _shapes(communicator: Communicator) -> None:
    matrix = np.ones((3, 4), np.float32)
    communicator.allreduce(matrix)
    assert (matrix == communicator.world_size).all()
    scalar = np.array(2.0)
    communicator.allreduce(scalar, op="max")
    assert scalar == 2.0


def _extremes(dtype: str) -> Callable[[Communicator], None]:
    """On whichever rank NaN is, it is both the minimum and the maximum; every rank gets the same bits."""

    def check(communicator: Communicator) -> None:
        world_size, rank = communicator.world_size, communicator.rank
        block = [
            np.nan if rank == 0 else 1.0,
            -np.nan if rank == world_size - 1 else np.inf,
            -0.0 if rank == 0 else 0.0,
            -1.0 - rank,
        ]
        own = np.tile(np.array(block, np.float32 if dtype == "bfloat16" else dtype), world_size)
        for op in ("min", "max"):
            expected = np.array([np.nan, np.nan, 0.0, -1.0 if op == "max" else -world_size])
            array, read = wrap(own, dtype)
            communicator.allreduce(array, op=op, prescale=2.0, postscale=0.5)
            np.testing.assert_array_equal(read(), np.tile(expected, world_size), err_msg=op)
            _compare_bits(communicator, read(), op)
            group = [wrap(own[:0], dtype), wrap(own, dtype)]
            communicator.allreduce_group([member for member, _ in group], op=op)
            np.testing.assert_array_equal(group[1][1](), np.tile(expected, world_size), err_msg=op)
            _compare_bits(communicator, group[1][1](), op)
            array, read = wrap(own, dtype)
            communicator.reduce(array, root=world_size - 1, op=op)
            wanted = np.tile(expected, world_size) if rank == world_size - 1 else own
            np.testing.assert_array_equal(read(), wanted, err_msg=op)
            array, read_array = wrap(own, dtype)
            out, read = wrap(own[:4], dtype)
            communicator.reduce_scatter(array, out, op=op)
            np.testing.assert_array_equal(read(), expected, err_msg=op)
            np.testing.assert_array_equal(read_array(), own, err_msg="the input was changed")
        array = own.copy()
        if dtype != "bfloat16":
            out = array[rank * 4 :][:4]
            communicator.reduce_scatter(array, out, op="max")
            np.testing.assert_array_equal(out, [np.nan, np.nan, 0.0, -1.0])

    return check


def _compare_bits(communicator: Communicator, array: Array, what: str) -> None:
    own = array.view(np.uint8)
    all_ranks = np.empty((communicator.world_size, own.size), np.uint8)
    communicator.allgather(own, all_ranks)
    np.testing.assert_array_equal(all_ranks, np.broadcast_to(own, all_ranks.shape), err_msg=what)


REDUCTION_CHECKS: dict[str, Callable[[Communicator], None]] = {
    **{f"allreduce {dtype}": _allreduce(dtype) for dtype in DTYPES},
    **{f"scaled {dtype}": _scaled(dtype) for dtype in DTYPES if dtype != "bool"},
    **{f"reduce_scatter {dtype}": _reduce_scatter(dtype) for dtype in DTYPES},
    "reduce_scatter of uneven blocks": _reduce_scatter_of_uneven_blocks,
    "reduce_scatter in place": _reduce_scatter_in_place,
    "allreduce_group": _allreduce_group,
    "large group": _large_group,
    "reduce": _reduce,
    **{f"extremes {dtype}": _extremes(dtype) for dtype in ("float64", "float32", "float16", "bfloat16")},
    "large allreduce": _large,
    "averages of integers do not overflow": _averages_of_integers_do_not_overflow,
    "averages of 64 bits": _averages_of_64_bits_are_of_the_sum_that_wrapped_around,
    "same bits everywhere": _same_bits_everywhere,
    "shapes": _shapes,
}
