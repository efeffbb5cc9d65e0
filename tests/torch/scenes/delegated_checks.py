"""Collectives of CUDA tensors by the functions of torch.distributed, on two ranks, with CPU tensors.

They go to torch's own group over Gloo, whose methods take options of their own types alone, to NCCL's stand-in, or
through host memory.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.distributed_c10d import _coalescing_manager

from sparkdl.collective.nccl.opening import open_nccl_group
from sparkdl.torch import RendezvousStore
from sparkdl.torch.gpu.accelerator import TorchAccelerator, open_staged
from sparkdl.torch.gpu.nccl import NcclAccelerator
from tests.checks import Outcomes, checks_in, outcome_of
from tests.torch.scenes.host_lane import HostLane
from tests.torch.scenes.substitute_groups import DelegatingGroup, default_group

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.torch.submission import Accelerator
    from tests.run_ranks import RankEnvironment

SIZE = 2
TIMEOUT_S = 20.0
CPU = torch.device("cpu")


def checks_of(backend: str) -> list[str]:
    without = [check_messages_in_batches.__name__] if backend == "gloo" else []  # it has no coalescing
    return [name for name in checks_in(__name__) if name not in without]


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


def check_messages_in_batches() -> None:
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


def check_callbacks_of_a_communication_hook_start_collectives() -> None:
    torch.manual_seed(0)
    module = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        module(mine(2, 64)).sum().backward()
    gradients = [torch.zeros(64, 64) for _ in range(SIZE)]
    dist.all_gather(gradients, module.module.weight.grad)
    torch.testing.assert_close(*gradients)


def check_ranks_with_more_rows_continue_under_join() -> None:
    torch.manual_seed(0)
    module = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    with module.join(divide_by_initial_world_size=False):
        for _ in range(dist.get_rank() + 1):
            module.zero_grad()
            module(mine(1, 3)).backward()
    assert module.module.weight.grad.tolist() == [[2.0] * 3] if dist.get_rank() == 1 else True


def substitute_accelerator(
    backend: str, environment: RankEnvironment, communicator: Communicator
) -> Accelerator:
    store = RendezvousStore(environment.rendezvous, timeout_s=TIMEOUT_S)
    if backend == "gloo":
        prefixed = dist.PrefixStore("gloo/", store)
        gloo = dist.ProcessGroupGloo(prefixed, environment.rank, SIZE, timedelta(seconds=TIMEOUT_S))
        group = dist.ProcessGroup(store, environment.rank, SIZE)
        group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return TorchAccelerator(group)
    if backend == "NCCL":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(environment.rank)
        return NcclAccelerator(
            open_nccl_group(communicator, gpu=0, timeout_s=TIMEOUT_S), HostLane(), timeout_s=TIMEOUT_S
        )
    return open_staged(communicator, environment.rendezvous, store, HostLane(), TIMEOUT_S)


def run_on_rank(environment: RankEnvironment, backend: str) -> Outcomes:
    torch.set_num_threads(1)
    with environment.communicator() as communicator:
        store = RendezvousStore(environment.rendezvous, timeout_s=TIMEOUT_S)
        accelerator = substitute_accelerator(backend, environment, communicator)
        with default_group(DelegatingGroup, communicator, store, accelerator, TIMEOUT_S):
            return {name: outcome_of(globals()[name], communicator.rank) for name in checks_of(backend)}
