"""Every collective of torch.distributed gives what one process computes from the tensors of all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import ReduceScatterOptions
from torch.distributed.distributed_c10d import _coalescing_manager

from sparkdl.collective import current_communicator
from sparkdl.errors import MismatchError, ParamError
from tests.checks import checks_in, require
from tests.torch.checks import run_checks
from tests.torch.scenes.rank_tensors import DTYPES, everyones, rank_and_size, tensor_of


def check_allgather_joins_in_order_of_rank_for_every_dtype() -> None:
    rank, size = rank_and_size()
    for dtype in (*DTYPES, torch.bool, torch.complex64):
        gathered = torch.empty(size * 5, 3, dtype=dtype)
        dist.all_gather_into_tensor(gathered, tensor_of(rank, dtype))
        torch.testing.assert_close(gathered.view(size, 5, 3), everyones(dtype))
        parts = [torch.empty(5, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, tensor_of(rank, dtype))
        torch.testing.assert_close(torch.stack(parts), everyones(dtype))


def check_allgather_takes_a_slice_of_its_output_as_input() -> None:
    rank, size = rank_and_size()
    output = torch.zeros(size * 4)
    own = output[rank * 4 : (rank + 1) * 4]
    own.fill_(rank + 1)
    dist.all_gather_into_tensor(output, own)
    torch.testing.assert_close(output, torch.arange(1.0, size + 1).repeat_interleave(4))


def check_tensors_of_differing_dtypes_are_refused_before_anything_is_sent() -> None:
    rank, size = rank_and_size()
    group, own = dist.group.WORLD, torch.arange(4.0)
    others = [torch.zeros(4, dtype=torch.int32) for _ in range(size)]
    own_blocks, other_blocks = list(own.chunk(size)), list(others[0].chunk(size))
    calls = [
        lambda: group.allgather_coalesced([[tensor] for tensor in others], [own]),
        lambda: group.allgather([others], [own]),
        lambda: group.alltoall(other_blocks, own_blocks),
        lambda: group.all_to_all_single(others[0], own),
        lambda: group.reduce_scatter([other_blocks[0]], [own_blocks]),
    ]
    if rank == 0:  # the root alone has both
        calls += [lambda: group.gather([others], [own]), lambda: group.scatter([own], [others])]
    for call in calls:
        with pytest.raises(ParamError, match=r"of one dtype, and these have torch\."):
            call()
    dist.barrier()


def check_tensors_on_the_cpu_are_served_whatever_the_default_device_is() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    flags, block = torch.tensor([1 << rank] * size), torch.zeros(1, dtype=torch.int64)
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (size,))
    group, options = dist.group.WORLD, ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.BOR
    with torch.device(
        "meta"
    ):  # as torch.set_default_device("cuda"), which functions of torch.distributed put aside
        group._reduce_scatter_base(block, flags, options).wait()
        group.allreduce([sparse]).wait()
        group.allreduce([flags]).wait()
        group.barrier().wait()
    assert block.tolist() == [(1 << size) - 1]
    assert sparse.to_dense().tolist() == [1.0] * size
    assert flags.tolist() == [(1 << size) - 1] * size


def check_expanded_tensors_get_the_value_that_they_hold_once() -> None:
    rank, size = rank_and_size()
    held = torch.full((3, 1), rank + 1.0)
    dist.all_reduce(held.expand(3, 4))
    assert held.flatten().tolist() == [size * (size + 1) / 2] * 3
    if rank == 0:
        dist.broadcast(torch.arange(12.0).view(3, 4), 0)
    else:
        with pytest.raises(ParamError, match="share memory"):
            dist.broadcast(held.expand(3, 4), 0)


def check_allgather_of_differing_sizes_fills_lists() -> None:
    rank, size = rank_and_size()
    parts = [torch.empty(r, 2) for r in range(size)]
    dist.all_gather(parts, torch.full((rank, 2), float(rank)))
    assert all((part == r).all() and part.shape == (r, 2) for r, part in enumerate(parts))


def check_reduce_scatter_averages_where_it_is_asked_to() -> None:
    rank, size = rank_and_size()
    for dtype in (torch.float32, torch.bfloat16):
        source = tensor_of(rank, dtype, (8, 3))
        output = torch.empty(8 // size, 3, dtype=dtype)
        dist.reduce_scatter_tensor(output, source, dist.ReduceOp.AVG)
        mean = everyones(torch.float32, (8, 3)).mean(0).to(dtype)
        torch.testing.assert_close(output, mean.chunk(size)[rank], rtol=0, atol=0)
        torch.testing.assert_close(source, tensor_of(rank, dtype, (8, 3)))
        dist.reduce_scatter(output, list(source.chunk(size)))
        torch.testing.assert_close(output, everyones(dtype, (8, 3)).sum(0).chunk(size)[rank])


def check_reduce_scatter_takes_entries_of_differing_sizes() -> None:
    rank, size = rank_and_size()
    for dtype in (torch.float32, torch.complex64):
        entries = [tensor_of(rank, dtype, (other + 1, 2)) for other in range(size)]
        output = torch.empty(rank + 1, 2, dtype=dtype)
        dist.reduce_scatter(output, entries)
        torch.testing.assert_close(output, everyones(dtype, (rank + 1, 2)).sum(0))


def check_reduce_scatter_may_write_into_its_input() -> None:
    rank, size = rank_and_size()
    source = tensor_of(rank, shape=(8, 3))
    output = source.chunk(size)[rank]
    dist.reduce_scatter_tensor(output, source)
    torch.testing.assert_close(output, everyones(shape=(8, 3)).sum(0).chunk(size)[rank])


def check_broadcast_copies_from_any_root() -> None:
    rank, size = rank_and_size()
    for root in range(size):
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            tensor = tensor_of(rank, dtype)
            dist.broadcast(tensor, root)
            torch.testing.assert_close(tensor, tensor_of(root, dtype))


def check_reduce_changes_the_root_alone() -> None:
    rank, size = rank_and_size()
    tensor = tensor_of(rank)
    dist.reduce(tensor, size - 1)
    torch.testing.assert_close(tensor, everyones().sum(0) if rank == size - 1 else tensor_of(rank))
    flags = torch.tensor([1 << rank, 8])
    dist.reduce(flags, 0, dist.ReduceOp.BOR)
    assert flags.tolist() == ([(1 << size) - 1, 8] if rank == 0 else [1 << rank, 8])


def check_gather_and_scatter_are_each_others_inverse() -> None:
    rank, size = rank_and_size()
    root = size - 1
    parts = [torch.empty(5, 3) for _ in range(size)] if rank == root else None
    dist.gather(tensor_of(rank), parts, dst=root)
    if parts is not None:
        torch.testing.assert_close(torch.stack(parts), everyones())
    output = torch.empty(5, 3)
    dist.scatter(output, parts, src=root)
    torch.testing.assert_close(output, tensor_of(rank))


def check_alltoall_exchanges_equal_and_unequal_blocks() -> None:
    rank, size = rank_and_size()
    source = torch.arange(size * 2.0) + 100 * rank
    output = torch.empty(size * 2)
    dist.all_to_all_single(output, source)
    expected = torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(size)])
    torch.testing.assert_close(output, expected)
    # Rank r sends r + other + 1 rows to the other, so sizes differ by sender and receiver.
    sent = [rank + other + 1 for other in range(size)]
    source = torch.cat([torch.full((count, 3), 10.0 * rank + other) for other, count in enumerate(sent)])
    output = torch.empty(sum(sent), 3)
    dist.all_to_all_single(output, source, sent, sent)
    expected = torch.cat([torch.full((rank + r + 1, 3), 10.0 * r + rank) for r in range(size)])
    torch.testing.assert_close(output, expected)
    outputs = [torch.empty(count, 3) for count in sent]
    dist.all_to_all(outputs, list(source.split(sent)))
    torch.testing.assert_close(torch.cat(outputs), expected)


def check_objects_travel() -> None:
    rank, size = rank_and_size()
    all_ranks: list[object] = [None] * size
    dist.all_gather_object(all_ranks, {"rank": rank, "text": "x" * (10 + 1000 * rank)})
    assert [entry["rank"] for entry in all_ranks] == list(range(size))  # type: ignore[index]
    objects = [{"from": rank}, "second"] if rank == 1 else [None, None]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [{"from": 1}, "second"]


def check_asynchronous_operations_run_in_order_of_submission() -> None:
    rank, size = rank_and_size()
    tensor = torch.full((1000,), float(rank + 1))
    total = sum(range(1, size + 1))
    first = dist.all_reduce(tensor, async_op=True)
    second = dist.all_reduce(tensor, async_op=True)
    third = dist.broadcast(tensor, 0, async_op=True)
    other = torch.ones(3)
    dist.all_reduce(other)
    for work in (third, second, first):
        assert work.wait()
    assert work.is_completed()
    assert (tensor == total * size).all()
    assert (other == size).all()


def check_futures_complete_without_anyone_waiting_for_the_work() -> None:
    rank, size = rank_and_size()
    works = [dist.all_reduce(torch.full((100_000,), float(rank)), async_op=True) for _ in range(4)]
    futures = [work.get_future().then(lambda done: done.value()[0] * 2) for work in works]
    del works
    for future in futures:
        assert (future.wait() == 2 * sum(range(size))).all()


def check_coalesced_operations_give_what_single_ones_give() -> None:
    rank, size = rank_and_size()
    tensors = [tensor_of(rank, shape=(n,)) for n in (1, 7, 20)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for n, tensor in zip((1, 7, 20), tensors, strict=True):
        torch.testing.assert_close(tensor, everyones(shape=(n,)).sum(0))
    outputs = [torch.empty(size * 2), torch.empty(size * 3)]
    with _coalescing_manager(async_ops=True) as manager:
        for n, output in zip((2, 3), outputs, strict=True):
            dist.all_gather_into_tensor(output, tensor_of(rank, shape=(n,)))
    manager.wait()
    torch.testing.assert_close(outputs[1].view(size, 3), everyones(shape=(3,)))


def check_coalesced_blocks_of_one_dtype_are_one_operation() -> None:
    rank, size = rank_and_size()
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float32)
    widths = (2, 3, 0, 4)
    communicator = current_communicator()
    group = dist.group.WORLD

    def num_operations(kind: str) -> int:
        totals = communicator.monitors[0].totals()
        return sum(count for of_kind, count, *_ in totals if of_kind == kind)

    own = [tensor_of(rank, dtype, (width,)) for dtype, width in zip(dtypes, widths, strict=True)]
    gathered = [torch.zeros(size * width, dtype=dtype) for dtype, width in zip(dtypes, widths, strict=True)]
    gathered[3] = torch.zeros(size * 4, 2)[:, 0]
    before = num_operations("allgather")
    group.allgather_into_tensor_coalesced(gathered, own).wait()
    assert num_operations("allgather") - before == 2
    for whole, dtype, width in zip(gathered, dtypes, widths, strict=True):
        torch.testing.assert_close(whole.reshape(size, width), everyones(dtype, (width,)))
    before = num_operations("reduce_scatter")
    own[3] = torch.zeros(4, 2)[:, 0]
    group.reduce_scatter_tensor_coalesced(own, gathered).wait()
    assert num_operations("reduce_scatter") - before == 2
    for block, dtype, width in zip(own, dtypes, widths, strict=True):
        torch.testing.assert_close(block, size * tensor_of(rank, dtype, (width,)))


def check_what_is_coalesced_on_a_device_is_waited_for_as_one() -> None:
    rank, size = rank_and_size()
    large, small = torch.full((1 << 20,), float(rank)), torch.ones(3, 2).t()
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(small, 0, async_op=True)
        dist.all_reduce(large)
    manager.wait()
    assert (large == sum(range(size))).all()
    with _coalescing_manager(device=torch.device("cpu")):
        pass


def check_tensors_of_several_types_are_reduced_at_once() -> None:
    rank = dist.get_rank()
    dtypes = (torch.float32, torch.int64, torch.float32, torch.complex64, torch.bfloat16)
    tensors = [tensor_of(rank, dtype, (n + 1, 2)) for n, dtype in enumerate(dtypes)]
    tensors[2] = tensors[2].t().contiguous().t()
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    for n, (dtype, tensor) in enumerate(zip(dtypes, tensors, strict=True)):
        torch.testing.assert_close(tensor, everyones(dtype, (n + 1, 2)).sum(0))


def check_functional_collectives_find_the_group_by_name() -> None:
    rank, size = rank_and_size()
    group = dist.group.WORLD
    torch.testing.assert_close(funcol.all_reduce(tensor_of(rank), "avg", group).wait(), everyones().mean(0))
    gathered = funcol.all_gather_tensor(tensor_of(rank), 0, group)
    torch.testing.assert_close(gathered.wait().view(size, 5, 3), everyones())
    scattered = funcol.reduce_scatter_tensor(tensor_of(rank, shape=(8, 3)), "sum", 0, group)
    torch.testing.assert_close(scattered.wait(), everyones(shape=(8, 3)).sum(0).chunk(size)[rank])
    exchanged = funcol.all_to_all_single(torch.arange(float(size)) + 10 * rank, None, None, group)
    torch.testing.assert_close(exchanged.wait(), torch.arange(float(size)) * 10 + rank)
    torch.testing.assert_close(funcol.broadcast(tensor_of(rank), 1, group).wait(), tensor_of(1))


def check_subgroups_reduce_among_their_members_alone() -> None:
    rank, size = rank_and_size()
    groups = [dist.new_group([r for r in range(size) if r % 2 == parity]) for parity in (0, 1)]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=groups[rank % 2])
    assert tensor.item() == sum(range(rank % 2, size, 2))
    reordered = dist.new_group(list(range(size))[::-1], backend="sparkdl")
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, src=size - 1, group=reordered)
    assert tensor.item() == size - 1
    dist.destroy_process_group(reordered)


def check_ranks_that_disagree_all_learn_who_said_what() -> None:
    rank, _ = rank_and_size()
    with pytest.raises(MismatchError, match=r"rank 0.* 3 float32.*ranks? 1.* 4 float32"):
        dist.all_reduce(torch.zeros(3 + (rank > 0)))
    with pytest.raises(MismatchError, match=r"float32.*float64|float64.*float32"):
        dist.broadcast(torch.zeros(3, dtype=torch.float64 if rank else torch.float32), 0)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()


def check_outputs_of_the_wrong_size_are_refused_before_anything_is_sent() -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    for call in (
        lambda: group.all_gather_single(torch.empty(1), torch.empty(3)),
        lambda: group.reduce_scatter_single(torch.empty(4), torch.empty(3)),
        lambda: group.allgather([[torch.empty(2)] * size], [torch.empty(3)]),
        lambda: group.reduce_scatter([torch.empty(2)], [[torch.empty(3)] * size]),
    ):
        with pytest.raises(ParamError, match="elements|cannot fill an output"):
            call()
    with pytest.raises(ParamError, match=r"cannot reduce torch\.float8"):
        dist.all_reduce(torch.empty(3).to(torch.float8_e4m3fn))


def check_the_group_can_be_made_again() -> None:
    import sparkdl.torch

    communicator = dist.group.WORLD.communicator
    with pytest.raises(ParamError, match="initialized already"):
        sparkdl.torch.init_process_group(communicator)
    for _ in range(2):
        sparkdl.torch.destroy_process_group()
        sparkdl.torch.init_process_group(communicator, timeout_s=20.0)
        group = dist.new_group(list(range(dist.get_world_size())))
        dist.barrier(group)


MODULES = [
    "tests.torch.scenes.reduction_checks",
    "tests.torch.scenes.message_checks",
    "tests.torch.scenes.future_checks",
    "tests.torch.scenes.tensors_as_arrays_checks",
    __name__,
]
CHECKS = [check for module_name in MODULES for check in checks_in(module_name)]


@pytest.fixture(
    scope="module",
    params=[
        ("auto", 2),
        *(pytest.param(world, marks=pytest.mark.slow) for world in (("auto", 4), ("mpi", 2))),
    ],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    transport, world_size = request.param
    return run_checks(MODULES, world_size, transport=transport)


@pytest.mark.parametrize("check", CHECKS)
def test_check_holds_on_every_transport(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
