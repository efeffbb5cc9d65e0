"""Arrays with misaligned elements or with gaps between them. Runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from sparkdl.errors import MismatchError, ParamError
from tests.collective.checks.bfloat16_array import Bfloat16Array
from tests.collective.checks.element_types import at_odd_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.collective import Communicator


def _odd(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    total = sum(range(1, world_size + 1))
    for dtype in (np.float64, np.float16, np.int32):
        own = at_odd_address(np.full(9, rank + 1, dtype))
        # The second operation is queued behind the first and has to see its result.
        handles = [communicator.allreduce_async(own), communicator.allreduce_async(own, op="max")]
        for handle in handles:
            handle.wait()
        assert own.tolist() == [total] * 9


def _strided(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    total = sum(range(1, world_size + 1))
    grid = np.full((4, 6), -1.0, np.float32)
    own = grid[1:3, ::-2].T  # reversed and transposed, too
    own[...] = rank + 1 + np.arange(6).reshape(3, 2)
    # The second operation is queued behind the first and has to see its result.
    handles = [communicator.allreduce_async(own), communicator.allreduce_async(own, op="max", postscale=2)]
    for handle in handles:
        handle.wait()
    assert (own == 2 * (total + world_size * np.arange(6).reshape(3, 2))).all()
    assert (grid == -1).sum() == 24 - 6
    wide = np.zeros((world_size, 2, 2))
    communicator.allgather(np.full((2, 2), float(rank)).T[:, :1], wide[:, :, 1])
    assert wide[:, :, 1].tolist() == [[other, other] for other in range(world_size)]
    assert not wide[:, :, 0].any()
    bits = np.zeros(6, np.uint16)
    bits[::2] = 0x3F80  # 1.0 in bfloat16
    communicator.allreduce(Bfloat16Array.of_bits(bits[::2]))
    assert Bfloat16Array.of_bits(bits).values.tolist() == [world_size, 0.0] * 3
    # Sequences that create their items on access.
    rows, gathered = np.full((3, 8), float(rank)), np.zeros((3, 8 * world_size))
    communicator.allgather_group(rows, gathered)
    assert (gathered.reshape(3, world_size, 8) == np.arange(world_size).reshape(1, -1, 1)).all()
    communicator.reduce_scatter_group(tuple(gathered), tuple(rows), counts=[None, [8] * world_size, None])
    assert (rows == world_size * rank).all()
    communicator.allreduce_group(rows)
    assert (rows == world_size * sum(range(world_size))).all()
    shared = np.lib.stride_tricks.as_strided(np.zeros(4), (3, 2), (8, 8))
    with pytest.raises(ParamError, match="share memory"):
        communicator.allreduce(shared)
    field = np.zeros(4, [("a", "f4"), ("b", "u1")])["a"]
    if communicator.transport == "native":
        with pytest.raises(ParamError, match="strides that are not multiples"):
            communicator.allreduce(field)
    if world_size > 1 and rank == 0:
        communicator.send(shared, to=1)
    if rank == 1:
        received = np.ones((3, 4))
        communicator.recv(received[:, ::2], source=0)
        assert received.tolist() == [[0, 1, 0, 1]] * 3
    # Written only where the ranks agree.
    if world_size > 1:
        with pytest.raises(MismatchError):
            communicator.allreduce(own, name=f"of rank {rank}")
        assert own.max() == 2 * (total + world_size * 5)


ADDRESS_CHECKS: dict[str, Callable[[Communicator], None]] = {
    "queued operations on odd addresses": _odd,
    "strided arrays": _strided,
}
