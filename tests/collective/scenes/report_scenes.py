"""Scenes for the tests of the communication report. One world plays them one after the other."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.errors import MismatchError
from tests.collective.eventually import eventually
from tests.collective.late_join import joined_last

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment

Outcome = dict[str, Any]

LATE_RANK = 1
NUM_LATE = 5
WAIT_S = 0.05
LONG_WAIT_S = 0.2
"""Many times the time that a rank may need from the beginning of an operation to its wait."""


def play(environment: RankEnvironment, hosts: Sequence[int]) -> dict[str, Outcome]:
    """Play all scenes; return by name what this rank saw of each."""
    outcomes = {}
    for name, scene in SCENES.items():
        with environment.open(name=name, host_of_rank=tuple(hosts), timeout_s=120.0) as communicator:
            outcomes[name] = scene(communicator)
    return outcomes


def counted(communicator: Communicator) -> Outcome:
    """Operations of all kinds on the communicator and on process sets."""
    world_size, rank = communicator.world_size, communicator.rank
    block, blocks = np.ones(10, np.float32), np.ones(10 * world_size, np.float32)
    for _ in range(600):
        communicator.allreduce(block)
    communicator.allreduce_group([block, block.copy()])
    communicator.allreduce_async(np.ones(100_000, np.float32)).wait()
    communicator.reduce_scatter(blocks, block)
    communicator.allgather(block, blocks)
    counts = list(range(1, world_size + 1))
    communicator.allgather(np.ones(rank + 1), np.ones(sum(counts)), counts=counts)
    communicator.broadcast(block, root=0)
    communicator.reduce(block, root=0)
    communicator.gather(block, blocks if rank == 0 else None, root=0)
    communicator.scatter(blocks if rank == 0 else None, block, root=0)
    communicator.alltoall(blocks, np.empty_like(blocks))
    communicator.barrier()
    for _ in range(2):
        pair = communicator.split([0, 1], "pair")
        with pair:
            if pair.is_member:
                pair.broadcast(block, root=1)
    del pair
    report = communicator.report()
    return {"dict": report.as_dict(), "table": str(report), "metrics": report.as_metrics()}


def late(communicator: Communicator) -> Outcome:
    """One rank comes late to synchronous operations."""
    communicator.barrier()
    communicator.report(reset=True)
    calls_s = 0.0
    for number in range(NUM_LATE):
        with joined_last(communicator, "allreduce", late_rank=LATE_RANK, key=f"late {number}", wait_s=WAIT_S):
            start = time.monotonic()
            communicator.allreduce(np.ones(10))
            calls_s += time.monotonic() - start
    seen = {"own": communicator.report().as_dict(), "calls_s": calls_s}
    world = communicator.gather_report()
    if world is not None:
        seen |= {"world": world.as_dict(), "world table": str(world)}
    # Making a report must not change it.
    seen["after"] = communicator.report().as_dict()
    return seen


def hidden(communicator: Communicator) -> Outcome:
    """Operations that no rank waits for while they run, and others that a rank does wait for."""
    shares = {}
    for name in ("hidden", "exposed"):
        communicator.barrier()
        communicator.report(reset=True)
        late = joined_last(communicator, "allreduce", late_rank=LATE_RANK, key=name, wait_s=LONG_WAIT_S)
        if name == "hidden":
            with late:
                handle = communicator.allreduce_async(np.ones(10))
                assert eventually(handle.done, timeout_s=20.0)
                handle.wait()
        elif communicator.rank == LATE_RANK:
            with late:
                communicator.allreduce_async(np.ones(10)).wait()
        else:
            handle = communicator.allreduce_async(np.ones(10))
            # Only here, so that the late rank stays away until this rank is about to block.
            with late:
                handle.wait()
        (row,) = communicator.report().operations
        shares[name] = {"exposed": row.exposed_share, "busy": row.busy_s, "waiting": row.waiting_share}
    return shares


def failing(communicator: Communicator) -> Outcome:
    """An operation that fails with a mismatch, and one that succeeds."""
    try:
        communicator.allreduce(np.ones(2 + communicator.rank))
    except MismatchError:
        communicator.allreduce(np.ones(2))
    (row,) = communicator.report().operations
    return {"count": row.count, "failed": row.num_failed, "bytes": row.bytes}


def namesakes(communicator: Communicator) -> Outcome:
    """Two process sets with the same name; in one of them a rank is late."""
    for number, ranks in enumerate(([0, 1], [1, 2]), start=1):
        pair = communicator.split(ranks, "pair")
        if not pair.is_member:
            continue
        with pair:
            pair.barrier()
            for repetition in range(number * NUM_LATE):
                late = joined_last(
                    pair,
                    "allreduce",
                    late_rank=ranks.index(LATE_RANK),
                    key=f"pair {repetition}",
                    wait_s=WAIT_S,
                )
                with late if number == 2 else nullcontext():
                    pair.allreduce(np.ones(10))
    world = communicator.gather_report()
    own = communicator.report().as_dict()["process_sets"]
    return {"own": own} | ({} if world is None else {"world": world.as_dict(), "table": str(world)})


SCENES = {"namesakes": namesakes, "counted": counted, "late": late, "hidden": hidden, "failing": failing}
