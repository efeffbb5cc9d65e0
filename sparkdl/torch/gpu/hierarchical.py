"""The collectives of c10d for CUDA tensors on several hosts: NCCL inside each; each byte leaves a host once.

The operations of data-parallel and sharded training (allreduce, and the reduce_scatter and allgather of one tensor)
use the groups of :class:`~sparkdl.collective.nccl.hierarchy.Hierarchy`::

    allreduce   NCCL: reduce a part to each rank ─► across: allreduce the own part ─► NCCL: spread the parts

A rank exchanges its part with the ranks of the same local rank on other hosts through pinned memory. One thread calls
the steps of a collective, with the lane's stream as the current one, and in the same order on all ranks, as NCCL
requires.

All other collectives, reductions that NCCL does not have, and the reduce_scatter and allgather on hosts with different
numbers of ranks go through host memory as in :mod:`sparkdl.torch.gpu.staged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.rendezvous.deadline import Deadline
from sparkdl.torch.buffers import (
    FLOAT_DTYPES,
    Reduction,
    as_bytes,
    export,
    flatten,
    is_flat,
    reduction_of,
    restore,
)
from sparkdl.torch.gpu.nccl import describe_tensor
from sparkdl.torch.gpu.staged import StagedAccelerator, StagedWork
from sparkdl.torch.submission import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, as_list
from sparkdl.torch.work import seconds

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.collective.nccl.group import NcclBatch, NcclHandle
    from sparkdl.collective.nccl.hierarchy import Hierarchy
    from sparkdl.torch.gpu.lanes import GpuLane
    from sparkdl.torch.process_group import SparkdlProcessGroup


@dataclass(frozen=True, eq=False)
class PinnedAcross:
    """Communication across hosts through pinned host memory, over TCP or MPI.

    Attributes:
        communicator: communicator of the ranks with the same local rank on their hosts, used for nothing else.
        lane: lane on which the copies run.
    """

    communicator: Communicator
    lane: GpuLane

    def allreduce(self, part: torch.Tensor, op: str, deadline: Deadline) -> Iterator[None]:
        """Reduce a part in place, in three steps: copy it to the host, start the network operation, copy it back.

        Take the second step only when the work that was on the stream at the first one is known to end.
        """
        twin = self._copy_to_host(part)
        mark = self.lane.mark()
        yield
        self.lane.block(mark)
        handle = self.communicator.allreduce_async(export(twin), op=op, timeout_s=deadline.remaining_s())
        yield
        handle.wait()
        part.copy_(twin, non_blocking=True)

    def reduce_scatter(self, blocks: torch.Tensor, op: str, deadline: Deadline) -> torch.Tensor:
        """Reduce equal blocks, one per rank, and return this rank's block."""
        source = self._copy_to_host(blocks)
        block = self.lane.host_twin(blocks.view(self.communicator.world_size, -1)[0])
        self.lane.block(self.lane.mark())
        self.communicator.reduce_scatter(
            export(source), export(block), op=op, timeout_s=deadline.remaining_s()
        )
        return torch.empty_like(block, device=blocks.device).copy_(block, non_blocking=True)

    def allgather(self, block: torch.Tensor, blocks: torch.Tensor, deadline: Deadline) -> None:
        """Concatenate the blocks of all ranks in ``blocks``."""
        source, target = self._copy_to_host(block), self.lane.host_twin(blocks)
        self.lane.block(self.lane.mark())
        self.communicator.allgather(export(source), export(target), timeout_s=deadline.remaining_s())
        blocks.copy_(target, non_blocking=True)

    def _copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.lane.host_twin(tensor).copy_(tensor, non_blocking=True)


FlatTensors = Sequence[torch.Tensor]

_PART_BYTES = 4 << 20
"""Size of one part of a piece: large enough to use the full network, small enough to have several in progress."""


