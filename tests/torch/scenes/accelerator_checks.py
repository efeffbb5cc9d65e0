"""Checks of sparkdl's backends for CUDA tensors, on any device and with any number of ranks."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    _make_nccl_premul_sum,
)

from sparkdl.collective import Communicator
from sparkdl.collective.nccl.opening import open_nccl_group
from sparkdl.errors import CommunicatorAbortedError, ParamError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.torch import RendezvousStore
from sparkdl.torch.gpu.accelerator import open_hierarchical, open_staged
from sparkdl.torch.gpu.lanes import GpuLane
from sparkdl.torch.gpu.nccl import NcclAccelerator
from sparkdl.torch.gpu.staged import StagedAccelerator
from tests.checks import outcome_of
from tests.run_ranks import RankEnvironment

TIMEOUT_S = 20.0


class Scene:
    """The group of one backend, and the data of the ranks, on torch's default device."""

    def __init__(self, group: Any, communicator: Communicator) -> None:
        self.group = group
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.world_size
        self.last = self.size - 1

    @staticmethod
    def tensor_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(rank)
        values = torch.randint(1, 4, shape or (4, 3), generator=generator, device="cpu")
        return values.to(torch.get_default_device(), dtype)

    def mine(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.tensor_of(self.rank, *shape, dtype=dtype)

    def everyones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.stack([self.tensor_of(rank, *shape, dtype=dtype) for rank in range(self.size)])


def check_allreduce_reduces_by_every_operation(scene: Scene) -> None:
    all_ranks = scene.everyones()
    expected = {
        dist.ReduceOp.SUM: all_ranks.sum(0),
        dist.ReduceOp.AVG: all_ranks.mean(0),
        dist.ReduceOp.MIN: all_ranks.amin(0),
        dist.ReduceOp.MAX: all_ranks.amax(0),
        dist.ReduceOp.PRODUCT: all_ranks.prod(0),
        _make_nccl_premul_sum(0.5): 0.5 * all_ranks.sum(0),
    }
    for op, reference in expected.items():
        tensor = scene.mine()
        work = scene.group.allreduce([tensor], reducing(AllreduceOptions(), op))
        assert work.wait()
        torch.testing.assert_close(tensor, reference, msg=str(op))
        assert work.is_completed()
        assert work.is_success()


def check_allreduce_takes_every_dtype(scene: Scene) -> None:
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.complex64,
    ):
        tensor = scene.mine(dtype=dtype)
        scene.group.allreduce([tensor]).wait()
        torch.testing.assert_close(tensor, scene.everyones(dtype=dtype).sum(0).to(dtype), msg=str(dtype))
    flag = torch.tensor([scene.rank == scene.last, False])
    scene.group.allreduce([flag]).wait()
    assert flag.tolist() == [True, False]


def check_tensors_with_gaps_and_scalars_are_reduced_in_place(scene: Scene) -> None:
    whole = torch.zeros(6, 5)
    part = whole[1:5:2, 1:4].T
    part.copy_(scene.mine(3, 2))
    scalar = torch.tensor(float(scene.rank))
    scene.group.allreduce_coalesced([part, scalar]).wait()
    torch.testing.assert_close(part, scene.everyones(3, 2).sum(0))
    assert whole.sum() == part.sum()
    assert scalar == sum(range(scene.size))


def check_broadcast_gives_the_roots_tensors(scene: Scene) -> None:
    for root in range(scene.size):
        tensors = [scene.mine(), scene.mine(2, 2, dtype=torch.int16).T]
        scene.group.broadcast(tensors, rooted(BroadcastOptions(), root)).wait()
        torch.testing.assert_close(tensors[0], scene.tensor_of(root))
        torch.testing.assert_close(tensors[1], scene.tensor_of(root, 2, 2, dtype=torch.int16).T)


def check_reduce_changes_the_roots_tensor_alone(scene: Scene) -> None:
    tensor = scene.mine(dtype=torch.int16)
    scene.group.reduce([tensor], rooted(ReduceOptions(), scene.last)).wait()
    all_ranks = scene.everyones(dtype=torch.int16)
    expected = all_ranks.sum(0).to(torch.int16) if scene.rank == scene.last else all_ranks[scene.rank]
    torch.testing.assert_close(tensor, expected)


