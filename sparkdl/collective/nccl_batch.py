"""What NCCL is asked to do in one go: operations on arrays in GPU memory. Runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparkdl._native import NcclOperation
from sparkdl.collective.device_array import DeviceArray, device_array
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective.communicator import Array
    from sparkdl.collective.nccl_group import NcclGroup, NcclHandle

_ITEM_BYTES = {"bool": 1, "bfloat16": 2}
_BITS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


class NcclBatch:
    """Operations of an :class:`~sparkdl.collective.nccl_group.NcclGroup` that run at once, as NCCL's group calls.

    Each method adds one and returns the batch; :meth:`run` puts them on a stream::

        group.batch().send(mine, to=1).recv(theirs, source=1).run(stream=stream)

    Arrays are C-contiguous and in memory of the group's GPU (see :mod:`sparkdl.collective.device_array`). All element
    types can be moved. NCCL reduces float16, bfloat16, float32, float64, int8, int32, int64 and their unsigned forms;
    the sum and the product of bools are their "or" and "and". It accumulates as NCCL does, which may be in the
    element type.
    """

    def __init__(self, group: NcclGroup) -> None:
        self._group = group
        self._operations: list[NcclOperation] = []
        self._arrays: list[DeviceArray] = []

    def allreduce(self, array: Array, *, op: str = "sum", prescale: float = 1.0) -> NcclBatch:
        """Reduce ``array`` over all ranks, in place. ``prescale`` multiplies what goes into a sum or an average."""
        taken = self._take(array, writes=True)
        dtype, op, factor = self._reduction(taken, op, prescale)
        return self._add(
            NcclOperation.allreduce(taken.pointer, taken.pointer, taken.count, dtype, op, factor)
        )

    def reduce_scatter(
        self, array: Array, out: Array, *, op: str = "sum", prescale: float = 1.0
    ) -> NcclBatch:
        """Reduce ``array``, one block like ``out`` per rank, over all ranks; rank r gets block r in ``out``."""
        taken, block = self._take(array), self._take(out, writes=True)
        self._check_blocks(taken, block, "array", "out")
        dtype, op, factor = self._reduction(taken, op, prescale)
        return self._add(
            NcclOperation.reduce_scatter(taken.pointer, block.pointer, block.count, dtype, op, factor)
        )

    def reduce(self, array: Array, *, root: int, op: str = "sum", prescale: float = 1.0) -> NcclBatch:
        """Reduce ``array`` over all ranks into rank ``root``'s; the other ranks keep theirs."""
        taken = self._take(array, writes=self._group.rank == root)
        dtype, op, factor = self._reduction(taken, op, prescale)
        return self._add(
            NcclOperation.reduce(taken.pointer, taken.pointer, taken.count, dtype, root, op, factor)
        )

    def allgather(self, array: Array, out: Array) -> NcclBatch:
        """Put the ``array`` of every rank, all of one size, into ``out``, in order of rank."""
        block, taken = self._take(array), self._take(out, writes=True)
        self._check_blocks(taken, block, "out", "array")
        num_bytes = block.count * item_bytes(block.dtype)
        return self._add(NcclOperation.allgather(block.pointer, taken.pointer, num_bytes, "uint8"))

    def broadcast(self, array: Array, *, root: int) -> NcclBatch:
        """Copy rank ``root``'s ``array`` into that of every other rank."""
        taken = self._take(array, writes=self._group.rank != root)
        num_bytes = taken.count * item_bytes(taken.dtype)
        return self._add(NcclOperation.broadcast(taken.pointer, taken.pointer, num_bytes, "uint8", root))

    def send(self, array: Array, *, to: int) -> NcclBatch:
        """Send ``array`` to a rank, which must ``recv`` as many bytes; in order of sending."""
        taken = self._take(array)
        return self._add(
            NcclOperation.send(taken.pointer, taken.count * item_bytes(taken.dtype), "uint8", to)
        )

    def recv(self, array: Array, *, source: int) -> NcclBatch:
        """Receive into ``array`` what a rank sends."""
        taken = self._take(array, writes=True)
        num_bytes = taken.count * item_bytes(taken.dtype)
        return self._add(NcclOperation.recv(taken.pointer, num_bytes, "uint8", source))

    def alltoall(
        self, array: Array, out: Array, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NcclBatch:
        """Send block r of ``array`` to rank r; ``out`` takes the blocks that the ranks send, in order of rank.

        Args:
            array: the blocks for all ranks one after another.
            out: the blocks of all ranks one after another; another memory.
            send_counts: elements of each block of ``array``.
            receive_counts: elements of each block of ``out``.
        """
        sent, received = self._take(array), self._take(out, writes=True)
        size = item_bytes(sent.dtype)
        ends = 0, 0
        for rank, (send, receive) in enumerate(zip(send_counts, receive_counts, strict=True)):
            if send:
                start = sent.elements(ends[0], send, size)
                self._add(NcclOperation.send(start, send * size, "uint8", rank))
            if receive:
                start = received.elements(ends[1], receive, size)
                self._add(NcclOperation.recv(start, receive * size, "uint8", rank))
            ends = ends[0] + send, ends[1] + receive
        return self

    def run(self, *, stream: int, timeout_s: float | None = None) -> NcclHandle:
        """Put the operations on a stream and return, before they are done.

        Args:
            stream: the ``cudaStream_t`` as an integer; 0 is the default stream.
            timeout_s: by when they must be complete on the GPU, or the group fails; its own deadline when None.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        return self._group.run(self._operations, self._arrays, stream=stream, timeout_s=timeout_s)

    def _take(self, array: Array, *, writes: bool = False) -> DeviceArray:
        taken = device_array(array)
        if writes and not taken.is_writable:
            raise ParamError("the array is read-only, but NCCL would write to it")
        if taken.gpu is not None and taken.gpu != self._group.gpu:
            raise ParamError(
                f"the array is on GPU {taken.gpu}, but {self._group.name!r} was opened on GPU {self._group.gpu}"
            )
        self._arrays.append(taken)
        return taken

    def _add(self, operation: NcclOperation) -> NcclBatch:
        self._operations.append(operation)
        return self

    def _check_blocks(self, whole: DeviceArray, block: DeviceArray, whole_name: str, block_name: str) -> None:
        expected = block.count * self._group.world_size
        if whole.count != expected or whole.dtype != block.dtype:
            raise ParamError(
                f"{whole_name} must hold a block like {block_name} for each of {self._group.world_size} ranks:"
                f" {expected} {block.dtype}, got {whole.count} {whole.dtype}"
            )

    def _reduction(self, array: DeviceArray, op: str, prescale: float) -> tuple[str, str, bytes]:
        """What NCCL is to take the elements for, by which operation, and the factor of a sum."""
        if array.dtype == "bool":
            if op not in _BITS or prescale != 1.0:
                raise ParamError(f"bools can be reduced by {sorted(_BITS)} and are not scaled, got {op!r}")
            return "uint8", _BITS[op], b""
        if prescale == 1.0:
            return array.dtype, op, b""
        if op not in ("sum", "avg") or not array.dtype.startswith(("float", "bfloat")):
            raise ParamError(
                f"NCCL scales the sum and the average of floats alone; scale the {array.dtype} yourself before"
                f" reducing by {op!r}"
            )
        factor = prescale / self._group.world_size if op == "avg" else prescale
        return array.dtype, "sum", _as_element(factor, array.dtype)


def item_bytes(dtype: str) -> int:
    """Bytes of one element, by NumPy's name of its type or ``"bfloat16"``."""
    return _ITEM_BYTES.get(dtype) or np.dtype(dtype).itemsize


def _as_element(value: float, dtype: str) -> bytes:
    if dtype != "bfloat16":
        return np.array(value, dtype).tobytes()
    # The upper half of a float32, rounded to nearest even.
    bits = int(np.array(value, np.float32).view(np.uint32))
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to_bytes(2, "little")