class HierarchicalSteps:
    """Collectives of contiguous tensors on the GPU.

    Args:
        hierarchy: groups inside and across hosts.
        lane: lane on which the steps run.
    """

    def __init__(self, hierarchy: Hierarchy, lane: GpuLane) -> None:
        self._inside = hierarchy.inside
        self._num_parts = hierarchy.num_parts
        self._lane = lane
        self._order = hierarchy.rank_order() if hierarchy.is_even else []
        self._across = None if hierarchy.across is None else PinnedAcross(hierarchy.across, lane)

    def allreduce(
        self, flats: FlatTensors, *, op: str, prescale: float, stream: int, deadline: Deadline
    ) -> None:
        """Reduce one-dimensional tensors in place, in pieces: one is copied while another is on the network."""
        under_way = []
        pieces = (
            piece
            for flat in flats
            if flat.numel()
            for piece in flat.split(self._num_parts * (_PART_BYTES // flat.element_size()))
        )
        for piece in pieces:
            parts = piece.tensor_split(self._num_parts)
            reduced = self._run(self._reduce_inside(piece, parts, op, prescale), stream, deadline)
            crossing: Iterator[None] = iter(())
            if self._across is not None and (mine := parts[self._inside.rank]).numel():
                crossing = self._across.allreduce(mine, op, deadline)
            next(crossing, None)
            under_way.append((piece, parts, reduced, crossing))
        for _, _, reduced, crossing in under_way:
            reduced.wait(deadline.remaining_s())
            next(crossing, None)
        for piece, parts, _, crossing in under_way:
            next(crossing, None)
            self._run(self._spread_inside(piece, parts), stream, deadline)

    def reduce_scatter(
        self, blocks: torch.Tensor, *, op: str, prescale: float, stream: int, deadline: Deadline
    ) -> torch.Tensor:
        """Reduce blocks, shape ``(world_size, n)``, and return this rank's; hosts must have equally many ranks."""
        assert self._across is not None, "every rank carries a part where hosts are even"
        by_position = blocks[self._order]
        mine = self._own_rows(by_position)
        batch = self._inside.batch().reduce_scatter(
            describe_tensor(by_position), describe_tensor(mine), op=op, prescale=prescale
        )
        self._run(batch, stream, deadline).wait(deadline.remaining_s())
        return self._across.reduce_scatter(mine, op, deadline)

    def allgather(
        self, block: torch.Tensor, blocks: torch.Tensor, *, stream: int, deadline: Deadline
    ) -> None:
        """Gather the ranks' blocks in ``blocks``, shape ``(world_size, n)``; hosts must have equally many ranks."""
        assert self._across is not None, "every rank carries a part where hosts are even"
        by_position = torch.empty_like(blocks)
        mine = self._own_rows(by_position)
        self._across.allgather(block, mine, deadline)
        self._run(
            self._inside.batch().allgather(describe_tensor(mine), describe_tensor(by_position)),
            stream,
            deadline,
        )
        blocks[self._order] = by_position

    def _reduce_inside(self, piece: torch.Tensor, parts: FlatTensors, op: str, prescale: float) -> NcclBatch:
        """Reduce each part to the rank of this host that carries it."""
        batch = self._inside.batch()
        if self._is_block_per_rank(piece):
            mine = describe_tensor(parts[self._inside.rank])
            return batch.reduce_scatter(describe_tensor(piece), mine, op=op, prescale=prescale)
        for rank, part in enumerate(parts):
            if part.numel():
                batch.reduce(describe_tensor(part), root=rank, op=op, prescale=prescale)
        return batch

    def _spread_inside(self, piece: torch.Tensor, parts: FlatTensors) -> NcclBatch:
        """Send each part from the rank that carried it to all ranks of this host."""
        batch = self._inside.batch()
        if self._is_block_per_rank(piece):
            return batch.allgather(describe_tensor(parts[self._inside.rank]), describe_tensor(piece))
        for rank, part in enumerate(parts):
            if part.numel():
                batch.broadcast(describe_tensor(part), root=rank)
        return batch

    def _is_block_per_rank(self, piece: torch.Tensor) -> bool:
        num_ranks = self._inside.world_size
        return self._num_parts == num_ranks and piece.numel() % num_ranks == 0

    def _own_rows(self, by_position: torch.Tensor) -> torch.Tensor:
        """The blocks for this local rank, one-dimensional, of blocks ordered by local rank and host."""
        return by_position.view(self._inside.world_size, -1)[self._inside.rank]

    def _run(self, batch: NcclBatch, stream: int, deadline: Deadline) -> NcclHandle:
        handle = batch.run(stream=stream, timeout_s=deadline.remaining_s())
        self._lane.order(handle)
        return handle


Tensors = Sequence[torch.Tensor]

_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})


