"""Invalid arguments: every transport refuses them alike and at once, and remains usable. Runs on ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sparkdl.collective import Communicator


def _bad_arguments(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    three, one = np.ones(3), np.ones(1)
    bad: list[Callable[[], object]] = [
        lambda: communicator.allreduce(np.ones(3, np.complex128)),
        lambda: communicator.allreduce(np.ones(3, ">f4")),
        lambda: communicator.allreduce([1.0, 2.0]),
        lambda: communicator.allreduce(three, op="median"),
        lambda: communicator.allreduce(np.ones(3, np.bool_), op="avg"),
        lambda: communicator.broadcast(three, root=world_size),
        lambda: communicator.broadcast(three, root=-1),
        lambda: communicator.reduce(three, root=world_size),
        lambda: communicator.allgather(three, np.ones(3 * world_size + 1)),
        lambda: communicator.reduce_scatter(np.ones(3 * world_size + 1), three),
        lambda: communicator.allgather(three, np.ones(3 * world_size, np.float32)),
        lambda: communicator.allgather(three, np.ones(3 * world_size), counts=[3] * (world_size + 1)),
        lambda: communicator.allgather(three, np.ones(4 * world_size), counts=[4] * world_size),
        lambda: communicator.reduce_scatter(three, one, counts=[-1] * world_size),
        lambda: communicator.gather(three, np.ones(1) if rank == 0 else None, root=world_size),
        lambda: communicator.alltoall(
            np.ones(world_size + 1), np.ones(world_size + 1), send_counts=[1] * world_size
        ),
        lambda: communicator.alltoall(np.ones(world_size), np.ones(world_size, np.float32)),
        lambda: communicator.allreduce_group([three, np.ones(3, np.float32)]),
        lambda: communicator.allgather_group([], []),
        lambda: communicator.allgather_group([three], [np.ones(3 * world_size), three]),
        lambda: communicator.allgather_group(
            [three, np.ones(3, np.float32)], [np.ones(3 * world_size), np.ones(3 * world_size, np.float32)]
        ),
        lambda: communicator.reduce_scatter_group(
            [np.ones(3 * world_size)] * 2, [three, three], counts=[[3] * world_size]
        ),
        lambda: communicator.reduce_scatter_group(
            [np.ones(3 * world_size)] * 2, [three, np.ones(4)], counts=[[3] * world_size] * 2
        ),
    ]
    for timeout_s in (0, -1.0, math.nan, math.inf):
        bad += [
            lambda timeout_s=timeout_s: communicator.allreduce(three, timeout_s=timeout_s),
            lambda timeout_s=timeout_s: communicator.barrier_async(timeout_s=timeout_s),
        ]
        if world_size > 1:
            peer = (rank + 1) % world_size
            bad += [
                lambda timeout_s=timeout_s, peer=peer: communicator.send(three, to=peer, timeout_s=timeout_s),
                lambda timeout_s=timeout_s, peer=peer: communicator.recv(
                    three, source=peer, timeout_s=timeout_s
                ),
            ]
    _all_refused(communicator, bad)


def _read_only(communicator: Communicator) -> None:
    """Only arrays that an operation writes must be writable."""
    world_size, rank = communicator.world_size, communicator.rank
    fixed = np.ones(3)
    fixed.setflags(write=False)
    all_fixed = np.ones(3 * world_size)
    all_fixed.setflags(write=False)
    writing: list[Callable[[], object]] = [
        lambda: communicator.allreduce(fixed),
        lambda: communicator.allreduce_async(fixed),
        lambda: communicator.allreduce_group([np.ones(3), fixed]),
        lambda: communicator.allgather_group([np.ones(3)], [all_fixed]),
        lambda: communicator.reduce(fixed, root=0),
        lambda: communicator.allgather(np.ones(3), all_fixed),
        lambda: communicator.reduce_scatter(np.ones(3 * world_size), fixed),
        lambda: communicator.scatter(np.ones(3 * world_size) if rank == 0 else None, fixed, root=0),
        lambda: communicator.alltoall(np.ones(3 * world_size), all_fixed),
    ]
    if rank != 0:
        writing.append(lambda: communicator.broadcast(fixed, root=0))
        writing.append(lambda: communicator.recv(fixed, source=0))
    _all_refused(communicator, writing)
    array = fixed if rank == 0 else np.zeros(3)
    communicator.broadcast(array, root=0)
    assert array.tolist() == [1.0] * 3
    if world_size > 1 and rank < 2:
        array = fixed if rank == 0 else np.zeros(3)
        communicator.send(array, to=1) if rank == 0 else communicator.recv(array, source=0)
        assert array.tolist() == [1.0] * 3


def _all_refused(communicator: Communicator, calls: Iterable[Callable[[], object]]) -> None:
    for number, call in enumerate(calls):
        try:
            call()
        except ParamError:
            continue
        raise AssertionError(f"bad call {number} was accepted")
    communicator.barrier()
    assert communicator.failure is None


ARGUMENT_CHECKS: dict[str, Callable[[Communicator], None]] = {
    "bad arguments": _bad_arguments,
    "read-only arrays": _read_only,
}