def check_allgather_fills_one_tensor(scene: Scene) -> None:
    output = torch.zeros(scene.size, 4, 3)
    output[scene.rank] = scene.mine()
    scene.group._allgather_base(output, output[scene.rank]).wait()
    torch.testing.assert_close(output, scene.everyones())
    outputs = [torch.zeros(scene.size, 2, dtype=dtype) for dtype in (torch.float64, torch.bool)]
    inputs = [scene.mine(2).to(output.dtype) for output in outputs]
    scene.group.allgather_into_tensor_coalesced(outputs, inputs).wait()
    for output in outputs:
        torch.testing.assert_close(output, scene.everyones(2).to(output.dtype))


def check_allgather_fills_lists_of_unequal_tensors(scene: Scene) -> None:
    outputs = [torch.zeros(2, rank) for rank in range(scene.size)]
    outputs[scene.last] = torch.zeros(scene.last, 2).T
    scene.group.allgather([outputs], [scene.mine(2, scene.rank)]).wait()
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(output, scene.tensor_of(rank, 2, rank))


def check_reduce_scatter_keeps_the_own_block(scene: Scene) -> None:
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, scene.size)):
        options = reducing(ReduceScatterOptions(), op)
        expected = scene.everyones(2 * scene.size, 2).sum(0)[2 * scene.rank : 2 * scene.rank + 2] / divisor
        output = torch.zeros(2, 2).T
        scene.group._reduce_scatter_base(output, scene.mine(2 * scene.size, 2), options).wait()
        torch.testing.assert_close(output, expected)
        output = torch.zeros(2, 2)
        scene.group.reduce_scatter([output], [list(scene.mine(2 * scene.size, 2).split(2))], options).wait()
        torch.testing.assert_close(output, expected)
    blocks = [torch.zeros(1, dtype=torch.int16), torch.zeros(1, dtype=torch.complex64)]
    inputs = [scene.mine(scene.size).to(block.dtype) for block in blocks]
    scene.group.reduce_scatter_tensor_coalesced(blocks, inputs, ReduceScatterOptions()).wait()
    for block in blocks:
        total = scene.everyones(scene.size).to(block.dtype).sum(0)[scene.rank : scene.rank + 1]
        torch.testing.assert_close(block, total.to(block.dtype))


def check_gather_and_scatter_go_to_and_from_the_root(scene: Scene) -> None:
    is_root = scene.rank == scene.last
    outputs = [torch.zeros(4, 3) for _ in range(scene.size)] if is_root else []
    scene.group.gather([outputs], [scene.mine()], rooted(GatherOptions(), scene.last)).wait()
    if is_root:
        torch.testing.assert_close(torch.stack(outputs), scene.everyones())
    output = torch.zeros(4, 3)
    inputs = [list(scene.everyones())] if is_root else []
    scene.group.scatter([output], inputs, rooted(ScatterOptions(), scene.last)).wait()
    torch.testing.assert_close(output, scene.mine())


def check_alltoall_exchanges_blocks(scene: Scene) -> None:
    rows = 2 * scene.size
    output = torch.zeros(rows, 2)
    scene.group.alltoall_base(output, scene.mine(rows, 2), [], []).wait()
    torch.testing.assert_close(
        output, scene.everyones(rows, 2)[:, 2 * scene.rank : 2 * scene.rank + 2].reshape(rows, 2)
    )
    # Rank r sends s rows to rank s.
    splits = list(range(scene.size))
    output = torch.zeros(scene.size * scene.rank, 2)
    scene.group.alltoall_base(output, scene.mine(sum(splits), 2), [scene.rank] * scene.size, splits).wait()
    start = sum(range(scene.rank))
    torch.testing.assert_close(
        output, scene.everyones(sum(splits), 2)[:, start : start + scene.rank].reshape(output.shape)
    )
    outputs = [torch.zeros(rank + 1) for rank in range(scene.size)]
    scene.group.alltoall(
        outputs, [torch.full((scene.rank + 1,), float(to)) for to in range(scene.size)]
    ).wait()
    for output in outputs:
        torch.testing.assert_close(output, torch.full_like(output, float(scene.rank)))