class HierarchicalAccelerator(StagedAccelerator):
    """The accelerator of ranks on several hosts: NCCL inside each host, the communicator's transport across hosts.

    Args:
        hierarchy: groups inside and across hosts; closed by :meth:`shutdown`. ``host_group`` uses its ``all_ranks``.
        host_group: process group as in :class:`~sparkdl.torch.gpu.staged.StagedAccelerator`.
        lane: lane on which the collectives run.
        timeout_s: default deadline of a collective, in seconds.
    """

    def __init__(
        self, hierarchy: Hierarchy, host_group: SparkdlProcessGroup, lane: GpuLane, *, timeout_s: float
    ) -> None:
        super().__init__(host_group, lane, hierarchy.all_ranks.name)
        self._hierarchy = hierarchy
        self._timeout_s = timeout_s
        self._world_size = hierarchy.all_ranks.world_size
        self._steps = HierarchicalSteps(hierarchy, lane)

    def allreduce(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> StagedWork:
        """Reduce each tensor over the ranks, in place."""
        tensors = as_list(tensors)
        reduction = reduction_of(opts.reduceOp)
        if not all(_is_reduced_by_nccl(tensor, reduction) for tensor in tensors):
            return super().allreduce(tensors, opts)

        def communicate(stream: int, deadline: Deadline) -> None:
            flats = [flatten(tensor) for tensor in tensors]
            self._steps.allreduce(flats, **self._scale(reduction), stream=stream, deadline=deadline)
            for flat, tensor in zip(flats, tensors, strict=True):
                restore(flat, tensor)

        return self._run(tensors, tensors, opts, communicate)

    allreduce_coalesced = allreduce

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = REDUCE_SCATTER
    ) -> StagedWork:
        """The reduce_scatter of several pairs, one after another."""
        reduction = reduction_of(opts.reduceOp)
        is_ours = all(_is_reduced_by_nccl(tensor, reduction) for tensor in inputs)
        if not (is_ours and self._hierarchy.is_even and self._fit(outputs, inputs)):
            return super().reduce_scatter_tensor_coalesced(outputs, inputs, opts)

        def communicate(stream: int, deadline: Deadline) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                block = self._steps.reduce_scatter(
                    flatten(tensor).view(self._world_size, -1),
                    **self._scale(reduction),
                    stream=stream,
                    deadline=deadline,
                )
                output.detach().copy_(block.view(output.shape), non_blocking=True)

        return self._run(outputs, [*outputs, *inputs], opts, communicate)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = ALL_GATHER
    ) -> StagedWork:
        """The allgather of several pairs, one after another."""
        if not (self._hierarchy.is_even and self._fit(inputs, outputs)):
            return super().allgather_into_tensor_coalesced(outputs, inputs, opts)

        def communicate(stream: int, deadline: Deadline) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                target = output.detach() if is_flat(output) else torch.empty_like(output).contiguous()
                blocks = as_bytes(target).view(self._world_size, -1)
                self._steps.allgather(as_bytes(tensor), blocks, stream=stream, deadline=deadline)
                restore(target, output)

        return self._run(outputs, [*outputs, *inputs], opts, communicate)

    def shutdown(self) -> None:
        """Complete the collectives in progress and close the groups."""
        self._end_threads()
        self._hierarchy.close()
        super().shutdown()

    def _run(
        self, outputs: Tensors, used: Tensors, opts: Any, communicate: Callable[[int, Deadline], None]
    ) -> StagedWork:
        ready = self._lane.mark()
        timeout_s = seconds(getattr(opts, "timeout", None)) or self._timeout_s

        def in_order() -> Any:
            with self._hierarchy.one_fate(), self._lane.after(ready, used) as stream:
                communicate(stream, Deadline(timeout_s))
                return self._lane.mark()

        return self._submit(outputs, [opts], in_order)

    def _fit(self, blocks: Tensors, wholes: Tensors) -> bool:
        """Whether each whole has a block for every rank; if not, the way through host memory reports the error."""
        return all(
            0 < self._world_size * block.numel() == whole.numel() and block.dtype == whole.dtype
            for block, whole in zip(blocks, wholes, strict=True)
        )

    def _scale(self, reduction: Reduction) -> dict[str, Any]:
        """The arguments of NCCL's reduction inside a host; an average is scaled before the sum, as NCCL does itself."""
        if reduction.op == "avg":
            return {"op": "sum", "prescale": reduction.prescale / self._world_size}
        return {"op": reduction.op, "prescale": reduction.prescale}


def _is_reduced_by_nccl(tensor: torch.Tensor, reduction: Reduction) -> bool:
    """Whether both NCCL and the communication across hosts can reduce the tensor as it is."""
    is_scaled = reduction.op == "avg" or reduction.prescale != 1.0
    return reduction.op is not None and tensor.dtype in (
        FLOAT_DTYPES if is_scaled else FLOAT_DTYPES | _INTEGERS
    )
