"""Reductions of a communicator over MPI, in a wider type where MPI's own reduction is not exact enough.

Minima and maxima of floats are computed on integers of the same order. MPI does not define the minimum of a number and
NaN, nor of 0.0 and -0.0: its libraries return either operand, and not always the same one on all ranks. As integers,
NaN is below all numbers for a minimum and above them for a maximum, and -0.0 is below 0.0.

Elements that MPI cannot add up, or not exactly enough, are copied to a wider type, reduced there and written back.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.buffers import FLOAT_DTYPES, FlatBuffer, flatten, zeros
from sparkdl.collective.mpi.operations import (
    MpiOperations,
    MpiPlan,
    Signature,
    both_forms,
    for_mpi,
    pieces,
    shape_to_agree_on,
    signature_of,
)
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from sparkdl.collective.communicator import Array
    from sparkdl.collective.mpi.operations import Steps


Data = np.ndarray[Any, Any]


def to_ordered(values: Data, op: str) -> Data:
    """Convert floats to new signed integers of the same width and order, with -0.0 below 0.0.

    Args:
        values: floats; float16, float32 or float64.
        op: ``"min"`` or ``"max"``; NaN becomes the integer that is the result against every number.
    """
    ordered = _turn(values.view(f"i{values.itemsize}"))
    ends = np.iinfo(ordered.dtype)
    ordered[np.isnan(values)] = ends.min if op == "min" else ends.max
    return ordered


def _turn(integers: Data) -> Data:
    """Complement the magnitude of negative numbers, which puts the bits of floats (sign and magnitude) in order.

    This function is its own inverse, and maps the least and the greatest integer to a NaN.
    """
    turned = integers >> (8 * integers.itemsize - 1)
    turned &= np.iinfo(integers.dtype).max
    turned ^= integers
    return turned


OPS = ("sum", "avg", "min", "max", "product")


_EXTREMES = ("min", "max")

_OF_BOOLS = {"sum": "max", "min": "min", "max": "max", "product": "min"}
"""Operations on bools, and those that reduce them as the numbers 0 and 1."""

_SATURATED = ("int8", "uint8", "int16", "uint16")
"""Dtypes whose sums saturate in Open MPI where it adds with AVX, and wrap around everywhere else."""


def reduction_of(
    dtype: str, *, op: str = "sum", prescale: float = 1.0, postscale: float = 1.0
) -> dict[str, Any]:
    """Return the fields of a signature that say how elements of ``dtype`` are reduced.

    Raises:
        ParamError: if ``op`` is not one of :data:`OPS`, or elements of this dtype cannot be reduced by it.
    """
    if op == "avg" and dtype == "bool":
        raise ParamError("bools have no average; convert them to a number first")
    if op not in OPS:
        raise ParamError(f"op={op!r} is unknown; it may be one of {', '.join(OPS)}")
    return {"op": op, "prescale": float(prescale), "postscale": float(postscale)}


def widen(data: Data, signature: Signature) -> Data:
    """Return the array in which an operation reduces ``data``: ``data`` itself, or a wider or scaled copy.

    bfloat16 (given as uint16) and float16 are reduced in float32. Averages of integers are reduced in 64 bits, as the
    sum could overflow a narrower type, and sums of integers of 8 and 16 bits in 32 bits. Minima and maxima of floats
    are reduced as integers of the same order, which includes NaN and the sign of zero (see :func:`to_ordered`).
    """
    wide, dtype, op = data, signature.dtype, signature.op
    if dtype == "bfloat16":
        wide = (data.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float16":
        wide = data.astype(np.float32)
    if signature.prescale != 1.0:
        wide = _scale(wide, dtype, signature.prescale)
    if op == "avg" and wide.dtype.kind in "iu":
        wide = wide.astype(np.uint64 if dtype == "uint64" else np.int64)
    elif op == "sum" and dtype in _SATURATED:
        wide = wide.astype(np.int32)
    elif op in _EXTREMES and wide.dtype.kind == "f":
        wide = to_ordered(wide, op)
    return wide


def narrow_into(out: Data, reduced: Data, signature: Signature, world_size: int) -> None:
    """Write the reduced array of :func:`widen` to ``out``: divided by ``world_size`` for an average, then scaled."""
    dtype, op = signature.dtype, signature.op
    if op == "avg":
        reduced = _divide(reduced, world_size)
    elif op in _EXTREMES and dtype in FLOAT_DTYPES:
        reduced = _turn(reduced).view(f"f{reduced.itemsize}")  # in new memory; every NaN is quiet
    elif dtype in _SATURATED:
        # Sums wrap around before they are scaled, like sums of wider integers.
        reduced = reduced.astype(out.dtype, copy=False)
    if signature.postscale != 1.0:
        reduced = _scale(reduced, dtype, signature.postscale, out=reduced)
    if dtype == "bfloat16":
        out[:] = _round_to_bfloat16(reduced)
    elif reduced is not out:
        out[:] = reduced.astype(out.dtype)


def _divide(values: Data, divisor: int) -> Data:
    if values.dtype.kind == "u":
        return values // np.uint64(divisor)
    if values.dtype.kind == "i":
        # Round toward zero; // rounds toward minus infinity. No abs(): the lowest number has no absolute value.
        quotients = values // divisor
        quotients += (values < 0) & (values % divisor != 0)
        return np.asarray(quotients)
    return np.divide(values, divisor, out=values)


def _scale(values: Data, dtype: str, factor: float, out: Data | None = None) -> Data:
    if values.dtype.kind == "f":
        return np.asarray(np.multiply(values, values.dtype.type(factor), out=out))
    scaled = np.trunc(values.astype(np.float64) * factor)
    if dtype == "bool":
        # A bool can only be 0 or 1.
        return np.asarray(scaled >= 1, values.dtype)
    ends = np.iinfo(dtype)
    # The largest integer of 64 bits is not a float64: the nearest float64 is just above it.
    within = np.where(scaled < float(ends.max), np.maximum(scaled, float(ends.min)), 0.0)
    limited = np.asarray(within.astype(values.dtype))
    limited[scaled >= float(ends.max)] = ends.max
    return limited


def _round_to_bfloat16(values: Data) -> Data:
    bits = values.view(np.uint32)
    # Round to nearest, ties to even: add just under half of the last place that is kept, and one more if that
    # place is odd.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


class MpiReductions(MpiOperations):
    """Implements allreduce, allreduce_group, reduce_scatter and reduce; see the contract."""

    def _plan_allreduce(
        self,
        array: Array,
        *,
        name: str = "",
        **reduction: Any,
    ) -> MpiPlan:
        buffer = flatten(array, writes=True)
        signature = signature_of("allreduce", name, buffer, **reduction_of(buffer.dtype, **reduction))
        steps = partial(self._allreduce, [buffer], signature)
        return MpiPlan(signature=signature, steps=steps, buffers=[buffer])

    allreduce_async, allreduce = both_forms(_plan_allreduce)

    def _plan_allreduce_group(
        self,
        arrays: Sequence[Array],
        *,
        name: str = "",
        **reduction: Any,
    ) -> MpiPlan:
        buffers = [flatten(array, writes=True) for array in arrays]
        dtypes = sorted({buffer.dtype for buffer in buffers})
        if len(dtypes) != 1:
            raise ParamError(
                f"the arrays of a group must have one dtype, got {', '.join(dtypes) or 'no arrays'}"
            )
        sizes = tuple(buffer.data.size for buffer in buffers)
        signature = Signature(
            kind="allreduce",
            name=name,
            dtype=dtypes[0],
            size=sum(sizes),
            arrays=sizes,
            **reduction_of(dtypes[0], **reduction),
        )
        steps = partial(self._allreduce, buffers, signature)
        return MpiPlan(signature=signature, steps=steps, buffers=buffers)

    allreduce_group_async, allreduce_group = both_forms(_plan_allreduce_group)

    def _plan_reduce_scatter(
        self,
        array: Array,
        out: Array,
        *,
        counts: Sequence[int] | None = None,
        name: str = "",
        **reduction: Any,
    ) -> MpiPlan:
        source, target = flatten(array), flatten(out, reads=False, writes=True)
        blocks = self._check_blocks(source, target, counts)
        signature = Signature(
            kind="reduce_scatter",
            name=name,
            dtype=source.dtype,
            size=0 if blocks else target.data.size,
            shape=shape_to_agree_on(name, source, rows=True),
            blocks=blocks,
            **reduction_of(source.dtype, **reduction),
        )
        steps = partial(self._reduce_scatter, source, target, signature)
        return MpiPlan(signature=signature, steps=steps, buffers=[source, target])

    reduce_scatter_async, reduce_scatter = both_forms(_plan_reduce_scatter)

    def _plan_reduce(
        self,
        array: Array,
        *,
        root: int,
        name: str = "",
        **reduction: Any,
    ) -> MpiPlan:
        buffer = flatten(array, writes=True)
        how = {"root": self._check_root(root), **reduction_of(buffer.dtype, **reduction)}
        signature = signature_of("reduce", name, buffer, **how)
        steps = partial(self._reduce, buffer, signature)
        return MpiPlan(signature=signature, steps=steps, buffers=[buffer])

    reduce_async, reduce = both_forms(_plan_reduce)

    def _allreduce(self, buffers: Sequence[FlatBuffer], signature: Signature) -> Steps:
        if len(buffers) == 1:
            # Piece by piece, as a wider copy of the whole array may be four times its size.
            for data in pieces(buffers[0].data):
                reduced = for_mpi(widen(data, signature))
                yield self._comm.Iallreduce(self._mpi.IN_PLACE, reduced, self._mpi_op(signature))
                narrow_into(data, reduced, signature, self.world_size)
            return
        working = np.concatenate([widen(buffer.data, signature) for buffer in buffers])
        for piece in pieces(working):
            yield self._comm.Iallreduce(self._mpi.IN_PLACE, piece, self._mpi_op(signature))
        start = 0
        for buffer in buffers:
            end = start + buffer.data.size
            narrow_into(buffer.data, working[start:end], signature, self.world_size)
            start = end

    def _reduce_scatter(self, source: FlatBuffer, target: FlatBuffer, signature: Signature) -> Steps:
        working, reduced = for_mpi(widen(source.data, signature)), for_mpi(target.data)
        if working.dtype != reduced.dtype or np.may_share_memory(working, reduced):
            reduced = np.empty(reduced.size, working.dtype)
        if signature.blocks:
            yield self._comm.Ireduce_scatter(
                working, reduced, list(signature.blocks), self._mpi_op(signature)
            )
        elif signature.size:
            yield self._comm.Ireduce_scatter_block(working, reduced, self._mpi_op(signature))
        narrow_into(target.data, reduced, signature, self.world_size)

    def _reduce(self, buffer: FlatBuffer, signature: Signature) -> Steps:
        for data in pieces(buffer.data):
            reduced = for_mpi(widen(data, signature))
            if self.rank == signature.root:
                yield self._comm.Ireduce(self._mpi.IN_PLACE, reduced, self._mpi_op(signature), signature.root)
                narrow_into(data, reduced, signature, self.world_size)
            else:
                yield self._comm.Ireduce(reduced, None, self._mpi_op(signature), signature.root)

    def _reduce_zeros(self, signature: Signature) -> Steps:
        """Take part, with zeros, in a reduction that the other ranks agreed on."""
        if signature.kind == "reduce_scatter":
            block = zeros(signature.size, signature.dtype)
            return self._reduce_scatter(
                zeros(signature.size * self.world_size, signature.dtype), block, signature
            )
        return self._allreduce(
            [zeros(size, signature.dtype) for size in signature.arrays or [signature.size]], signature
        )

    def _mpi_op(self, signature: Signature) -> MPI.Op:
        mpi = self._mpi
        op = _OF_BOOLS[signature.op] if signature.dtype == "bool" else signature.op
        # An average is a sum that is divided afterwards.
        ops: dict[str, MPI.Op] = dict(zip(OPS, (mpi.SUM, mpi.SUM, mpi.MIN, mpi.MAX, mpi.PROD), strict=True))
        return ops[op]
