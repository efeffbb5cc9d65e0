"""Several arrays with blocks of all ranks as one operation over MPI. Runs on ranks.

MPI takes one array: each rank's blocks of all arrays are laid one after another, and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.claims import Claim
from sparkdl.collective.flat_buffers import FlatBuffer, flatten
from sparkdl.collective.mpi_movements import MpiMovements
from sparkdl.collective.mpi_operations import Plan, both_forms
from sparkdl.collective.mpi_reductions import MpiReductions
from sparkdl.collective.reductions import check_op
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Array
    from sparkdl.collective.mpi_operations import Data, Steps

    Blocks = tuple[tuple[int, ...], ...]
    """Elements of each rank's block of each array."""


class MpiGroups(MpiMovements, MpiReductions):
    """reduce_scatter_group and allgather_group; see the contract."""

    def _plan_reduce_scatter_group(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        *,
        counts: Sequence[Sequence[int] | None] | None = None,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        sources, targets = _flatten_pairs(arrays, outs)
        blocks = self._blocks_of_group(sources, targets, counts)
        claim = _claim(
            "reduce_scatter",
            name,
            targets[0].dtype,
            blocks,
            op=check_op(op, targets[0].dtype),
            prescale=float(prescale),
            postscale=float(postscale),
        )
        steps = partial(self._reduce_scatter_group, sources, targets, claim)
        return Plan(claim=claim, steps=steps, buffers=sources + targets, timeout_s=timeout_s)

    reduce_scatter_group_async, reduce_scatter_group = both_forms(_plan_reduce_scatter_group)

    def _plan_allgather_group(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        *,
        counts: Sequence[Sequence[int] | None] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Plan:
        sources, targets = _flatten_pairs(arrays, outs)
        blocks = self._blocks_of_group(targets, sources, counts)
        claim = _claim("allgather", name, sources[0].dtype, blocks)
        steps = partial(self._allgather_group, sources, targets, claim)
        return Plan(claim=claim, steps=steps, buffers=sources + targets, timeout_s=timeout_s)

    allgather_group_async, allgather_group = both_forms(_plan_allgather_group)

    def _reduce_scatter_group(
        self, sources: Sequence[FlatBuffer], targets: Sequence[FlatBuffer], claim: Claim
    ) -> Steps:
        whole = np.concatenate(list(_by_rank([source.data for source in sources], claim.array_blocks)))
        block = np.empty(sum(target.data.size for target in targets), whole.dtype)
        yield from self._reduce_scatter(
            FlatBuffer(dtype=claim.dtype, data=whole), FlatBuffer(dtype=claim.dtype, data=block), claim
        )
        _divide(block, [target.data for target in targets])

    def _allgather_group(
        self, sources: Sequence[FlatBuffer], targets: Sequence[FlatBuffer], claim: Claim
    ) -> Steps:
        block = np.concatenate([source.data for source in sources])
        whole = np.empty(sum(target.data.size for target in targets), block.dtype)
        yield from self._allgather(
            FlatBuffer(dtype=claim.dtype, data=block), FlatBuffer(dtype=claim.dtype, data=whole), claim
        )
        _divide(whole, list(_by_rank([target.data for target in targets], claim.array_blocks)))

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
        each = [None] * len(wholes) if counts is None else counts
        return tuple(
            self._check_blocks(whole, block, of_array) or (block.data.size,) * self.world_size
            for whole, block, of_array in zip(wholes, blocks, each, strict=True)
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


def _claim(
    kind: str,
    name: str,
    dtype: str,
    array_blocks: Blocks,
    *,
    op: str = "",
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Claim:
    sums = tuple(map(sum, zip(*array_blocks, strict=True)))
    are_equal = len(set(sums)) == 1
    return Claim(
        kind=kind,
        name=name,
        dtype=dtype,
        size=sums[0] if are_equal else 0,
        blocks=() if are_equal else sums,
        array_blocks=array_blocks,
        op=op,
        prescale=prescale,
        postscale=postscale,
    )


def _by_rank(wholes: Sequence[Data], array_blocks: Blocks) -> Iterator[Data]:
    """The blocks of the first rank in all arrays, then of the second and so on."""
    ends = [np.cumsum(blocks) for blocks in array_blocks]
    for rank in range(len(array_blocks[0])):
        for whole, blocks, end in zip(wholes, array_blocks, ends, strict=True):
            yield whole[end[rank] - blocks[rank] : end[rank]]


def _divide(packed: Data, parts: Sequence[Data]) -> None:
    """Write what lies one after another in ``packed`` to the parts."""
    start = 0
    for part in parts:
        part[:] = packed[start : start + part.size]
        start += part.size
