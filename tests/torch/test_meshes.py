"""Two-dimensional meshes of four ranks: sub-groups, DTensor redistributions, and tensor with data parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.checks import checks_in, require
from tests.torch.checks import run_checks
from tests.torch.training_examples import assert_gradients, batch, loss_of, model, reference_gradients


def check_groups_of_a_mesh_reduce_along_their_dimension() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    rank = dist.get_rank()
    for name, members in (
        ("rows", [rank % 2, rank % 2 + 2]),
        ("columns", [rank - rank % 2, rank - rank % 2 + 1]),
    ):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.item() == sum(members), name


def check_dtensors_change_their_placements() -> None:
    whole = torch.arange(64.0).view(8, 8)
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    single = [[Shard(0)], [Shard(1)], [Replicate()]]
    double = [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
    for mesh, placements in ((flat, single), (square, double)):
        for before in placements:
            tensor = distribute_tensor(whole, mesh, before)
            for after in placements:
                torch.testing.assert_close(tensor.redistribute(mesh, after).full_tensor(), whole)


def check_partial_dtensors_are_reduced_when_placed() -> None:
    mesh = init_device_mesh("cpu", (4,))
    local = torch.arange(8.0).view(8, 1) * (dist.get_rank() + 1)
    for kind, factor in (("sum", 10), ("avg", 2.5), ("max", 4)):
        partial = DTensor.from_local(local, mesh, [Partial(kind)])
        expected = torch.arange(8.0).view(8, 1) * factor
        torch.testing.assert_close(partial.redistribute(mesh, [Replicate()]).to_local(), expected)
        torch.testing.assert_close(partial.redistribute(mesh, [Shard(0)]).full_tensor(), expected)


def check_tensor_times_data_parallel_gradients_equal_one_process() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module = model()
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["data"])
    loss_of(module, batch(mesh.get_local_rank("data"), 0)).backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in module.parameters())
    assert_gradients(module, reference_gradients(2))


CHECKS = checks_in(__name__)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_checks([__name__], 4)


@pytest.mark.parametrize("check", CHECKS)
def test_check_holds_on_four_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
