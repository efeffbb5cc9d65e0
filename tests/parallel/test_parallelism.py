"""The groups of a mesh of parallelism on four ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, debug, distribute_tensor

import sparkdl.horovod.torch as hvd
import sparkdl.torch
from sparkdl.collective import current_communicator
from sparkdl.errors import ParamError
from sparkdl.parallel.parallelism import Parallelism
from sparkdl.patches import mesh_caches
from tests.checks import checks_in, require
from tests.torch.checks import run_checks


def check_a_dimension_is_a_mesh_a_process_group_and_a_communicator() -> None:
    layout = Parallelism(shard=2, tensor=2).lay_out()
    rank = dist.get_rank()
    for name, members in (
        ("shard", [rank % 2, rank % 2 + 2]),
        ("tensor", [rank & ~1, rank | 1]),
        ("data", [rank]),
    ):
        assert layout.ranks(name) == members
        assert layout.size(name) == len(members)
        assert layout.rank(name) == members.index(rank)
        tensor, array = torch.tensor([float(rank)]), np.array([float(rank)])
        dist.all_reduce(tensor, group=layout.group(name))
        layout.communicator(name).allreduce(array, op="sum")
        assert tensor.item() == array[0] == sum(members)


def check_dimensions_are_joined_to_one_group() -> None:
    layout = Parallelism(data=2, shard=2).lay_out()
    assert layout.ranks("shard", "data") == [0, 1, 2, 3]
    assert layout.row_reader == (dist.get_rank(), 4)
    assert layout.size("data", "shard") == 4


def check_ranks_of_a_tensor_group_read_the_same_rows() -> None:
    layout = Parallelism(tensor=2).lay_out()
    assert layout.row_reader == (dist.get_rank() // 2, 2)


def check_a_group_that_crosses_hosts_is_placed_by_hosts() -> None:
    layout = Parallelism(tensor=2).lay_out(host_of_rank=[0, 1, 0, 1])
    assert layout.ranks("tensor") == ([0, 2] if dist.get_rank() % 2 == 0 else [1, 3])


def check_layouts_of_a_later_default_group_use_its_groups() -> None:
    """DTensor's caches hold equal meshes of earlier layouts, and the names of groups come again."""
    before: list[Parallelism] = [Parallelism(context=2, shard=2), Parallelism(data=2, shard=2)]
    while True:
        for other in before:
            other.lay_out()  # torch then gives other names to the groups of the next layout
        layout = Parallelism(shard=2, tensor=2).lay_out()
        for name in ("shard", "tensor"):
            divided = distribute_tensor(torch.arange(4.0), layout.mesh[name], [Shard(0)])
            found = (divided + 1).sum()
            assert found.full_tensor().item() == 10
            assert found.device_mesh.get_group().group_name == layout.group(name).group_name
        sparkdl.torch.destroy_process_group()
        sparkdl.torch.init_process_group(current_communicator(), timeout_s=20.0)
        if not before:
            return
        before.pop()


def check_caches_of_other_threads_are_cleared_in_their_backward_pass() -> None:
    """On GPUs the backward pass runs in threads of its own; here the caches of the thread that calls it are cleared."""
    layout = Parallelism(tensor=2).lay_out()
    divided = distribute_tensor(torch.arange(4.0), layout.mesh["tensor"], [Shard(0)])
    _ = divided + 1
    assert debug._get_fast_path_sharding_prop_cache_stats() != (0, 0)
    mesh_caches.forget_in_backward("cpu")
    assert debug._get_fast_path_sharding_prop_cache_stats() == (0, 0)


def check_sizes_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(ParamError, match="4 ranks"):
        Parallelism(tensor=3).lay_out()


def check_process_sets_of_horovod_and_meshes_become_each_other() -> None:
    hvd.init()
    layout = Parallelism(shard=2, tensor=2).lay_out()
    found = hvd.process_set_of(layout.mesh["tensor"])
    assert found.ranks == layout.ranks("tensor")
    assert hvd.process_set_of(layout.mesh["tensor"]).process_set_id == found.process_set_id
    ones = torch.ones(1) * dist.get_rank()
    assert hvd.allreduce(ones, op=hvd.Sum, process_set=found).item() == sum(found.ranks)
    outer = hvd.add_process_set([0, 3])
    if outer.included():
        mesh = DeviceMesh.from_group(outer.process_group(), "cpu", mesh_dim_names=("outer",))
        tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert tensor.to_local().tolist() == ([0.0, 1.0] if dist.get_rank() == 0 else [2.0, 3.0])
        assert tensor.sum().full_tensor().item() == 6
    else:
        with pytest.raises(ValueError, match="not part of"):
            outer.process_group()
    assert hvd.global_process_set.process_group() is dist.group.WORLD
    with pytest.raises(ValueError, match="one dimension"):
        hvd.process_set_of(layout.mesh)
    hvd.shutdown()


CHECKS = checks_in(__name__)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_checks([__name__], 4)


@pytest.mark.parametrize("check", CHECKS)
def test_check_holds_on_four_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
