"""Reductions of float32 that travel between hosts in 16 bits, and their expected results in NumPy. Runs on ranks."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.collective.scenes.failure_scenes import Outcome, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment

Array = np.ndarray[Any, np.dtype[np.float32]]

WIRES = ("bfloat16", "float16")
SIZES = (0, 1, 7, 1000, 65_537, 1_000_003)
_UNIT = 16
"""The offsets of a ring's blocks are multiples of this number of elements."""


def rounded(values: Array, wire: str) -> Array:
    """The values that arrive when float32 is sent as ``wire``: rounded to nearest even."""
    if wire == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def blocks_of(size: int, num_hosts: int) -> list[slice]:
    """The block of each host in a ring's reduction of ``size`` elements."""
    stride = math.ceil(math.ceil(size / num_hosts) / _UNIT) * _UNIT
    return [slice(stride * host, stride * (host + 1)) for host in range(num_hosts)]


def reduced(arrays: list[Array], host: int, wire: str, *, average: bool) -> Array:
    """A host's block after a ring reduction: the sum begins at the next host, and each host adds its values."""
    num_hosts = len(arrays)
    total = arrays[(host + 1) % num_hosts].copy()
    for step in range(2, num_hosts + 1):
        total = rounded(total, wire) + arrays[(host + step) % num_hosts]
    return total / np.float32(num_hosts) if average else total


def inputs(size: int, world_size: int) -> list[Array]:
    """The inputs of all ranks, which every rank computes alike."""
    generators = [np.random.default_rng([rank, size]) for rank in range(world_size)]
    return [generator.normal(size=size).astype(np.float32) for generator in generators]


@contextmanager
def each_wire(environment: RankEnvironment, **options: Any) -> Iterator[list[Communicator]]:
    """Open a communicator for each wire."""
    with ExitStack() as stack:
        yield [stack.enter_context(environment.open(name=wire, wire=wire, **options)) for wire in WIRES]


def reductions(environment: RankEnvironment) -> None:
    """Check every reduction over a ring of hosts with one rank each, to the bit."""
    with each_wire(environment, transport="tcp") as communicators:
        for size in SIZES:
            arrays = inputs(size, environment.world_size)
            for wire, communicator in zip(WIRES, communicators, strict=True):
                assert communicator.wire == wire
                for op in ("sum", "avg"):
                    _allreduce(communicator, arrays, op, wire)
                    _reduce_scatter(communicator, arrays, op, wire)
                    _reduce(communicator, arrays, op, wire)


def _allreduce(communicator: Communicator, arrays: list[Array], op: str, wire: str) -> None:
    array = arrays[communicator.rank].copy()
    communicator.allreduce(array, op=op)
    for host, block in enumerate(blocks_of(array.size, communicator.world_size)):
        inside = [other[block] for other in arrays]
        expected = rounded(reduced(inside, host, wire, average=op == "avg"), wire)
        np.testing.assert_array_equal(array[block], expected, err_msg=f"{op} of {array.size}, block {host}")


def _reduce_scatter(communicator: Communicator, arrays: list[Array], op: str, wire: str) -> None:
    """Only values under way are rounded; the sum itself stays in float32 where it was computed."""
    rank, world_size = communicator.rank, communicator.world_size
    out = np.empty(arrays[0].size, np.float32)
    communicator.reduce_scatter(np.tile(arrays[rank], world_size), out, op=op)
    expected = reduced(arrays, rank, wire, average=op == "avg")
    np.testing.assert_array_equal(out, expected, err_msg=f"{op} of {out.size}")


def _reduce(communicator: Communicator, arrays: list[Array], op: str, wire: str) -> None:
    root = communicator.world_size - 1
    array = arrays[communicator.rank].copy()
    communicator.reduce(array, root=root, op=op)
    kept = communicator.rank != root
    expected = arrays[communicator.rank] if kept else reduced(arrays, root, wire, average=op == "avg")
    np.testing.assert_array_equal(array, expected, err_msg=f"{op} of {array.size}")


def what_is_not_rounded(environment: RankEnvironment) -> None:
    """Check all operations except sums and averages of float32."""
    fine = np.float32(1 + 2.0**-20)
    with each_wire(environment, transport="tcp") as communicators:
        for communicator in communicators:
            world_size = communicator.world_size
            for op in ("min", "max"):
                array = np.full(1000, fine, np.float32)
                communicator.allreduce(array, op=op)
                assert (array == fine).all()
            double = np.full(1000, float(fine))
            communicator.allreduce(double)
            assert (double == world_size * float(fine)).all()
            integers = np.full(1000, 1_000_003)
            communicator.allreduce(integers)
            assert (integers == world_size * 1_000_003).all()
            array = np.full(1000, fine if communicator.rank == 0 else 0, np.float32)
            communicator.broadcast(array, root=0)
            assert (array == fine).all()
            gathered = np.empty(1000 * world_size, np.float32)
            communicator.allgather(array, gathered)
            assert (gathered == fine).all()


def extremes(environment: RankEnvironment) -> dict[str, dict[str, float]]:
    """Results for NaN, for infinity, and for values that the wires cannot represent, by wire."""
    seen: dict[str, dict[str, float]] = {wire: {} for wire in WIRES}
    values = {"nan": np.nan, "inf": np.inf, "large": 70_000.0, "subnormal": 2.0**-130}
    with each_wire(environment, transport="tcp") as communicators:
        for wire, communicator in zip(WIRES, communicators, strict=True):
            for name, value in values.items():
                array = np.full(100, value if communicator.rank == 0 else 0, np.float32)
                communicator.allreduce(array)
                seen[wire][name] = float(array[0])
    return seen


def over_hosts(environment: RankEnvironment, host_of_rank: Sequence[int]) -> list[bytes]:
    """Check the hierarchical form: close to the exact sum, with equal bits on all ranks; return those bits."""
    # Each host that a sum passes rounds it once, and the last host rounds the result.
    num_roundings = max(host_of_rank) + 1
    results = []
    with each_wire(environment, transport="native", host_of_rank=host_of_rank) as communicators:
        for size in (1000, 3_000_001):
            arrays = inputs(size, environment.world_size)
            exact, sizes = np.sum(arrays, axis=0, dtype=np.float64), np.abs(arrays).sum(axis=0)
            for wire, communicator in zip(WIRES, communicators, strict=True):
                array = arrays[communicator.rank].copy()
                communicator.allreduce(array)
                growth = (1 + 2.0 ** -(8 if wire == "bfloat16" else 11) + 2.0**-23) ** num_roundings - 1
                smallest = num_roundings * 2.0**-25  # half of the smallest step of float16
                assert (np.abs(array - exact) <= growth * sizes + smallest).all()
                results.append(array.tobytes())
        for communicator in communicators:
            group = [np.full(size, 1.0, np.float32) for size in (3, 100_000, 1)]
            communicator.allreduce_group(group)
            for array in group:
                assert (array == communicator.world_size).all()
    return results


def error_of_opening(environment: RankEnvironment, transport: str, *wires: str) -> Outcome:
    """The error of opening with the wire of each rank."""
    return error_of(lambda: environment.open(transport=transport, wire=wires[environment.rank]))
