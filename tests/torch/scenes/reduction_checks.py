"""Checks of allreduce of torch.distributed on the backend ``"sparkdl"``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from sparkdl.errors import MismatchError, ParamError
from tests.torch.scenes.rank_tensors import DTYPES, everyones, rank_and_size, tensor_of


def check_allreduce_reduces_every_dtype_by_every_operation() -> None:
    rank, size = rank_and_size()
    for dtype in DTYPES:
        all_tensors = everyones(dtype).double()
        expected = {
            dist.ReduceOp.SUM: all_tensors.sum(0),
            dist.ReduceOp.AVG: all_tensors.sum(0) / size,
            dist.ReduceOp.MIN: all_tensors.amin(0),
            dist.ReduceOp.MAX: all_tensors.amax(0),
            dist.ReduceOp.PRODUCT: all_tensors.prod(0),
        }
        for op, reference in expected.items():
            tensor = tensor_of(rank, dtype)
            dist.all_reduce(tensor, op)
            torch.testing.assert_close(tensor, reference.to(dtype), rtol=0, atol=0, msg=f"{dtype} {op}")


def check_premul_sum_multiplies_before_it_sums() -> None:
    tensor = tensor_of(dist.get_rank())
    dist.all_reduce(tensor, _make_nccl_premul_sum(0.25))
    torch.testing.assert_close(tensor, everyones().sum(0) * 0.25)
    source, output = tensor_of(dist.get_rank(), shape=(8, 3)), torch.empty(8 // dist.get_world_size(), 3)
    kept = source.clone()
    dist.reduce_scatter_tensor(output, source, _make_nccl_premul_sum(0.5))
    own = everyones(shape=(8, 3)).sum(0).chunk(dist.get_world_size())[dist.get_rank()]
    torch.testing.assert_close(output, own * 0.5)
    torch.testing.assert_close(source, kept)


def check_bitwise_operations_work_on_integers_and_booleans() -> None:
    rank, size = rank_and_size()
    tensor = torch.tensor([1 << rank, 3], dtype=torch.int32)
    dist.all_reduce(tensor, dist.ReduceOp.BOR)
    assert tensor.tolist() == [(1 << size) - 1, 3]
    flags = torch.tensor([rank == 0, True])
    dist.all_reduce(flags, dist.ReduceOp.BAND)
    assert flags.tolist() == [False, True]


def check_sparse_tensors_are_summed_and_averaged() -> None:
    rank, size = rank_and_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            for num_entries in (min(rank, 2), 2):  # one rank has no entries
                places = torch.tensor([[0, 3]])[:, :num_entries]
                rows = torch.full((num_entries, 2), rank + 1).to(dtype)
                tensor = torch.sparse_coo_tensor(places, rows, (5, 2))
                brought = [torch.zeros(5, 2, dtype=dtype) for _ in range(size)]
                dist.all_gather(brought, tensor.to_dense())
                expected = torch.stack(brought).double().sum(0)
                if op == dist.ReduceOp.AVG:
                    expected = expected / size
                work = dist.all_reduce(tensor, op, async_op=True)
                assert work is not None
                assert work.wait()
                torch.testing.assert_close(tensor.to_dense(), expected.to(dtype))
    with pytest.raises(ParamError, match="by SUM and AVG, got torch.sparse_coo by max"):
        dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)
    with pytest.raises(MismatchError, match=r"of shape \(2, 2\), 2 dimensions sparse"):
        dist.all_reduce(torch.eye(2 + rank).to_sparse())


def check_booleans_and_complex_numbers_can_be_summed() -> None:
    rank, size = rank_and_size()
    flags = torch.tensor([rank == 0, False])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, False]
    numbers = torch.full((2, 2), complex(rank, 1))
    dist.all_reduce(numbers)
    assert numbers[1, 1] == complex(sum(range(size)), size)


def check_tensors_that_are_not_contiguous_are_written_in_place() -> None:
    rank, size = rank_and_size()
    base = torch.zeros(6, 5)
    view = base.t()[:, ::2]
    view.copy_(tensor_of(rank, shape=(5, 3)))
    dist.all_reduce(view)
    torch.testing.assert_close(base.t()[:, ::2], everyones().sum(0))
    assert not base.t()[:, 1::2].any()
    dist.broadcast(view, size - 1)
    row = torch.zeros(6)
    row[::2] = rank + 1
    dist.all_reduce(row[::2])
    assert row.tolist() == [sum(range(size + 1)), 0] * 3
    dist.all_gather([torch.empty(3) for _ in range(size)], row[::2])
    outputs = torch.empty(5 * size, 6)[:, ::2]
    dist.all_gather_into_tensor(outputs, tensor_of(rank, shape=(3, 5)).t())
    torch.testing.assert_close(outputs.reshape(size, 5, 3), everyones(shape=(3, 5)).transpose(1, 2))


def check_parameters_and_empty_tensors_are_accepted() -> None:
    parameter = torch.nn.Parameter(tensor_of(dist.get_rank()))
    with torch.no_grad():
        dist.all_reduce(parameter)
    torch.testing.assert_close(parameter.detach(), everyones().sum(0))
    empty = torch.empty(0, 4)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather_into_tensor(torch.empty(0, 4), empty)
    dist.reduce_scatter_tensor(torch.empty(0, 4), empty)
