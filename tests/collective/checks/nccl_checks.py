"""Each operation of an NCCL group compared with NumPy, on the stand-ins for NCCL and CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sparkdl.collective.nccl.group import NcclGroup
from sparkdl.collective.nccl.opening import open_nccl_group
from tests.checks import outcome_of
from tests.nccl_stand_in.gpu_memory import GpuArray
from tests.run_ranks import RankEnvironment

REDUCIBLE = ("float32", "float64", "float16", "int8", "uint8", "int32", "uint32", "int64", "uint64")
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "product": np.prod,
    "min": np.min,
    "max": np.max,
    "avg": np.mean,
}


def values_of(rank: int, dtype: Any) -> np.ndarray:
    """Small numbers whose sums, products and averages over up to three ranks are exact in every dtype."""
    return (np.arange(6) % 3 * 6 + 6 * (rank + 1)).astype(dtype)


def every_operation(environment: RankEnvironment) -> dict[str, str | None]:
    """Compare each operation with NumPy; return for each a description of the failure, or None."""
    rank, size = environment.rank, environment.world_size
    with environment.open() as communicator, open_nccl_group(communicator, gpu=rank) as group:
        return {name: outcome_of(partial(check, group, rank, size), rank) for name, check in CHECKS.items()}


def run(batch: Any) -> None:
    batch.run(stream=0).wait(10.0)


def check_allreduce(group: NcclGroup, rank: int, size: int) -> None:
    for dtype in REDUCIBLE:
        all_ranks = np.stack([values_of(other, dtype) for other in range(size)])
        for op, reference in REDUCTIONS.items():
            if op == "product" and dtype in ("int8", "uint8", "float16"):
                continue  # the dtype is too small
            array = GpuArray(values_of(rank, dtype), rank)
            run(group.batch().allreduce(array, op=op))
            np.testing.assert_array_equal(
                array.host, reference(all_ranks, axis=0).astype(dtype), f"{dtype} {op}"
            )


def check_bools(group: NcclGroup, rank: int, size: int) -> None:
    all_ranks = np.array([[other == 0, True, False] for other in range(size)])
    for op, reference in {"sum": np.any, "max": np.any, "product": np.all, "min": np.all}.items():
        array = GpuArray(all_ranks[rank], rank)
        run(group.batch().allreduce(array, op=op))
        np.testing.assert_array_equal(array.host, reference(all_ranks, axis=0))


def check_prescale(group: NcclGroup, rank: int, size: int) -> None:
    for dtype in ("float32", "float64", "float16"):
        total = sum(values_of(other, dtype).astype(float) for other in range(size))
        for op, divisor in {"sum": 1, "avg": size}.items():
            array = GpuArray(values_of(rank, dtype), rank)
            run(group.batch().allreduce(array, op=op, prescale=0.5 * divisor))
            np.testing.assert_array_equal(array.host, 0.5 * total)


def check_reduce_scatter(group: NcclGroup, rank: int, size: int) -> None:
    array = GpuArray(np.arange(4 * size) * (rank + 1), rank, np.int32)
    out = GpuArray(np.zeros(4), rank, np.int32)
    run(group.batch().reduce_scatter(array, out))
    expected = np.arange(4 * rank, 4 * rank + 4) * (size * (size + 1) // 2)
    np.testing.assert_array_equal(out.host, expected)


def check_allgather(group: NcclGroup, rank: int, size: int) -> None:
    out = GpuArray(np.zeros((size, 3)), rank, np.int16)
    run(group.batch().allgather(GpuArray(np.arange(3) + 10 * rank, rank, np.int16), out))
    np.testing.assert_array_equal(out.host, np.arange(3) + 10 * np.arange(size)[:, None])


def check_broadcast(group: NcclGroup, rank: int, size: int) -> None:
    for root in range(size):
        array = GpuArray(np.arange(5) + 100 * rank, rank, np.complex64)
        run(group.batch().broadcast(array, root=root))
        np.testing.assert_array_equal(array.host, np.arange(5) + 100 * root)


def check_reduce(group: NcclGroup, rank: int, size: int) -> None:
    for root in range(size):
        array = GpuArray(np.arange(5) + rank, rank, np.float64)
        run(group.batch().reduce(array, root=root, op="max"))
        np.testing.assert_array_equal(array.host, np.arange(5) + (size - 1 if rank == root else rank))


def check_ring(group: NcclGroup, rank: int, size: int) -> None:
    received = GpuArray(np.zeros(4), rank, np.float32)
    batch = group.batch().send(GpuArray(np.full(4, rank), rank, np.float32), to=(rank + 1) % size)
    run(batch.recv(received, source=(rank - 1) % size))
    np.testing.assert_array_equal(received.host, np.full(4, (rank - 1) % size))


def check_many_at_once(group: NcclGroup, rank: int, size: int) -> None:
    arrays = [GpuArray(np.full(3, number + rank), rank, np.float32) for number in range(20)]
    batch = group.batch()
    for array in arrays:
        batch.allreduce(array)
    run(batch)
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(array.host, number * size + sum(range(size)))


def check_empty(group: NcclGroup, rank: int, size: int) -> None:
    run(group.batch().allreduce(GpuArray([], rank, np.float32)))
    run(group.batch())


CHECKS: dict[str, Callable[[NcclGroup, int, int], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
