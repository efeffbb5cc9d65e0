"""Operations of a communicator over MPI that move elements, also of several arrays with one block for each rank.

MPI takes one array. For an operation on several arrays, each rank's blocks of all arrays are packed one after another,
and unpacked afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.buffers import FlatBuffer, flatten, zeros
from sparkdl.collective.mpi.operations import (
    MpiOperations,
    MpiPlan,
    Signature,
    both_forms,
    check_block_counts,
    for_mpi,
    pieces,
    shape_to_agree_on,
    signature_of,
    written_by_mpi,
)
from sparkdl.collective.mpi.reductions import MpiReductions, reduction_of
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Array
    from sparkdl.collective.mpi.operations import Data, Steps

    Blocks = tuple[tuple[int, ...], ...]
    """For each array, the number of elements of each rank's block."""


class MpiMovements(MpiOperations):
    """Implements allgather, broadcast, gather, scatter, alltoall and barrier, which moves nothing; see the contract."""

    def _plan_allgather(
        self,
        array: Array,
        out: Array,
        *,
        counts: Sequence[int] | None = None,
        name: str = "",
    ) -> MpiPlan:
        source, target = flatten(array), flatten(out, reads=False, writes=True)
        signature = replace(
            self._signature("allgather", target, source, counts, name),
            shape=shape_to_agree_on(name, source, rows=True),
        )
        steps = partial(self._allgather, source, target, signature)
        return MpiPlan(signature=signature, steps=steps, buffers=[source, target])

    allgather_async, allgather = both_forms(_plan_allgather)

    def _plan_broadcast(self, array: Array, *, root: int, name: str = "") -> MpiPlan:
        is_root = self.rank == self._check_root(root)
        buffer = flatten(array, reads=is_root, writes=not is_root)
        signature = signature_of("broadcast", name, buffer, root=root)
        steps = partial(self._broadcast, buffer, signature)
        return MpiPlan(signature=signature, steps=steps, buffers=[buffer])

    broadcast_async, broadcast = both_forms(_plan_broadcast)

    def _plan_gather(
        self,
        array: Array,
        out: Array | None,
        *,
        root: int,
        counts: Sequence[int] | None = None,
        name: str = "",
    ) -> MpiPlan:
        source, target = flatten(array), self._flatten_on(root, out, writes=True)
        signature = self._signature("gather", target, source, counts, name, root)
        steps = partial(self._gather, source, target, signature)
        buffers = [source] if target is None else [source, target]
        return MpiPlan(signature=signature, steps=steps, buffers=buffers)

    gather_async, gather = both_forms(_plan_gather)

    def _plan_scatter(
        self,
        array: Array | None,
        out: Array,
        *,
        root: int,
        counts: Sequence[int] | None = None,
        name: str = "",
    ) -> MpiPlan:
        source, target = self._flatten_on(root, array), flatten(out, reads=False, writes=True)
        signature = self._signature("scatter", source, target, counts, name, root)
        steps = partial(self._scatter, source, target, signature)
        buffers = [target] if source is None else [source, target]
        return MpiPlan(signature=signature, steps=steps, buffers=buffers)

    scatter_async, scatter = both_forms(_plan_scatter)

    def _plan_alltoall(
        self,
        array: Array,
        out: Array,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        name: str = "",
    ) -> MpiPlan:
        source, target = flatten(array), flatten(out, reads=False, writes=True)
        if (send_counts is None) != (receive_counts is None):
            raise ParamError("alltoall takes send_counts and receive_counts, or neither")
        sends = self._parts(source, send_counts, "send_counts")
        receives = self._parts(target, receive_counts, "receive_counts")
        if source.dtype != target.dtype:
            raise ParamError(f"alltoall cannot put {source.dtype} into {target.dtype}")
        signature = Signature(kind="alltoall", name=name, dtype=source.dtype, sends=sends, receives=receives)
        steps = partial(self._alltoall, source, target, signature)
        return MpiPlan(signature=signature, steps=steps, buffers=[source, target])

    alltoall_async, alltoall = both_forms(_plan_alltoall)

    def _plan_barrier(self, *, name: str = "") -> MpiPlan:
        return MpiPlan(signature=Signature(kind="barrier", name=name))

    barrier_async, barrier = both_forms(_plan_barrier)

    def _allgather(self, source: FlatBuffer, target: FlatBuffer, signature: Signature) -> Steps:
        blocks = self._sizes(signature)
        with written_by_mpi(target.unread) as elements:
            _copy(source.unread, _block(elements, blocks, self.rank))
            if signature.blocks:
                yield self._comm.Iallgatherv(self._mpi.IN_PLACE, [elements, blocks])
            elif signature.size:
                yield self._comm.Iallgather(self._mpi.IN_PLACE, elements)

    def _broadcast(self, buffer: FlatBuffer, signature: Signature) -> Steps:
        with written_by_mpi(buffer.unread) as elements:
            for piece in pieces(elements):
                yield self._comm.Ibcast(piece, signature.root)

    def _gather(self, source: FlatBuffer, target: FlatBuffer | None, signature: Signature) -> Steps:
        blocks, is_uneven = self._sizes(signature), bool(signature.blocks)
        if not sum(blocks):
            return
        if target is None:
            gather = self._comm.Igatherv if is_uneven else self._comm.Igather
            yield gather(for_mpi(source.unread), None, signature.root)
            return
        with written_by_mpi(target.unread) as elements:
            _copy(source.unread, _block(elements, blocks, self.rank))
            if is_uneven:
                yield self._comm.Igatherv(self._mpi.IN_PLACE, [elements, blocks], signature.root)
            else:
                yield self._comm.Igather(self._mpi.IN_PLACE, elements, signature.root)

    def _scatter(self, source: FlatBuffer | None, target: FlatBuffer, signature: Signature) -> Steps:
        blocks, is_uneven = self._sizes(signature), bool(signature.blocks)
        if not sum(blocks):
            return
        if source is None:
            scatter = self._comm.Iscatterv if is_uneven else self._comm.Iscatter
            with written_by_mpi(target.unread) as block:
                yield scatter(None, block, signature.root)
            return
        elements = for_mpi(source.unread)
        if is_uneven:
            yield self._comm.Iscatterv([elements, blocks], self._mpi.IN_PLACE, signature.root)
        else:
            yield self._comm.Iscatter(elements, self._mpi.IN_PLACE, signature.root)
        _copy(_block(elements, blocks, self.rank), target.unread)

    def _alltoall(self, source: FlatBuffer, target: FlatBuffer, signature: Signature) -> Steps:
        # Ialltoallv also for equal blocks: a rank does not know whether they are equal on all ranks.
        sent = for_mpi(source.unread)
        with written_by_mpi(target.unread) as received:
            yield self._comm.Ialltoallv([sent, list(signature.sends)], [received, list(signature.receives)])

    def _gather_zeros(self, signature: Signature) -> Steps:
        """Take part, with zeros, in an allgather of equal blocks that the other ranks agreed on."""
        target = zeros(signature.size * self.world_size, signature.dtype)
        return self._allgather(zeros(signature.size, signature.dtype), target, signature)

    def _sizes(self, signature: Signature) -> list[int]:
        return list(signature.blocks) or [signature.size] * self.world_size

    def _signature(
        self,
        kind: str,
        whole: FlatBuffer | None,
        block: FlatBuffer,
        counts: Sequence[int] | None,
        name: str,
        root: int = -1,
    ) -> Signature:
        blocks = self._check_blocks(whole, block, counts)
        size = 0 if blocks else block.data.size
        return Signature(kind=kind, name=name, dtype=block.dtype, size=size, blocks=blocks, root=root)

    def _flatten_on(self, root: int, array: Array | None, *, writes: bool = False) -> FlatBuffer | None:
        """Return a view of the array of all blocks on the root; None on other ranks, whose ``array`` is ignored."""
        if self.rank != self._check_root(root):
            return None
        if array is None:
            raise ParamError(f"rank {root} is the root and needs an array for the blocks of all ranks")
        return flatten(array, reads=not writes, writes=writes)

    def _parts(self, buffer: FlatBuffer, counts: Sequence[int] | None, what: str) -> tuple[int, ...]:
        size, world_size = buffer.data.size, self.world_size
        parts = (
            (size // world_size,) * world_size
            if counts is None
            else check_block_counts(counts, world_size, what)
        )
        if sum(parts) != size:
            blocks = f"{world_size} equal blocks" if counts is None else f"blocks of {list(parts)}"
            raise ParamError(f"{size} elements of {buffer.dtype} are not {blocks}; see {what}")
        return parts


def _block(whole: Data, blocks: Sequence[int], rank: int) -> Data:
    start = sum(blocks[:rank])
    return whole[start : start + blocks[rank]]


def _copy(source: Data, target: Data) -> None:
    if source.size and source.ctypes.data != target.ctypes.data:
        target[:] = source


class MpiGroups(MpiMovements, MpiReductions):
    """Implements reduce_scatter_group and allgather_group; see the contract."""

    def _plan_reduce_scatter_group(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        *,
        counts: Sequence[Sequence[int] | None] | None = None,
        name: str = "",
        **reduction: Any,
    ) -> MpiPlan:
        sources, targets = _flatten_pairs(arrays, outs)
        blocks = self._blocks_of_group(sources, targets, counts)
        signature = _signature(
            "reduce_scatter",
            name,
            targets[0].dtype,
            blocks,
            **reduction_of(targets[0].dtype, **reduction),
        )
        steps = partial(self._reduce_scatter_group, sources, targets, signature)
        return MpiPlan(signature=signature, steps=steps, buffers=sources + targets)

    reduce_scatter_group_async, reduce_scatter_group = both_forms(_plan_reduce_scatter_group)

    def _plan_allgather_group(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        *,
        counts: Sequence[Sequence[int] | None] | None = None,
        name: str = "",
    ) -> MpiPlan:
        sources, targets = _flatten_pairs(arrays, outs)
        blocks = self._blocks_of_group(targets, sources, counts)
        signature = _signature("allgather", name, sources[0].dtype, blocks)
        steps = partial(self._allgather_group, sources, targets, signature)
        return MpiPlan(signature=signature, steps=steps, buffers=sources + targets)

    allgather_group_async, allgather_group = both_forms(_plan_allgather_group)

    def _reduce_scatter_group(
        self, sources: Sequence[FlatBuffer], targets: Sequence[FlatBuffer], signature: Signature
    ) -> Steps:
        packed = np.concatenate(list(_by_rank([source.data for source in sources], signature.array_blocks)))
        block = np.empty(sum(target.data.size for target in targets), packed.dtype)
        yield from self._reduce_scatter(
            FlatBuffer(dtype=signature.dtype, data=packed),
            FlatBuffer(dtype=signature.dtype, data=block),
            signature,
        )
        _divide(block, [target.data for target in targets])

    def _allgather_group(
        self, sources: Sequence[FlatBuffer], targets: Sequence[FlatBuffer], signature: Signature
    ) -> Steps:
        block = np.concatenate([source.data for source in sources])
        packed = np.empty(sum(target.data.size for target in targets), block.dtype)
        yield from self._allgather(
            FlatBuffer(dtype=signature.dtype, data=block),
            FlatBuffer(dtype=signature.dtype, data=packed),
            signature,
        )
        _divide(packed, list(_by_rank([target.data for target in targets], signature.array_blocks)))

    def _blocks_of_group(
        self,
        wholes: Sequence[FlatBuffer],
        blocks: Sequence[FlatBuffer],
        counts: Sequence[Sequence[int] | None] | None,
    ) -> Blocks:
        if counts is not None and len(counts) != len(wholes):
            raise ParamError(
                f"counts must have one entry for each of {len(wholes)} arrays, got {len(counts)}"
            )
        counts_of_arrays = [None] * len(wholes) if counts is None else counts
        return tuple(
            self._check_blocks(array, block, of_array) or (block.data.size,) * self.world_size
            for array, block, of_array in zip(wholes, blocks, counts_of_arrays, strict=True)
        )


def _flatten_pairs(
    arrays: Sequence[Array], outs: Sequence[Array]
) -> tuple[list[FlatBuffer], list[FlatBuffer]]:
    sources = [flatten(array) for array in arrays]
    targets = [flatten(out, reads=False, writes=True) for out in outs]
    if not sources or len(sources) != len(targets):
        raise ParamError(
            f"a group has an out for each array, got {len(sources)} arrays and {len(targets)} outs"
        )
    dtypes = sorted({buffer.dtype for buffer in sources + targets})
    if len(dtypes) != 1:
        raise ParamError(f"a group has arrays of one dtype, got {', '.join(dtypes)}")
    return sources, targets


def _signature(kind: str, name: str, dtype: str, array_blocks: Blocks, **reduction: Any) -> Signature:
    sums = tuple(map(sum, zip(*array_blocks, strict=True)))
    are_equal = len(set(sums)) == 1
    return Signature(
        kind=kind,
        name=name,
        dtype=dtype,
        size=sums[0] if are_equal else 0,
        blocks=() if are_equal else sums,
        array_blocks=array_blocks,
        **reduction,
    )


def _by_rank(wholes: Sequence[Data], array_blocks: Blocks) -> Iterator[Data]:
    """Yield the blocks of the first rank in all arrays, then those of the second rank, and so on."""
    ends = [np.cumsum(blocks) for blocks in array_blocks]
    for rank in range(len(array_blocks[0])):
        for array, blocks, end in zip(wholes, array_blocks, ends, strict=True):
            yield array[end[rank] - blocks[rank] : end[rank]]


def _divide(packed: Data, parts: Sequence[Data]) -> None:
    """Copy consecutive elements of ``packed`` to the parts, in order."""
    start = 0
    for part in parts:
        part[:] = packed[start : start + part.size]
        start += part.size
