"""Scenes on two simulated hosts with NCCL's stand-in inside each; CPU tensors stand for GPU tensors."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch

from sparkdl.collective import Communicator
from sparkdl.torch import RendezvousStore
from sparkdl.torch.gpu.accelerator import open_hierarchical
from sparkdl.torch.gpu.hierarchical import HierarchicalAccelerator
from tests.collective.scenes.failure_scenes import LONG_S, Outcome, error_of
from tests.run_ranks import RankEnvironment
from tests.torch.scenes.host_lane import HostLane

HOSTS = (0, 0, 1, 1)
REMOTE_ERROR = 6
SYSTEM_ERROR = 2
BLOCK = 5 << 18
ELEMENTS = 4 * BLOCK + 1
"""Number of float32 elements: several pieces, and the last one does not divide evenly."""


def play(environment: RankEnvironment) -> dict[str, Outcome]:
    """Play all scenes, each on its own groups."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(environment.rank)
    outcomes = {}
    for name, scene in SCENES.items():
        environment.rendezvous.add(f"{name} begins", 1)
        with environment.open(name=name, host_of_rank=HOSTS, timeout_s=LONG_S) as communicator:
            outcomes[name] = scene(environment, communicator)
        os.environ["NCCL_STAND_IN"] = ""
    return outcomes


def lose_a_rank(environment: RankEnvironment) -> Outcome:
    """Rank 3 dies after a first sum; the others continue."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(environment.rank)
    communicator = environment.open(host_of_rank=HOSTS, timeout_s=LONG_S)
    group = open_group(environment, communicator)
    add_up(group, 8)
    if environment.rank == 3:
        for rank in range(3):
            environment.rendezvous.get(f"first sum/{rank}", LONG_S)
        os.kill(os.getpid(), signal.SIGKILL)
    environment.rendezvous.set(f"first sum/{environment.rank}", b"")
    seen = error_of(lambda: add_up(group, 1 << 20))
    seen["again"] = error_of(lambda: add_up(group, 8))
    seen["to close"] = error_of(group.shutdown)
    communicator.close()
    return seen


def sums(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """Sum some MiB; return whether the result is right, and how many bytes each group moved for it."""
    group = open_group(environment, communicator)
    mine = [torch.arange(ELEMENTS) % 7 + rank for rank in range(len(HOSTS))]
    tensor = mine[environment.rank].float()
    group.allreduce([tensor]).wait()
    seen: Outcome = {"is right": torch.equal(tensor, sum(mine).float())}
    whole = mine[environment.rank][:-1].float()
    block = torch.zeros(BLOCK)
    group._reduce_scatter_base(block, whole).wait()
    own = slice(environment.rank * BLOCK, (environment.rank + 1) * BLOCK)
    seen["scattered"] = torch.equal(block, sum(mine)[own].float())
    gathered = torch.zeros(4 * BLOCK)
    group._allgather_base(gathered, block).wait()
    seen["gathered"] = torch.equal(gathered, sum(mine)[:-1].float())
    seen["moved"] = {
        (row.process_set.rpartition("/")[2], row.operation): row.bytes
        for row in communicator.report().operations
        if row.bytes > 1 << 16
    }
    group.shutdown()
    return seen


def nccl_fails(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """NCCL reports an error on rank 0 alone."""
    group = open_group(environment, communicator)
    add_up(group, 8)
    communicator.barrier()
    if environment.rank == 0:
        os.environ["NCCL_STAND_IN"] = f"state={REMOTE_ERROR}"
    seen = error_of(lambda: add_up(group, 8))
    group.shutdown()
    return seen


def late_rank(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """Rank 3 does not join before the others have given up."""
    group = open_group(environment, communicator, timeout_s=1.0)
    seen: Outcome = {}
    if environment.rank == 3:
        for rank in range(3):
            environment.rendezvous.get(f"rank {rank} gave up", 30.0)
    else:
        seen = error_of(lambda: add_up(group, 8))
        environment.rendezvous.set(f"rank {environment.rank} gave up", b"")
    seen["again"] = error_of(lambda: add_up(group, 8))
    group.shutdown()
    return seen


def opening_fails(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """NCCL cannot be opened on the second host."""
    if HOSTS[environment.rank] == 1:
        os.environ["NCCL_STAND_IN"] = f"open={SYSTEM_ERROR}"
    seen = error_of(lambda: open_group(environment, communicator))
    os.environ["NCCL_STAND_IN"] = ""
    communicator.barrier()
    group = open_group(environment, communicator)
    add_up(group, 8)
    group.shutdown()
    return seen


SCENES: dict[str, Callable[[RankEnvironment, Communicator], Outcome]] = {
    "sums": sums,
    "NCCL fails": nccl_fails,
    "late rank": late_rank,
    "opening fails": opening_fails,
}


def open_group(
    environment: RankEnvironment, communicator: Communicator, timeout_s: float = LONG_S
) -> HierarchicalAccelerator:
    store = RendezvousStore(environment.rendezvous, timeout_s=LONG_S)
    return open_hierarchical(communicator, environment.rendezvous, store, HostLane(), timeout_s, gpu=0)


def add_up(group: HierarchicalAccelerator, count: int) -> None:
    tensor = torch.ones(count)
    group.allreduce([tensor]).wait()
    assert float(tensor[-1]) == len(HOSTS)