def check_messages_reach_their_ranks_where_all_ranks_send_first(scene: Scene) -> None:
    """Both the neighbors of a ring and a pair; messages larger than the buffers of any transport."""
    if scene.size == 1:
        pytest.skip("needs a rank that sends to another one")
    device = torch.get_default_device()
    elements = 6_000_000
    for step in (1, -1):
        to, source = (scene.rank + step) % scene.size, (scene.rank - step) % scene.size
        received = torch.zeros(elements)
        scene.group._start_coalescing(device)
        scene.group.send([torch.full((elements,), float(scene.rank))], to, 0)
        scene.group.recv([received], source, 0)
        assert scene.group._end_coalescing(device).wait()
        assert received.min() == received.max() == source


def check_coalesced_collectives_have_their_results_after_the_wait(scene: Scene) -> None:
    device = torch.get_default_device()
    tensors = [scene.mine(), scene.mine(2, 2)]
    scene.group._start_coalescing(device)
    for tensor in tensors:
        scene.group.allreduce([tensor])
    together = scene.group._end_coalescing(device)
    assert together.wait()
    torch.testing.assert_close(tensors, [scene.everyones().sum(0), scene.everyones(2, 2).sum(0)])
    assert together.is_completed()
    assert together.is_success()
    assert len(together.get_future().wait()) == len(tensors)
    scene.group._start_coalescing(device)
    assert scene.group._end_coalescing(device) is None


def check_message_does_not_wait_for_an_earlier_collective(scene: Scene) -> None:
    if scene.size == 1 or not isinstance(scene.group, StagedAccelerator):
        pytest.skip("is about host memory: NCCL's operations follow each other on one stream")
    tensor, total = scene.mine(), scene.mine()
    if scene.rank == 0:
        collective = scene.group.allreduce([total])
        scene.group.send([tensor], 1, 3).wait()
    else:
        if scene.rank == 1:
            scene.group.recv([tensor], 0, 3).wait()
        collective = scene.group.allreduce([total])
    collective.wait()
    torch.testing.assert_close(total, scene.everyones().sum(0))


# Callbacks return what they have waited for: a waiter's stream waits for the tensors of the result, for nothing else.
def check_callback_of_a_message_may_wait_for_another(scene: Scene) -> None:
    if scene.size == 1:
        pytest.skip("needs a rank that sends to another one")
    if scene.rank > 1:
        return
    first, second = scene.mine(), scene.mine()
    if scene.rank == 0:
        scene.group.send([first], 1, 4).wait()
        scene.group.send([second], 1, 5).wait()
        return

    def receive_the_second(_: torch.futures.Future[Any]) -> torch.Tensor:
        scene.group.recv([second], 0, 5).wait()
        return second

    received = scene.group.recv([first], 0, 4).get_future().then(receive_the_second).wait()
    torch.testing.assert_close(received, scene.tensor_of(0))


def check_callback_of_a_collective_may_wait_for_a_later_one(scene: Scene) -> None:
    first, second = scene.mine(), scene.mine()
    future = scene.group.allreduce([first]).get_future()

    def reduce_the_second(_: torch.futures.Future[Any]) -> torch.Tensor:
        scene.group.allreduce([second]).wait()
        return second

    torch.testing.assert_close(future.then(reduce_the_second).wait(), scene.everyones().sum(0))


def check_dropped_works_live_on_for_those_who_wait_in_cplusplus(scene: Scene) -> None:
    tensor = scene.mine()
    work = scene.group.allreduce([tensor])
    reference = weakref.ref(work)
    del work
    gc.collect()
    assert reference() is not None
    assert reference().wait()
    torch.testing.assert_close(tensor, scene.everyones().sum(0))


def check_large_tensors_of_dropped_works_are_released(scene: Scene) -> None:
    references = []
    for _ in range(8):
        tensor = torch.ones(2 << 20)  # two of them have the bytes that are kept
        references.append(weakref.ref(tensor.untyped_storage()))
        work = scene.group.allreduce([tensor])
        while not work.is_completed():
            time.sleep(0.001)
        del tensor, work
    assert sum(reference() is not None for reference in references) <= 4


