"""The reductions of a communicator over MPI. Runs on ranks.

What MPI cannot add up, or not exactly enough, is reduced in a wider copy; see ``reductions``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.claims import Claim
from sparkdl.collective.flat_buffers import FlatBuffer, flatten, zeros
from sparkdl.collective.mpi_operations import (
    MpiOperations,
    Plan,
    both_forms,
    for_mpi,
    pieces,
    shape_to_agree_on,
)
from sparkdl.collective.reductions import check_op, elementary_op, narrow_into, widen
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from sparkdl.collective.communicator import Array
    from sparkdl.collective.mpi_operations import Data, Steps


class MpiReductions(MpiOperations):
    """allreduce, allreduce_group, reduce_scatter and reduce; see the contract."""

    def _plan_allreduce(
        self,
        array: Array,
        *,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        buffer = flatten(array, writes=True)
        shape = shape_to_agree_on(name, buffer)
        claim = _claim(
            "allreduce", buffer.dtype, buffer.data.size, op, prescale, postscale, name, shape=shape
        )
        steps = partial(self._allreduce, [buffer], claim)
        return Plan(claim=claim, steps=steps, buffers=[buffer], timeout_s=timeout_s)

    allreduce_async, allreduce = both_forms(_plan_allreduce)

    def _plan_allreduce_group(
        self,
        arrays: Sequence[Array],
        *,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        buffers = [flatten(array, writes=True) for array in arrays]
        dtypes = sorted({buffer.dtype for buffer in buffers})
        if len(dtypes) != 1:
            raise ParamError(f"a group has arrays of one dtype, got {', '.join(dtypes) or 'no arrays'}")
        sizes = tuple(buffer.data.size for buffer in buffers)
        claim = _claim("allreduce", dtypes[0], sum(sizes), op, prescale, postscale, name, arrays=sizes)
        steps = partial(self._allreduce, buffers, claim)
        return Plan(claim=claim, steps=steps, buffers=buffers, timeout_s=timeout_s)

    allreduce_group_async, allreduce_group = both_forms(_plan_allreduce_group)

    def _plan_reduce_scatter(
        self,
        array: Array,
        out: Array,
        *,
        counts: Sequence[int] | None = None,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        source, target = flatten(array), flatten(out, reads=False, writes=True)
        blocks = self._check_blocks(source, target, counts)
        size = 0 if blocks else target.data.size
        shape = shape_to_agree_on(name, source, rows=True)
        claim = _claim(
            "reduce_scatter", source.dtype, size, op, prescale, postscale, name, shape=shape, blocks=blocks
        )
        steps = partial(self._reduce_scatter, source, target, claim)
        return Plan(claim=claim, steps=steps, buffers=[source, target], timeout_s=timeout_s)

    reduce_scatter_async, reduce_scatter = both_forms(_plan_reduce_scatter)

    def _plan_reduce(
        self,
        array: Array,
        *,
        root: int,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        buffer = flatten(array, writes=True)
        size, root = buffer.data.size, self._check_root(root)
        shape = shape_to_agree_on(name, buffer)
        claim = _claim("reduce", buffer.dtype, size, op, prescale, postscale, name, shape=shape, root=root)
        steps = partial(self._reduce, buffer, claim)
        return Plan(claim=claim, steps=steps, buffers=[buffer], timeout_s=timeout_s)

    reduce_async, reduce = both_forms(_plan_reduce)

    def _allreduce(self, buffers: Sequence[FlatBuffer], claim: Claim) -> Steps:
        if len(buffers) == 1:
            # Piece by piece, as a wider copy of the whole may be four times as large as it.
            for data in pieces(buffers[0].data):
                reduced = for_mpi(_widen(data, claim))
                yield self._comm.Iallreduce(self._mpi.IN_PLACE, reduced, self._mpi_op(claim))
                self._narrow(data, reduced, claim)
            return
        working = np.concatenate([_widen(buffer.data, claim) for buffer in buffers])
        for piece in pieces(working):
            yield self._comm.Iallreduce(self._mpi.IN_PLACE, piece, self._mpi_op(claim))
        start = 0
        for buffer in buffers:
            end = start + buffer.data.size
            self._narrow(buffer.data, working[start:end], claim)
            start = end

    def _reduce_scatter(self, source: FlatBuffer, target: FlatBuffer, claim: Claim) -> Steps:
        working, reduced = for_mpi(_widen(source.data, claim)), for_mpi(target.data)
        if working.dtype != reduced.dtype or np.may_share_memory(working, reduced):
            reduced = np.empty(reduced.size, working.dtype)
        if claim.blocks:
            yield self._comm.Ireduce_scatter(working, reduced, list(claim.blocks), self._mpi_op(claim))
        elif claim.size:
            yield self._comm.Ireduce_scatter_block(working, reduced, self._mpi_op(claim))
        self._narrow(target.data, reduced, claim)

    def _reduce(self, buffer: FlatBuffer, claim: Claim) -> Steps:
        for data in pieces(buffer.data):
            reduced = for_mpi(_widen(data, claim))
            if self.rank == claim.root:
                yield self._comm.Ireduce(self._mpi.IN_PLACE, reduced, self._mpi_op(claim), claim.root)
                self._narrow(data, reduced, claim)
            else:
                yield self._comm.Ireduce(reduced, None, self._mpi_op(claim), claim.root)

    def _reduce_zeros(self, claim: Claim) -> Steps:
        """Take part in a reduction that others agreed on, with zeros."""
        if claim.kind == "reduce_scatter":
            block = zeros(claim.size, claim.dtype)
            return self._reduce_scatter(zeros(claim.size * self.world_size, claim.dtype), block, claim)
        return self._allreduce([zeros(size, claim.dtype) for size in claim.arrays or [claim.size]], claim)

    def _narrow(self, data: Data, reduced: Data, claim: Claim) -> None:
        narrow_into(data, reduced, claim.dtype, claim.op, self.world_size, claim.postscale)

    def _mpi_op(self, claim: Claim) -> MPI.Op:
        mpi = self._mpi
        ops: dict[str, MPI.Op] = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX, "product": mpi.PROD}
        return ops[elementary_op(claim.op, claim.dtype)]


def _widen(data: Data, claim: Claim) -> Data:
    return widen(data, claim.dtype, claim.op, claim.prescale)


def _claim(
    kind: str,
    dtype: str,
    size: int,
    op: str,
    prescale: float,
    postscale: float,
    name: str,
    *,
    shape: tuple[int, ...] = (),
    arrays: tuple[int, ...] = (),
    blocks: tuple[int, ...] = (),
    root: int = -1,
) -> Claim:
    return Claim(
        kind=kind,
        name=name,
        dtype=dtype,
        size=size,
        shape=shape,
        arrays=arrays,
        blocks=blocks,
        op=check_op(op, dtype),
        prescale=float(prescale),
        postscale=float(postscale),
        root=root,
    )
