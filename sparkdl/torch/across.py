"""How a rank's part of CUDA tensors crosses to the ranks with the same place on other hosts. Runs on the *rank*.

All methods are called with the lane's stream as the current one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparkdl.torch.buffers import export
from sparkdl.torch.nccl_tensors import described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sparkdl.collective import Communicator
    from sparkdl.collective.deadline import Deadline
    from sparkdl.torch.gpu_lane import Lane

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


class PinnedAcross:
    """Through pinned host memory: over TCP, and over MPI that does not know GPUs.

    Args:
        communicator: of the ranks with the same place in their hosts, which nobody else uses.
        lane: where the copies run.
    """

    def __init__(self, communicator: Communicator, lane: Lane) -> None:
        self._communicator = communicator
        self._lane = lane

    def allreduce(self, part: torch.Tensor, op: str, deadline: Deadline) -> Iterator[None]:
        """Reduce a part in place, in three steps: it is copied out, it is on the network, it is copied back.

        The second step is to be taken when what was on the stream at the first is known to end.
        """
        twin = self._copied_out(part)
        mark = self._lane.mark()
        yield
        self._lane.block(mark)
        handle = self._communicator.allreduce_async(export(twin), op=op, timeout_s=deadline.remaining_s())
        yield
        handle.wait()
        part.copy_(twin, non_blocking=True)

    def reduce_scatter(self, blocks: torch.Tensor, op: str, deadline: Deadline) -> torch.Tensor:
        """Reduce equal blocks, one per rank, and give this rank's."""
        source = self._copied_out(blocks)
        block = self._lane.host_twin(blocks.view(self._communicator.world_size, -1)[0])
        self._lane.block(self._lane.mark())
        self._communicator.reduce_scatter(
            export(source), export(block), op=op, timeout_s=deadline.remaining_s()
        )
        return torch.empty_like(block, device=blocks.device).copy_(block, non_blocking=True)

    def allgather(self, block: torch.Tensor, blocks: torch.Tensor, deadline: Deadline) -> None:
        """Lay the blocks of all ranks one after another into ``blocks``."""
        source, target = self._copied_out(block), self._lane.host_twin(blocks)
        self._lane.block(self._lane.mark())
        self._communicator.allgather(export(source), export(target), timeout_s=deadline.remaining_s())
        blocks.copy_(target, non_blocking=True)

    def _copied_out(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._lane.host_twin(tensor).copy_(tensor, non_blocking=True)


class DeviceAcross:
    """From GPU to GPU, over MPI that takes device memory: rings of messages, reduced on the GPU.

    Messages alone are used of MPI, as libraries that take device memory in these do not in all their non-blocking
    reductions (Open MPI has none that does). MPI knows no streams, so the host waits for the GPU at every step.

    Args:
        communicator: see :class:`PinnedAcross`.
        lane: where the reductions run.
    """

    def __init__(self, communicator: Communicator, lane: Lane) -> None:
        self._communicator = communicator
        self._lane = lane

    def allreduce(self, part: torch.Tensor, op: str, deadline: Deadline) -> Iterator[None]:
        """Reduce a part in place, in the second of two steps; see :class:`PinnedAcross`."""
        yield
        blocks = part.tensor_split(self._communicator.world_size)
        self._reduce_round(blocks, op, deadline)
        self._gather_round(blocks, deadline)
        yield

    def reduce_scatter(self, blocks: torch.Tensor, op: str, deadline: Deadline) -> torch.Tensor:
        """Reduce equal blocks, one per rank, and give this rank's; changes the others."""
        each = blocks.tensor_split(self._communicator.world_size)
        self._reduce_round(each, op, deadline)
        return each[self._communicator.rank]

    def allgather(self, block: torch.Tensor, blocks: torch.Tensor, deadline: Deadline) -> None:
        """Lay the blocks of all ranks one after another into ``blocks``."""
        each = blocks.tensor_split(self._communicator.world_size)
        each[self._communicator.rank].copy_(block)
        self._gather_round(each, deadline)

    def _reduce_round(self, blocks: tuple[torch.Tensor, ...], op: str, deadline: Deadline) -> None:
        """Block r goes round from rank r + 1 and ends, reduced, at rank r."""
        rank, size = self._communicator.rank, self._communicator.world_size
        for step in range(1, size):
            mine = blocks[(rank - step - 1) % size]
            theirs = torch.empty_like(mine)
            self._exchange(blocks[(rank - step) % size], theirs, deadline)
            _FUNCTIONS[op](mine, theirs, out=mine)

    def _gather_round(self, blocks: tuple[torch.Tensor, ...], deadline: Deadline) -> None:
        """Block r goes round from rank r, to all."""
        rank, size = self._communicator.rank, self._communicator.world_size
        for step in range(size - 1):
            self._exchange(blocks[(rank - step) % size], blocks[(rank - step - 1) % size], deadline)

    def _exchange(self, mine: torch.Tensor, theirs: torch.Tensor, deadline: Deadline) -> None:
        """Send to the next rank and receive from the one before, after all that is on the stream."""
        self._lane.block(self._lane.mark())
        rank, size = self._communicator.rank, self._communicator.world_size
        timeout_s = deadline.remaining_s()
        sent = self._communicator.send_async(described(mine), to=(rank + 1) % size, timeout_s=timeout_s)
        self._communicator.recv_async(described(theirs), source=(rank - 1) % size, timeout_s=timeout_s).wait()
        sent.wait()
