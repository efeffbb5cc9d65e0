"""Operations that move elements without computing: every element arrives in its place. Runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.collective.checks.references import DTYPES, SIZES, blocks, inputs, uneven_counts, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.collective import Communicator


def _allgather(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        world_size, rank = communicator.world_size, communicator.rank
        for size in SIZES:
            arrays = inputs(world_size, size, dtype)
            array, _ = wrap(arrays[rank], dtype)
            out, read = wrap(np.zeros(size * world_size, arrays[rank].dtype), dtype)
            communicator.allgather(array, out)
            np.testing.assert_array_equal(read(), np.concatenate(arrays), err_msg=f"{size}")

    return check


def _broadcast(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        for size in SIZES:
            arrays = inputs(communicator.world_size, size, dtype)
            for root in range(communicator.world_size):
                array, read = wrap(arrays[communicator.rank], dtype)
                communicator.broadcast(array, root=root)
                np.testing.assert_array_equal(read(), arrays[root], err_msg=f"{size} from {root}")

    return check


def _allgather_in_place(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    for size in SIZES:
        arrays = inputs(world_size, size, "float32")
        out = np.zeros(size * world_size, np.float32)
        own = out[rank * size : (rank + 1) * size]
        own[:] = arrays[rank]
        communicator.allgather(own, out)
        np.testing.assert_array_equal(out, np.concatenate(arrays))


def _allgather_of_uneven_blocks(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    for scale in (1, 10_000):
        counts = uneven_counts(world_size, scale)
        for dtype in ("float32", "bfloat16", "bool"):
            whole = inputs(1, sum(counts), dtype)[0]
            array, _ = wrap(blocks(whole, counts)[rank], dtype)
            out, read = wrap(np.zeros_like(whole), dtype)
            communicator.allgather(array, out, counts=counts)
            np.testing.assert_array_equal(read(), whole)
        in_place = np.zeros(sum(counts), np.int64)
        own = blocks(in_place, counts)[rank]
        own[:] = rank
        communicator.allgather(own, in_place, counts=counts)
        np.testing.assert_array_equal(in_place, np.repeat(np.arange(world_size), counts))


def _gather(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    for size in (0, 5, 30_000):
        for counts in (None, uneven_counts(world_size, size)):
            each = counts or [size] * world_size
            whole = inputs(1, sum(each), "float32")[0]
            for root in range(world_size):
                array = blocks(whole, each)[rank].copy()
                out = np.zeros_like(whole) if rank == root else None
                communicator.gather(array, out, root=root, counts=counts)
                if out is not None:
                    np.testing.assert_array_equal(out, whole)


def _scatter(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    for size in (0, 5, 30_000):
        for counts in (None, uneven_counts(world_size, size)):
            each = counts or [size] * world_size
            whole = inputs(1, sum(each), "float64")[0]
            for root in range(world_size):
                out = np.zeros(each[rank])
                communicator.scatter(whole.copy() if rank == root else None, out, root=root, counts=counts)
                np.testing.assert_array_equal(out, blocks(whole, each)[rank])


def _alltoall(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        world_size, rank = communicator.world_size, communicator.rank
        for size in (0, 1, 40, 20_000):
            arrays = inputs(world_size, size * world_size, dtype)
            array, read_array = wrap(arrays[rank], dtype)
            out, read = wrap(np.zeros_like(arrays[rank]), dtype)
            communicator.alltoall(array, out)
            expected = np.concatenate([each[rank * size : (rank + 1) * size] for each in arrays])
            np.testing.assert_array_equal(read(), expected)
            np.testing.assert_array_equal(read_array(), arrays[rank], err_msg="the input was changed")

    return check


def _alltoall_of_uneven_blocks(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    for scale in (1, 7000):
        # Rank r sends to rank s; some send nothing, and no two amounts are equal.
        counts = [[(r * world_size + s) % 5 * scale for s in range(world_size)] for r in range(world_size)]
        arrays = [inputs(world_size, sum(row), "float32")[r] for r, row in enumerate(counts)]
        received = [row[rank] for row in counts]
        out = np.zeros(sum(received), np.float32)
        communicator.alltoall(arrays[rank].copy(), out, send_counts=counts[rank], receive_counts=received)
        expected = [blocks(array, row)[rank] for array, row in zip(arrays, counts, strict=True)]
        np.testing.assert_array_equal(out, np.concatenate(expected))


def _barrier_holds_back(communicator: Communicator) -> None:
    rendezvous, world_size = communicator.rendezvous, communicator.world_size
    for turn in range(world_size):
        if communicator.rank == turn:
            rendezvous.set(f"before the barrier/{turn}", b"")
        communicator.barrier()
        assert rendezvous.check([f"before the barrier/{turn}"])


MOVEMENT_CHECKS: dict[str, Callable[[Communicator], None]] = {
    **{f"allgather {dtype}": _allgather(dtype) for dtype in DTYPES},
    **{f"broadcast {dtype}": _broadcast(dtype) for dtype in DTYPES},
    "allgather in place": _allgather_in_place,
    "allgather of uneven blocks": _allgather_of_uneven_blocks,
    "gather": _gather,
    "scatter": _scatter,
    **{f"alltoall {dtype}": _alltoall(dtype) for dtype in ("float32", "bfloat16", "uint8")},
    "alltoall of uneven blocks": _alltoall_of_uneven_blocks,
    "barrier holds back": _barrier_holds_back,
}
