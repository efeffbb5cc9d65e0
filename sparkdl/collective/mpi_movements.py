"""The operations of a communicator over MPI that move elements unread. Runs on ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.collective.claims import Claim, check_counts
from sparkdl.collective.flat_buffers import FlatBuffer, flatten, zeros
from sparkdl.collective.mpi_operations import (
    MpiOperations,
    Plan,
    both_forms,
    for_mpi,
    pieces,
    shape_to_agree_on,
    written_by_mpi,
)
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective.communicator import Array
    from sparkdl.collective.mpi_operations import Data, Steps


class MpiMovements(MpiOperations):
    """allgather, broadcast, gather, scatter, alltoall, and barrier, which moves nothing; see the contract."""

    def _plan_allgather(
        self,
        array: Array,
        out: Array,
        *,
        counts: Sequence[int] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        source, target = flatten(array), flatten(out, reads=False, writes=True)
        claim = replace(
            self._claim("allgather", target, source, counts, name),
            shape=shape_to_agree_on(name, source, rows=True),
        )
        steps = partial(self._allgather, source, target, claim)
        return Plan(claim=claim, steps=steps, buffers=[source, target], timeout_s=timeout_s)

    allgather_async, allgather = both_forms(_plan_allgather)

    def _plan_broadcast(
        self, array: Array, *, root: int, name: str = "", timeout_s: float | None = None
    ) -> Plan:
        is_root = self.rank == self._check_root(root)
        buffer = flatten(array, reads=is_root, writes=not is_root)
        claim = Claim(
            kind="broadcast",
            name=name,
            dtype=buffer.dtype,
            size=buffer.data.size,
            shape=shape_to_agree_on(name, buffer),
            root=root,
        )
        steps = partial(self._broadcast, buffer, claim)
        return Plan(claim=claim, steps=steps, buffers=[buffer], timeout_s=timeout_s)

    broadcast_async, broadcast = both_forms(_plan_broadcast)

    def _plan_gather(
        self,
        array: Array,
        out: Array | None,
        *,
        root: int,
        counts: Sequence[int] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        source, target = flatten(array), self._flatten_on(root, out, writes=True)
        claim = self._claim("gather", target, source, counts, name, root)
        steps = partial(self._gather, source, target, claim)
        buffers = [source] if target is None else [source, target]
        return Plan(claim=claim, steps=steps, buffers=buffers, timeout_s=timeout_s)

    gather_async, gather = both_forms(_plan_gather)

    def _plan_scatter(
        self,
        array: Array | None,
        out: Array,
        *,
        root: int,
        counts: Sequence[int] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        source, target = self._flatten_on(root, array), flatten(out, reads=False, writes=True)
        claim = self._claim("scatter", source, target, counts, name, root)
        steps = partial(self._scatter, source, target, claim)
        buffers = [target] if source is None else [source, target]
        return Plan(claim=claim, steps=steps, buffers=buffers, timeout_s=timeout_s)

    scatter_async, scatter = both_forms(_plan_scatter)

    def _plan_alltoall(
        self,
        array: Array,
        out: Array,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        source, target = flatten(array), flatten(out, reads=False, writes=True)
        if (send_counts is None) != (receive_counts is None):
            raise ParamError("alltoall takes send_counts and receive_counts, or neither")
        sends = self._parts(source, send_counts, "send_counts")
        receives = self._parts(target, receive_counts, "receive_counts")
        if source.dtype != target.dtype:
            raise ParamError(f"alltoall cannot put {source.dtype} into {target.dtype}")
        claim = Claim(kind="alltoall", name=name, dtype=source.dtype, sends=sends, receives=receives)
        steps = partial(self._alltoall, source, target, claim)
        return Plan(claim=claim, steps=steps, buffers=[source, target], timeout_s=timeout_s)

    alltoall_async, alltoall = both_forms(_plan_alltoall)

    def _plan_barrier(self, *, name: str = "", timeout_s: float | None = None) -> Plan:
        return Plan(claim=Claim(kind="barrier", name=name), steps=_nothing_to_move, timeout_s=timeout_s)

    barrier_async, barrier = both_forms(_plan_barrier)

    def _allgather(self, source: FlatBuffer, target: FlatBuffer, claim: Claim) -> Steps:
        blocks = self._sizes(claim)
        with written_by_mpi(target.unread) as whole:
            _copy(source.unread, _block(whole, blocks, self.rank))
            if claim.blocks:
                yield self._comm.Iallgatherv(self._mpi.IN_PLACE, [whole, blocks])
            elif claim.size:
                yield self._comm.Iallgather(self._mpi.IN_PLACE, whole)

    def _broadcast(self, buffer: FlatBuffer, claim: Claim) -> Steps:
        with written_by_mpi(buffer.unread) as whole:
            for piece in pieces(whole):
                yield self._comm.Ibcast(piece, claim.root)

    def _gather(self, source: FlatBuffer, target: FlatBuffer | None, claim: Claim) -> Steps:
        blocks, is_uneven = self._sizes(claim), bool(claim.blocks)
        if not sum(blocks):
            return
        if target is None:
            gather = self._comm.Igatherv if is_uneven else self._comm.Igather
            yield gather(for_mpi(source.unread), None, claim.root)
            return
        with written_by_mpi(target.unread) as whole:
            _copy(source.unread, _block(whole, blocks, self.rank))
            if is_uneven:
                yield self._comm.Igatherv(self._mpi.IN_PLACE, [whole, blocks], claim.root)
            else:
                yield self._comm.Igather(self._mpi.IN_PLACE, whole, claim.root)

    def _scatter(self, source: FlatBuffer | None, target: FlatBuffer, claim: Claim) -> Steps:
        blocks, is_uneven = self._sizes(claim), bool(claim.blocks)
        if not sum(blocks):
            return
        if source is None:
            scatter = self._comm.Iscatterv if is_uneven else self._comm.Iscatter
            with written_by_mpi(target.unread) as block:
                yield scatter(None, block, claim.root)
            return
        whole = for_mpi(source.unread)
        if is_uneven:
            yield self._comm.Iscatterv([whole, blocks], self._mpi.IN_PLACE, claim.root)
        else:
            yield self._comm.Iscatter(whole, self._mpi.IN_PLACE, claim.root)
        _copy(_block(whole, blocks, self.rank), target.unread)

    def _alltoall(self, source: FlatBuffer, target: FlatBuffer, claim: Claim) -> Steps:
        # Also for equal blocks: that they are equal everywhere is more than a rank knows.
        sent = for_mpi(source.unread)
        with written_by_mpi(target.unread) as received:
            yield self._comm.Ialltoallv([sent, list(claim.sends)], [received, list(claim.receives)])

    def _gather_zeros(self, claim: Claim) -> Steps:
        """Take part in an allgather of equal blocks that others agreed on, with zeros."""
        whole = zeros(claim.size * self.world_size, claim.dtype)
        return self._allgather(zeros(claim.size, claim.dtype), whole, claim)

    def _sizes(self, claim: Claim) -> list[int]:
        return list(claim.blocks) or [claim.size] * self.world_size

    def _claim(
        self,
        kind: str,
        whole: FlatBuffer | None,
        block: FlatBuffer,
        counts: Sequence[int] | None,
        name: str,
        root: int = -1,
    ) -> Claim:
        blocks = self._check_blocks(whole, block, counts)
        size = 0 if blocks else block.data.size
        return Claim(kind=kind, name=name, dtype=block.dtype, size=size, blocks=blocks, root=root)

    def _flatten_on(self, root: int, array: Array | None, *, writes: bool = False) -> FlatBuffer | None:
        """The array of all blocks, which counts on the root alone."""
        if self.rank != self._check_root(root):
            return None
        if array is None:
            raise ParamError(f"rank {root} is the root and needs an array for the blocks of all ranks")
        return flatten(array, reads=not writes, writes=writes)

    def _parts(self, buffer: FlatBuffer, counts: Sequence[int] | None, what: str) -> tuple[int, ...]:
        size, world_size = buffer.data.size, self.world_size
        parts = (
            (size // world_size,) * world_size if counts is None else check_counts(counts, world_size, what)
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


def _nothing_to_move() -> Steps:
    yield from ()