def check_message_that_cannot_start_fails_its_work_and_its_future(scene: Scene) -> None:
    if not isinstance(scene.group, StagedAccelerator):
        pytest.skip("is about host memory: NCCL sends a message to the own rank")
    work = scene.group.send([scene.mine()], scene.rank, 0)
    with pytest.raises(ParamError, match="cannot exchange messages"):
        work.wait()
    with pytest.raises(RuntimeError, match="cannot exchange messages"):
        scene.group.send([scene.mine()], scene.rank, 0).get_future().wait()


def check_tensors_of_messages_are_free_after_the_wait(scene: Scene) -> None:
    if scene.size == 1:
        pytest.skip("needs a rank that sends to another one")
    if scene.rank > 1:
        return
    gc.collect()
    gc.disable()  # tensors that only the garbage collector frees fill a GPU, whose bytes it does not count
    try:
        references = []
        for number in range(20):
            tensor = torch.zeros(100) if scene.rank == 1 else torch.ones(100)
            references.append(weakref.ref(tensor))
            move = scene.group.recv if scene.rank == 1 else scene.group.send
            move([tensor], 1 - scene.rank, number).wait()
            del tensor
        deadline = Deadline(TIMEOUT_S)
        while sum(reference() is not None for reference in references) > 1 and not deadline.expired:
            time.sleep(0.01)
        assert sum(reference() is not None for reference in references) <= 1
    finally:
        gc.enable()


def check_future_has_the_outputs(scene: Scene) -> None:
    tensor = scene.mine()
    future = scene.group.allreduce([tensor]).get_future()
    (output,) = future.wait()
    assert output is tensor
    torch.testing.assert_close(tensor, scene.everyones().sum(0))


def check_wrong_shapes_are_refused(scene: Scene) -> None:
    with pytest.raises(ParamError):
        scene.group._allgather_base(torch.zeros(2 * scene.size + 1), torch.zeros(2)).wait()
    with pytest.raises(ParamError):
        scene.group.alltoall_base(torch.zeros(4), torch.zeros(4), [7], [7]).wait()


def check_abort_fails_what_follows_on_all_ranks(scene: Scene) -> None:
    """This is the last check: the group is unusable afterwards."""
    scene.communicator.barrier()  # all ranks have finished the earlier checks
    if scene.rank == scene.last:
        scene.group.abort()
    with pytest.raises(CommunicatorAbortedError) as caught:
        scene.group.allreduce([scene.mine()]).wait()
    assert f"rank {scene.last} aborted" in str(caught.value)
    assert isinstance(scene.group.failure, CommunicatorAbortedError)


CHECKS: dict[str, Callable[[Scene], None]] = {
    name: check for name, check in list(globals().items()) if name.startswith("check_")
}


def reducing(options: Any, op: Any) -> Any:
    options.reduceOp = op
    return options


def rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def run_checks(
    environment: RankEnvironment,
    backend: str,
    lane: GpuLane,
    device: torch.device,
    hosts: Sequence[int] | None = None,
) -> dict[str, str | None]:
    """Run each check on new ranks, with tensors on a device; return for each its failure, or None."""
    torch.set_num_threads(1)
    with environment.open(host_of_rank=hosts) as communicator, device:
        store = RendezvousStore(environment.rendezvous, timeout_s=TIMEOUT_S)
        if backend == "sparkdl":
            nccl = open_nccl_group(communicator, gpu=device.index or 0, timeout_s=TIMEOUT_S)
            group: Any = NcclAccelerator(nccl, lane, timeout_s=TIMEOUT_S)
        elif backend == "hierarchical":
            gpu = device.index or 0
            group = open_hierarchical(communicator, environment.rendezvous, store, lane, TIMEOUT_S, gpu=gpu)
        else:
            group = open_staged(communicator, environment.rendezvous, store, lane, TIMEOUT_S)
        scene = Scene(group, communicator)
        outcomes = {name: outcome_of(partial(check, scene), scene.rank) for name, check in CHECKS.items()}
        group.shutdown()
    return outcomes
