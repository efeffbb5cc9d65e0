"""Arrays whose elements do not lie at multiples of their size, as not every library takes them. Runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.collective.element_types import at_odd_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.collective import Communicator


def _odd_reductions(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    total = sum(range(1, world_size + 1))
    for dtype in (np.float64, np.float16, np.int32):
        own = at_odd_address(np.full(9, rank + 1, dtype))
        # What is queued behind another operation works on what that one leaves.
        handles = [communicator.allreduce_async(own), communicator.allreduce_async(own, op="max")]
        for handle in handles:
            handle.wait()
        assert own.tolist() == [total] * 9
        group = [at_odd_address(np.full(size, rank + 1, dtype)) for size in (3, 5)]
        communicator.allreduce_group(group)
        assert [array[0] for array in group] == [total] * 2
        rooted = at_odd_address(np.full(4, rank + 1, dtype))
        communicator.reduce(rooted, root=0)
        assert rooted.tolist() == [total if rank == 0 else rank + 1] * 4
        whole, block = (
            at_odd_address(np.full(2 * world_size, rank + 1, dtype)),
            at_odd_address(np.zeros(2, dtype)),
        )
        communicator.reduce_scatter(whole, block)
        assert block.tolist() == [total] * 2
        assert whole.tolist() == [rank + 1] * (2 * world_size)


def _odd_movements(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    ranks = np.repeat(np.arange(world_size), 3).astype(np.float64)
    own = at_odd_address(np.full(3, float(rank)))
    gathered, at_root = (at_odd_address(np.zeros(3 * world_size)) for _ in range(2))
    communicator.allgather(own, gathered)
    assert gathered.tolist() == ranks.tolist()
    communicator.gather(own, at_root if rank == 0 else None, root=0)
    assert at_root.tolist() == (ranks if rank == 0 else 0 * ranks).tolist()
    spread, part = at_odd_address(ranks), at_odd_address(np.zeros(3))
    communicator.scatter(spread if rank == 0 else None, part, root=0)
    assert part.tolist() == [float(rank)] * 3
    exchanged = at_odd_address(np.zeros(3 * world_size))
    communicator.alltoall(at_odd_address(np.full(3 * world_size, float(rank))), exchanged)
    assert exchanged.tolist() == ranks.tolist()
    last = at_odd_address(np.full(3, float(rank)))
    communicator.broadcast(last, root=world_size - 1)
    assert last.tolist() == [world_size - 1.0] * 3


def _odd_messages(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    if world_size == 1:
        return
    got = at_odd_address(np.zeros(5))
    handle = communicator.send_async(at_odd_address(np.full(5, float(rank))), to=(rank + 1) % world_size)
    communicator.recv(got, source=(rank - 1) % world_size)
    handle.wait()
    assert got.tolist() == [float((rank - 1) % world_size)] * 5


ADDRESS_CHECKS: dict[str, Callable[[Communicator], None]] = {
    "reductions at odd addresses": _odd_reductions,
    "movements at odd addresses": _odd_movements,
    "messages at odd addresses": _odd_messages,
}
