"""The steps of a collective on several hosts: NCCL inside each, this rank's part across. Runs on the *rank*.

Everything here is called by one thread, with the lane's stream as the current one, and in the same order on all ranks,
which is what NCCL asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from sparkdl.torch.across import DeviceAcross, PinnedAcross
from sparkdl.torch.nccl_tensors import described

if TYPE_CHECKING:
    from sparkdl.collective.deadline import Deadline
    from sparkdl.collective.hierarchy import Hierarchy
    from sparkdl.collective.nccl_batch import NcclBatch
    from sparkdl.collective.nccl_group import NcclHandle
    from sparkdl.torch.gpu_lane import Lane

Parts = Sequence[torch.Tensor]

_PART_BYTES = 4 << 20
"""Of one part of a piece: enough to fill a network, little enough to have several under way."""


class HierarchicalSteps:
    """Collectives of contiguous tensors on the GPU.

    Args:
        hierarchy: the groups.
        lane: where the steps run.
    """

    def __init__(self, hierarchy: Hierarchy, lane: Lane) -> None:
        self._inside = hierarchy.inside
        self._num_parts = hierarchy.num_parts
        self._lane = lane
        self._order = hierarchy.rank_order() if hierarchy.is_even else []
        self._across: PinnedAcross | DeviceAcross | None = None
        if hierarchy.across is not None:
            kind = DeviceAcross if hierarchy.takes_device_memory else PinnedAcross
            self._across = kind(hierarchy.across, lane)

    def allreduce(self, flats: Parts, *, op: str, prescale: float, stream: int, deadline: Deadline) -> None:
        """Reduce one-dimensional tensors in place, in pieces: one is copied while another is on the network."""
        under_way = []
        for piece in (piece for flat in flats for piece in self._pieces_of(flat)):
            parts = piece.tensor_split(self._num_parts)
            reduced = self._run(self._reduce_inside(piece, parts, op, prescale), stream, deadline)
            crossing: Iterator[None] = iter(())
            if self._across is not None and (own := parts[self._inside.rank]).numel():
                crossing = self._across.allreduce(own, op, deadline)
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
        """Reduce blocks, shape ``(world_size, n)``, and give this rank's; hosts must be even."""
        assert self._across is not None, "every rank carries a part where hosts are even"
        by_place = blocks[self._order]
        own = self._own_rows(by_place)
        batch = self._inside.batch().reduce_scatter(
            described(by_place), described(own), op=op, prescale=prescale
        )
        self._run(batch, stream, deadline).wait(deadline.remaining_s())
        return self._across.reduce_scatter(own, op, deadline)

    def allgather(
        self, block: torch.Tensor, blocks: torch.Tensor, *, stream: int, deadline: Deadline
    ) -> None:
        """Lay the blocks of all ranks into ``blocks``, shape ``(world_size, n)``; hosts must be even."""
        assert self._across is not None, "every rank carries a part where hosts are even"
        by_place = torch.empty_like(blocks)
        own = self._own_rows(by_place)
        self._across.allgather(block, own, deadline)
        self._run(self._inside.batch().allgather(described(own), described(by_place)), stream, deadline)
        blocks[self._order] = by_place

    def _reduce_inside(self, piece: torch.Tensor, parts: Parts, op: str, prescale: float) -> NcclBatch:
        """Each part to the rank of this host that carries it."""
        batch = self._inside.batch()
        if self._is_block_per_rank(piece):
            own = described(parts[self._inside.rank])
            return batch.reduce_scatter(described(piece), own, op=op, prescale=prescale)
        for rank, part in enumerate(parts):
            if part.numel():
                batch.reduce(described(part), root=rank, op=op, prescale=prescale)
        return batch

    def _spread_inside(self, piece: torch.Tensor, parts: Parts) -> NcclBatch:
        """Each part from the rank that carried it to all of this host."""
        batch = self._inside.batch()
        if self._is_block_per_rank(piece):
            return batch.allgather(described(parts[self._inside.rank]), described(piece))
        for rank, part in enumerate(parts):
            if part.numel():
                batch.broadcast(described(part), root=rank)
        return batch

    def _is_block_per_rank(self, piece: torch.Tensor) -> bool:
        num_ranks = self._inside.world_size
        return self._num_parts == num_ranks and piece.numel() % num_ranks == 0

    def _own_rows(self, by_place: torch.Tensor) -> torch.Tensor:
        """Of blocks by place and host, those of this rank's place, one-dimensional."""
        return by_place.view(self._inside.world_size, -1)[self._inside.rank]

    def _pieces_of(self, flat: torch.Tensor) -> Parts:
        return flat.split(self._num_parts * (_PART_BYTES // flat.element_size())) if flat.numel() else []

    def _run(self, batch: NcclBatch, stream: int, deadline: Deadline) -> NcclHandle:
        handle = batch.run(stream=stream, timeout_s=deadline.remaining_s())
        self._lane.order(handle)
        return handle
