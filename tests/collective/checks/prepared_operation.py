"""One operation of a program on one rank: its arrays, its call, and the check of its result. Runs on ranks."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.collective.checks.element_types import (
    FLOATS,
    Array,
    as_argument,
    decode,
    draw_elements,
    same_elements,
    stored_type,
)
from tests.collective.checks.exact_results import reduced
from tests.collective.scenes.programs import GROUPS_OF_BLOCKS, REDUCING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sparkdl.collective import Communicator
    from sparkdl.collective.communicator import Handle
    from tests.collective.scenes.programs import Operation

_UNTOUCHED = 0xA5
"""Initial content of outputs, so that bytes that an operation fails to write are detected."""


_CACHE_LINE = 64


class PreparedOperation:
    """An operation with its arrays, ready to be called.

    Args:
        operation: operation of the program.
        rank: this rank.
        world_size: number of ranks of the communicator.
        room: memory in which the arrays are placed, as uint8, or None; unused if it is too small.

    Attributes:
        arrays: arguments for the communicator, by the names of its parameters; several arrays in a group.
    """

    def __init__(self, operation: Operation, rank: int, world_size: int, room: Array | None = None) -> None:
        self.operation = operation
        self.rank = rank
        self.world_size = world_size
        self.arrays: dict[str, list[Array]] = {}
        self._room = room
        self._is_order_fixed = True
        self._lay_out()
        self._before = {name: [array.copy() for array in arrays] for name, arrays in self.arrays.items()}

    def call(self, communicator: Communicator, *, asynchronous: bool) -> Iterator[Handle]:
        """Call the synchronous or the asynchronous form of the operation; yield the handles to wait for."""
        method = getattr(communicator, self.operation.kind + ("_async" if asynchronous else ""))
        handle: Handle | None = method(**self._arguments())
        if handle is not None:
            yield handle

    def check_untouched(self) -> None:
        """Assert that nothing was written."""
        for name, arrays in self.arrays.items():
            for array, before in zip(arrays, self._before[name], strict=True):
                assert array.tobytes() == before.tobytes(), f"{self.operation}: {name} was written"

    def check(self, host_of_rank: Sequence[int], joined: Sequence[int], *, is_order_fixed: bool) -> int:
        """Assert that the result is right; return a checksum of what is equal on all ranks, or 0 if nothing is.

        Args:
            host_of_rank: host of each rank, as the core sees them.
            joined: ranks that have joined.
            is_order_fixed: whether reductions are exact to the bit, or only up to rounding.
        """
        self._is_order_fixed = is_order_fixed
        expected = self._expected(host_of_rank, joined)
        for name, arrays in self.arrays.items():
            for position, array in enumerate(arrays):
                before = self._before[name][position]
                candidates = expected[position] if name == self._output_name else [before]
                if candidates is None:
                    candidates = [before]
                if name in ("array", "arrays") and self.operation.in_place:
                    continue  # a part of the output, or written by it
                self._compare(name, array, candidates, is_order_fixed=is_order_fixed)
        if not self.operation.kind.startswith("allreduce"):
            return 0
        return zlib.crc32(b"".join(self._same_everywhere(array) for array in self.arrays[self._output_name]))

    def _same_everywhere(self, array: Array) -> bytes:
        """The bits of an array, except those of NaN where the order of a sum or product determines them."""
        dtype, op = self.operation.dtype, self.operation.op
        if self._is_order_fixed or dtype not in FLOATS or op in ("min", "max"):
            return array.tobytes()
        is_nan = np.isnan(decode(array, dtype))
        return np.where(is_nan, array.dtype.type(0), array).tobytes() + is_nan.tobytes()

    def _lay_out(self) -> None:
        operation, rank = self.operation, self.rank
        if operation.kind == "barrier":
            return
        own = [self._place(array) for array in self._inputs(rank)]
        if self._output_name == "arrays" or operation.kind in ("allreduce", "reduce", "broadcast"):
            self.arrays[self._output_name] = own
            return
        if self._output_name == "outs":
            gathers = operation.kind == "allgather_group"
            sizes = [sum(blocks) if gathers else blocks[rank] for blocks in operation.array_sizes]
            pairs = [(array, self._untouched(size)) for array, size in zip(own, sizes, strict=True)]
            if operation.in_place:
                pairs = [
                    self._inside(*pair, blocks)
                    for pair, blocks in zip(pairs, operation.array_sizes, strict=True)
                ]
            self.arrays["arrays"], self.arrays["outs"] = [one for one, _ in pairs], [out for _, out in pairs]
            return
        if operation.kind == "scatter":
            self.arrays["array"] = own if rank == operation.root else []
        else:
            self.arrays["array"] = own
        out_size = self._out_size()
        if out_size is None:
            return
        out = self._untouched(out_size)
        if operation.in_place:
            array, out = self._inside(own[0], out, operation.sizes)
            self.arrays["array"] = [array]
        self.arrays["out"] = [out]

    def _inside(self, array: Array, out: Array, sizes: Sequence[int]) -> tuple[Array, Array]:
        """The two arrays of an allgather or a reduce_scatter: the whole, and this rank's block of it."""
        if self.operation.kind.startswith("allgather"):
            inside = _block(out, sizes, self.rank)
            inside[...] = array
            return inside, out
        return array, _block(array, sizes, self.rank)

    def _untouched(self, size: int) -> Array:
        fill = _UNTOUCHED if self.operation.dtype != "bool" else 0
        dtype = np.dtype(stored_type(self.operation.dtype))
        return self._place(np.full(size * dtype.itemsize, fill, np.uint8).view(dtype))

    @property
    def _output_name(self) -> str:
        if self.operation.kind in GROUPS_OF_BLOCKS:
            return "outs"
        if self.operation.kind == "allreduce_group":
            return "arrays"
        return "array" if self.operation.kind in ("allreduce", "reduce", "broadcast") else "out"

    def _out_size(self) -> int | None:
        operation, rank, sizes = self.operation, self.rank, self.operation.sizes
        if operation.kind == "alltoall":
            return sum(sizes[rank :: self.world_size])
        if operation.kind == "gather" and rank != operation.root:
            return None
        return sum(sizes) if operation.kind in ("allgather", "gather") else sizes[rank]

    def _inputs(self, rank: int) -> list[Array]:
        """The inputs of a rank: its array, its block, or the blocks of all ranks."""
        operation, sizes = self.operation, self.operation.sizes
        if operation.kind == "allreduce_group":
            wanted: Sequence[int] = sizes
        elif operation.kind == "allgather_group":
            wanted = [blocks[rank] for blocks in operation.array_sizes]
        elif operation.kind == "reduce_scatter_group":
            wanted = [sum(blocks) for blocks in operation.array_sizes]
        elif operation.kind in ("allgather", "gather"):
            wanted = [sizes[rank]]
        elif operation.kind in ("reduce_scatter", "scatter"):
            wanted = [sum(sizes)]
        elif operation.kind == "alltoall":
            wanted = [sum(sizes[rank * self.world_size : (rank + 1) * self.world_size])]
        else:
            wanted = sizes
        return [
            draw_elements(
                operation.dtype,
                operation.numbers,
                (size,) if operation.shape is None else operation.shape,
                (operation.seed, rank, position),
            )
            for position, size in enumerate(wanted)
        ]

    def _place(self, array: Array) -> Array:
        """A copy of the array, possibly misaligned, possibly with gaps between its elements."""
        offset = 1 if self.operation.misaligned else 0
        num_bytes = array.nbytes * (2 if self.operation.strided else 1) + offset
        memory = np.empty(num_bytes, np.uint8)
        if self._room is not None and self._room.size >= num_bytes:
            memory, self._room = (
                self._room[:num_bytes],
                self._room[-(-num_bytes // _CACHE_LINE) * _CACHE_LINE :],
            )
        placed = memory[offset:].view(array.dtype)
        if self.operation.strided:
            placed = placed.reshape(*array.shape, 2)[..., 0]
        placed = placed.reshape(array.shape)
        placed[...] = array
        return placed

    def _arguments(self) -> dict[str, Any]:
        operation = self.operation
        arguments: dict[str, Any] = {}
        for name, arrays in self.arrays.items():
            wrapped = [as_argument(array, operation.dtype) for array in arrays]
            arguments[name] = wrapped if name in ("arrays", "outs") else next(iter(wrapped), None)
        if operation.kind == "gather":
            arguments.setdefault("out", None)
        if operation.name:
            arguments["name"] = operation.name
        if operation.kind in ("broadcast", "reduce", "gather", "scatter"):
            arguments["root"] = operation.root
        if operation.kind in REDUCING:
            arguments["op"] = operation.op
            arguments["prescale"], arguments["postscale"] = operation.prescale, operation.postscale
        if operation.uneven and operation.kind == "alltoall":
            first = self.rank * self.world_size
            arguments["send_counts"] = list(operation.sizes[first : first + self.world_size])
            arguments["receive_counts"] = list(operation.sizes[self.rank :: self.world_size])
        elif operation.uneven and operation.kind in GROUPS_OF_BLOCKS:
            arguments["counts"] = [list(blocks) for blocks in operation.array_sizes]
        elif operation.uneven:
            arguments["counts"] = list(operation.sizes)
        return arguments

    def _expected(self, host_of_rank: Sequence[int], joined: Sequence[int]) -> list[list[Array] | None]:
        """The possible values of each output array; None if it stays unchanged."""
        operation, rank = self.operation, self.rank
        ranks = range(self.world_size)
        brought = [None if other in joined else self._inputs(other) for other in ranks]
        if operation.kind in ("allreduce", "allreduce_group"):
            return [
                self._reduced(
                    [None if arrays is None else arrays[position] for arrays in brought], host_of_rank
                )
                for position in range(len(operation.sizes))
            ]
        if operation.kind in GROUPS_OF_BLOCKS:
            return [
                self._expected_of_blocks(
                    [None if arrays is None else arrays[position] for arrays in brought], sizes, host_of_rank
                )
                for position, sizes in enumerate(operation.array_sizes)
            ]
        arrays = [None if arrays is None else arrays[0] for arrays in brought] if operation.sizes else []
        if operation.kind == "reduce":
            return [self._reduced(arrays, host_of_rank, operation.root) if rank == operation.root else None]
        if operation.kind == "broadcast":
            root_array = arrays[operation.root]
            assert root_array is not None
            return [[root_array]]
        if operation.kind == "reduce_scatter":
            return [self._expected_of_blocks(arrays, operation.sizes, host_of_rank)]
        if operation.kind == "scatter":
            whole = arrays[operation.root]
            assert whole is not None
            return [[_block(whole, operation.sizes, rank)]]
        if operation.kind == "alltoall":
            return [[np.concatenate([self._sent(array, other) for other, array in enumerate(arrays)])]]
        return [self._expected_of_blocks(arrays, operation.sizes, host_of_rank)] if arrays else []

    def _expected_of_blocks(
        self, arrays: Sequence[Array | None], sizes: Sequence[int], host_of_rank: Sequence[int]
    ) -> list[Array]:
        """The possible results of a reduce_scatter or an allgather of one array with blocks of the given sizes."""
        if self.operation.kind.startswith("reduce_scatter"):
            blocks = [None if array is None else _block(array, sizes, self.rank) for array in arrays]
            return self._reduced(blocks, host_of_rank, self.rank)
        dtype = stored_type(self.operation.dtype)
        return [
            np.concatenate(
                [
                    np.zeros(size, dtype) if array is None else array
                    for array, size in zip(arrays, sizes, strict=True)
                ]
            )
        ]

    def _sent(self, whole: Array | None, source: int) -> Array:
        """The part that another rank sends to this one in an alltoall."""
        assert whole is not None
        first = source * self.world_size
        sizes = self.operation.sizes[first : first + self.world_size]
        start = sum(sizes[: self.rank])
        return whole[start : start + sizes[self.rank]]

    def _reduced(
        self, arrays: Sequence[Array | None], host_of_rank: Sequence[int], ends_at: int | None = None
    ) -> list[Array]:
        """The possible results of the reduction; ``ends_at`` is the rank on whose host it ends, if that is known."""
        operation = self.operation
        num_hosts = max(host_of_rank) + 1
        return reduced(
            arrays,
            operation.dtype,
            op=operation.op,
            prescale=operation.prescale,
            postscale=operation.postscale,
            host_of_rank=host_of_rank,
            first_host=None if ends_at is None else (host_of_rank[ends_at] + 1) % num_hosts,
            # The core keeps the prescaled values in the dtype; over MPI they stay in float32.
            rounds_prescaled=self._is_order_fixed,
            is_order_fixed=self._is_order_fixed,
        )

    def _compare(self, name: str, array: Array, candidates: Sequence[Array], *, is_order_fixed: bool) -> None:
        dtype = self.operation.dtype
        same = np.zeros(array.shape, bool)
        for candidate in candidates:
            same |= same_elements(array, candidate, dtype)
        if not is_order_fixed and dtype in FLOATS and self.operation.kind in REDUCING:
            same |= self._is_close(array, candidates[0])
        if same.all():
            return
        places = np.flatnonzero(~same)
        got, wanted = decode(array, dtype).reshape(-1), decode(candidates[0], dtype).reshape(-1)
        raise AssertionError(
            f"rank {self.rank} of {self.world_size}: {self.operation}: {name} is wrong at {len(places)} of"
            f" {array.size} elements, {places[:5]}: {got[places[:5]]}, and not {wanted[places[:5]]}"
        )

    def _is_close(self, array: Array, expected: Array) -> Array:
        """Whether elements differ by a few roundings of the terms. Each term is below 2**9 in magnitude."""
        dtype = self.operation.dtype
        rounding = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
        got, wanted = decode(array, dtype).astype(np.float64), decode(expected, dtype).astype(np.float64)
        size = np.maximum(np.abs(wanted), 2.0**9 if self.operation.op in ("sum", "avg") else 0.0)
        # Below the normal numbers a rounding error is as large as the smallest subnormal number.
        least = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}[
            dtype
        ]
        with np.errstate(invalid="ignore"):  # infinities of the same sign
            return np.abs(got - wanted) <= 4 * self.world_size * (rounding * size + least)


def _block(whole: Array, sizes: Sequence[int], rank: int) -> Array:
    """A rank's block of an array with blocks of the given sizes."""
    start = sum(sizes[:rank])
    return whole[start : start + sizes[rank]]
