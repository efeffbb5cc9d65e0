"""What every rank of a contract test computes and compares with NumPy. Runs on ranks.

A world is started once and goes through all checks; each ends as None or as the text of its failure.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.errors import CommunicatorError
from tests.collective.bfloat16_array import Bfloat16Array

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment

OPS = ("sum", "avg", "min", "max", "product")
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8", "bfloat16")
SIZES = (0, 1, 7, 1000, 20_011)
NUM_LARGE = 3_000_001

Array = np.ndarray[Any, Any]


def run_checks(environment: RankEnvironment, host_of_rank: Sequence[int] | None) -> dict[str, str | None]:
    """Go through all checks in the same order on every rank."""
    outcome: dict[str, str | None] = {}
    with environment.open(host_of_rank=host_of_rank) as communicator:
        for name, check in CHECKS.items():
            try:
                check(communicator)
                outcome[name] = None
            except CommunicatorError:
                # The communicator is of no further use, and the other checks tell nothing.
                outcome[name] = traceback.format_exc()
                return outcome
            except Exception:
                outcome[name] = traceback.format_exc()
    return outcome


def _inputs(world_size: int, size: int, dtype: str) -> list[Array]:
    """The array of every rank; products stay exact and uint8 sums do not overflow with a few ranks."""
    generators = [np.random.default_rng([rank, size]) for rank in range(world_size)]
    if dtype == "uint8":
        return [generator.integers(0, 4, size).astype(dtype) for generator in generators]
    if dtype.startswith("int"):
        return [generator.integers(-9, 9, size).astype(dtype) for generator in generators]
    values = [generator.uniform(-2, 2, size).astype(np.float32) for generator in generators]
    if dtype == "bfloat16":
        return [Bfloat16Array(value).values for value in values]
    return [value.astype(dtype) for value in values]


def _reference(arrays: list[Array], op: str) -> Array:
    wide = np.stack(arrays).astype(np.int64 if arrays[0].dtype.kind in "iu" else np.float64)
    if op == "avg" and wide.dtype == np.int64:
        return np.trunc(wide.sum(axis=0) / len(arrays)).astype(np.int64)
    reduced: Array = {"sum": np.sum, "avg": np.mean, "min": np.min, "max": np.max, "product": np.prod}[op](
        wide, axis=0
    )
    return reduced


def _compare(actual: Array, expected: Array, dtype: str, what: str) -> None:
    # One rounding to the result's type, and sums in float32 below it.
    relative = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 0.0)
    np.testing.assert_allclose(
        actual.astype(np.float64), expected, rtol=relative, atol=relative * 4, err_msg=what, strict=False
    )


def _wrap(values: Array, dtype: str) -> tuple[Any, Callable[[], Array]]:
    """What to hand to a collective, and how to read it afterwards."""
    if dtype == "bfloat16":
        wrapped = Bfloat16Array(values)
        return wrapped, lambda: wrapped.values
    copy = values.copy()
    return copy, lambda: copy


def _allreduce(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        for size in SIZES:
            arrays = _inputs(communicator.world_size, size, dtype)
            for op in OPS:
                array, read = _wrap(arrays[communicator.rank], dtype)
                communicator.allreduce(array, op=op)
                _compare(read(), _reference(arrays, op), dtype, f"{op} of {size}")

    return check


def _reduce_scatter(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        world_size, rank = communicator.world_size, communicator.rank
        for size in SIZES:
            arrays = _inputs(world_size, size * world_size, dtype)
            for op in OPS:
                array, read_array = _wrap(arrays[rank], dtype)
                out, read = _wrap(np.zeros(size, arrays[rank].dtype), dtype)
                communicator.reduce_scatter(array, out, op=op)
                expected = _reference(arrays, op)[rank * size : (rank + 1) * size]
                _compare(read(), expected, dtype, f"{op} of {size}")
                np.testing.assert_array_equal(read_array(), arrays[rank], err_msg="the input was changed")

    return check


def _allgather(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        world_size, rank = communicator.world_size, communicator.rank
        for size in SIZES:
            arrays = _inputs(world_size, size, dtype)
            array, _ = _wrap(arrays[rank], dtype)
            out, read = _wrap(np.zeros(size * world_size, arrays[rank].dtype), dtype)
            communicator.allgather(array, out)
            np.testing.assert_array_equal(read(), np.concatenate(arrays), err_msg=f"{size}")

    return check


def _broadcast(dtype: str) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        for size in SIZES:
            arrays = _inputs(communicator.world_size, size, dtype)
            for root in range(communicator.world_size):
                array, read = _wrap(arrays[communicator.rank], dtype)
                communicator.broadcast(array, root=root)
                np.testing.assert_array_equal(read(), arrays[root], err_msg=f"{size} from {root}")

    return check


def _allgather_in_place(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    for size in SIZES:
        arrays = _inputs(world_size, size, "float32")
        out = np.zeros(size * world_size, np.float32)
        own = out[rank * size : (rank + 1) * size]
        own[:] = arrays[rank]
        communicator.allgather(own, out)
        np.testing.assert_array_equal(out, np.concatenate(arrays))


def _large(communicator: Communicator) -> None:
    array = np.arange(NUM_LARGE, dtype=np.float32) % 1024 + communicator.rank
    communicator.allreduce(array)
    world_size = communicator.world_size
    expected = (np.arange(NUM_LARGE) % 1024) * world_size + sum(range(world_size))
    np.testing.assert_array_equal(array, expected.astype(np.float32))


def _same_bits_everywhere(communicator: Communicator) -> None:
    world_size = communicator.world_size
    for size in (5, 1000, 300_000):
        array = _inputs(world_size, size, "float32")[communicator.rank]
        again = array.copy()
        communicator.allreduce(array)
        communicator.allreduce(again)
        np.testing.assert_array_equal(array, again, err_msg="two runs differ")
        everyone = np.empty((world_size, size), np.float32)
        communicator.allgather(array, everyone)
        np.testing.assert_array_equal(everyone, np.broadcast_to(array, everyone.shape))


def _asynchronous(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    arrays = [np.full(size, rank + 1, np.int64) for size in (3, 100_000, 1, 5000)]
    handles = [communicator.allreduce_async(array) for array in arrays]
    gathered = np.empty(world_size, np.int32)
    handles.append(communicator.allgather_async(np.array([rank], np.int32), gathered))
    scattered = np.empty(2)
    handles.append(communicator.reduce_scatter_async(np.ones(2 * world_size), scattered, op="max"))
    sent = np.array([rank], np.int64)
    handles.append(communicator.broadcast_async(sent, root=world_size - 1))
    handles.append(communicator.barrier_async())
    # A synchronous operation comes after everything that is queued.
    total = np.ones(1)
    communicator.allreduce(total)
    assert all(handle.done() for handle in handles)
    for handle in reversed(handles):
        handle.wait(5.0)
    for array in arrays:
        assert (array == sum(range(1, world_size + 1))).all()
    assert gathered.tolist() == list(range(world_size))
    assert scattered.tolist() == [1.0, 1.0]
    assert sent[0] == world_size - 1
    assert total[0] == world_size


def _barrier_holds_back(communicator: Communicator) -> None:
    rendezvous, world_size = communicator.rendezvous, communicator.world_size
    for turn in range(world_size):
        if communicator.rank == turn:
            rendezvous.set(f"before the barrier/{turn}", b"")
        communicator.barrier()
        assert rendezvous.check([f"before the barrier/{turn}"])


def _shapes(communicator: Communicator) -> None:
    matrix = np.ones((3, 4), np.float32)
    communicator.allreduce(matrix)
    assert (matrix == communicator.world_size).all()
    scalar = np.array(2.0)
    communicator.allreduce(scalar, op="max")
    assert scalar == 2.0


def _bad_arguments(communicator: Communicator) -> None:
    """Each is refused on the spot, on every rank alike, and the communicator lives on."""
    world_size = communicator.world_size
    bad: list[Callable[[], object]] = [
        lambda: communicator.allreduce(np.ones((4, 4), np.float32)[:, ::2]),
        lambda: communicator.allreduce(np.ones(3, np.complex128)),
        lambda: communicator.allreduce(np.ones(3), op="median"),
        lambda: communicator.broadcast(np.ones(3), root=world_size),
        lambda: communicator.allgather(np.ones(3), np.ones(3 * world_size + 1)),
        lambda: communicator.reduce_scatter(np.ones(3 * world_size + 1), np.ones(3)),
        lambda: communicator.allgather(np.ones(3), np.ones(3 * world_size, np.float32)),
    ]
    for number, call in enumerate(bad):
        try:
            call()
        except (ValueError, TypeError):
            continue
        raise AssertionError(f"bad call {number} was accepted")
    communicator.barrier()
    assert communicator.failure is None


CHECKS: dict[str, Callable[[Communicator], None]] = {
    **{f"allreduce {dtype}": _allreduce(dtype) for dtype in DTYPES},
    **{f"reduce_scatter {dtype}": _reduce_scatter(dtype) for dtype in DTYPES},
    **{f"allgather {dtype}": _allgather(dtype) for dtype in DTYPES},
    **{f"broadcast {dtype}": _broadcast(dtype) for dtype in DTYPES},
    "allgather in place": _allgather_in_place,
    "large allreduce": _large,
    "same bits everywhere": _same_bits_everywhere,
    "asynchronous": _asynchronous,
    "barrier holds back": _barrier_holds_back,
    "shapes": _shapes,
    "bad arguments": _bad_arguments,
}
