"""Collectives of CUDA tensors that torch's own group carries out, on two ranks: Gloo and CPU tensors stand for NCCL.

The methods of torch's group take options of their own types alone, unlike those of sparkdl's backends.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager

import sparkdl.torch
from sparkdl.torch import RendezvousStore
from sparkdl.torch.process_group import SparkdlProcessGroup
from tests.checks import Outcomes, checks_in, outcome_of
from tests.run_ranks import RankEnvironment

SIZE = 2
TIMEOUT_S = 20.0
CPU = torch.device("cpu")


def mine(*shape: int) -> torch.Tensor:
    return torch.full(shape or (3,), float(dist.get_rank() + 1))


def check_all_reduce_alone_and_coalesced() -> None:
    for asynchronous in (False, True):
        tensor = mine()
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if work is not None:
            work.wait()
        assert tensor.tolist() == [3.0] * 3
    tensors = [mine(), mine(2, 2)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all((tensor == 3.0).all() for tensor in tensors)


def check_reductions_with_a_place_for_the_result() -> None:
    tensor = mine()
    dist.reduce(tensor, 1)
    assert dist.get_rank() == 0 or tensor.tolist() == [3.0] * 3
    block = torch.zeros(2)
    dist.reduce_scatter_tensor(block, mine(2 * SIZE))
    assert block.tolist() == [3.0, 3.0]
    dist.reduce_scatter(block, [mine(2), mine(2)])
    assert block.tolist() == [3.0, 3.0]


def check_collectives_that_move_data() -> None:
    tensor = mine()
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [2.0] * 3
    whole = torch.zeros(SIZE)
    dist.all_gather_into_tensor(whole, mine(1))
    assert whole.tolist() == [1.0, 2.0]
    parts = [torch.zeros(1) for _ in range(SIZE)]
    dist.all_gather(parts, mine(1))
    assert torch.cat(parts).tolist() == [1.0, 2.0]
    is_root = dist.get_rank() == 0
    dist.gather(mine(1), parts if is_root else None)
    part = torch.zeros(1)
    dist.scatter(part, parts if is_root else None)
    assert part == mine(1)
    exchanged = torch.zeros(SIZE)
    dist.all_to_all_single(exchanged, mine(SIZE))
    assert exchanged.tolist() == [1.0, 2.0]
    dist.barrier()


def check_messages_alone_and_in_batches() -> None:
    other = 1 - dist.get_rank()
    received = torch.zeros(3)
    for batch in (
        [dist.P2POp(dist.isend, mine(), other), dist.P2POp(dist.irecv, received, other)],
        [dist.P2POp(dist.irecv, received, other), dist.P2POp(dist.isend, mine(), other)],
    ):
        received.zero_()
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert received.tolist() == [other + 1.0] * 3


def check_options_may_be_left_out() -> None:
    group, whole, block = dist.group.WORLD, torch.zeros(SIZE), torch.zeros(1)
    tensor = mine()
    group.allreduce([tensor]).wait()
    group.allreduce_coalesced([tensor]).wait()
    group.broadcast([tensor]).wait()
    assert tensor.tolist() == [6.0] * 3
    group._allgather_base(whole, mine(1)).wait()
    group._reduce_scatter_base(block, whole).wait()
    group.allgather([[torch.zeros(1), torch.zeros(1)]], [mine(1)]).wait()
    group.alltoall_base(whole, mine(SIZE)).wait()
    assert (block.item(), whole.tolist()) == (2.0 * (dist.get_rank() + 1), [1.0, 2.0])


def check_data_parallel_training() -> None:
    torch.manual_seed(0)
    module = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    module(mine(1, 3)).backward()
    assert module.module.weight.grad.tolist() == [[1.5] * 3]


class _Delegating(SparkdlProcessGroup):
    """The group that torch sees, with all tensors for its accelerator."""

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self._accelerator

    def _allreduce_plainly(self, tensor: torch.Tensor, opts: Any) -> None:
        """The fast path is for CPU tensors."""


def run_on_rank(environment: RankEnvironment) -> Outcomes:
    torch.set_num_threads(1)
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=TIMEOUT_S)
        group = dist.group.WORLD
        store = RendezvousStore(environment.rendezvous, timeout_s=TIMEOUT_S)
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo/", store), environment.rank, SIZE, timedelta(seconds=TIMEOUT_S)
        )
        torchs = dist.ProcessGroup(store, environment.rank, SIZE)
        torchs._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        torchs._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._accelerator = torchs
        group.__class__ = _Delegating
        outcomes = {name: outcome_of(globals()[name], communicator.rank) for name in checks_in(__name__)}
        sparkdl.torch.destroy_process_group()
    return outcomes
