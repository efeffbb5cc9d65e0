"""Sub-groups have the transport requested for their world, also where it fell back to a slower one, and its timeout."""

from __future__ import annotations

import resource
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sparkdl.torch
from tests.run_ranks import RankEnvironment, run_ranks


def _open_in_turn(environment: RankEnvironment) -> dict[str, dict[str, Any]]:
    seen = {"tcp": _open_sub_groups(environment, "tcp")}
    # As in tests/collective: a limit on file sizes simulates a /dev/shm that is too small.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    return {**seen, "auto": _open_sub_groups(environment, "auto")}


def _open_sub_groups(environment: RankEnvironment, transport: str) -> dict[str, Any]:
    with environment.communicator(transport=transport) as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=20.0)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        group = dist.new_group([0, 1])
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        dist.all_reduce(total, group=mesh.get_group("tensor"))
        seen = {
            "total": total.tolist(),
            "requested": group.communicator.requested_transport,
            "local size": group.communicator.topology.local_size,
            "timeouts": [
                member.timeout_s
                for member in (
                    group,
                    mesh.get_group("tensor"),
                    dist.new_group([0, 1], timeout=timedelta(seconds=7)),
                )
            ],
        }
        measured = {
            row.process_set for row in communicator.report().operations if row.operation == "allreduce"
        }
        seen["measured"] = group.communicator.name in measured
        sparkdl.torch.destroy_process_group()
    return seen


@cache
def seen_by_ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, _open_in_turn)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_sub_groups_use_the_transport_requested_for_their_world(transport: str) -> None:
    for seen in seen_by_ranks():
        expected = {"total": [4.0] * 3, "requested": transport, "local size": 2, "measured": True}
        assert {name: seen[transport][name] for name in expected} == expected


def test_sub_groups_without_a_timeout_have_that_of_their_world() -> None:
    for seen in seen_by_ranks():
        assert seen["tcp"]["timeouts"] == [20.0, 20.0, 7.0]
