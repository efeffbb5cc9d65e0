"""Real NCCL, with worlds from one rank; tests/collective/test_nccl.py runs the same on stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from tests.gpu import nccl_on_gpu_scenes as scenes
from tests.gpu.gpu_scenes import nccl_variables, needs_gpu, needs_nccl_over
from tests.run_ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpu]

world_sizes = pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=needs_nccl_over(2))])


def run_nccl(world_size: int, scene: Callable[..., Any], may_die: Collection[int] = ()) -> list[Any]:
    return run_ranks(world_size, scene, timeout_s=150, may_die=may_die, variables=nccl_variables(world_size))


def test_library_is_found_and_says_its_version() -> None:
    ((version, path),) = run_ranks(1, scenes.library, timeout_s=120)
    assert "libnccl" in path
    assert tuple(int(part) for part in version.split(".")) >= (2, 18, 0)


@world_sizes
def test_operations_on_torchs_tensors(world_size: int) -> None:
    for outcome in run_nccl(world_size, scenes.operations):
        assert all(outcome.values()), outcome


@world_sizes
def test_call_returns_while_its_stream_is_busy_and_keeps_the_streams_order(world_size: int) -> None:
    for seconds, is_done, value in run_nccl(world_size, scenes.waits_for_the_stream):
        assert seconds < 0.2
        assert not is_done
        assert value == world_size * (world_size + 1)


@world_sizes
def test_graph_replays_what_it_captured(world_size: int) -> None:
    assert run_nccl(world_size, scenes.graph) == [float(world_size**3)] * world_size


@needs_nccl_over(2)
def test_killed_peer_is_named_and_gpu_operations_that_wait_for_it_are_aborted() -> None:
    outcome, _ = run_nccl(2, scenes.lost_peer, may_die=[1])
    assert outcome["kind"] == "RankLostError", outcome
    assert "rank 1" in outcome["message"]
    assert outcome["seconds"] < 10.0


@needs_nccl_over(2)
def test_operation_that_misses_its_deadline_is_aborted_on_the_gpu() -> None:
    outcome, _ = run_nccl(2, scenes.late_rank)
    assert outcome["kind"] == "CommunicatorTimeoutError", outcome
    assert "was not complete on GPU 0 within 1 s" in outcome["message"]


def test_ranks_that_share_a_gpu_are_refused_with_their_numbers_and_the_gpu() -> None:
    for text in run_ranks(2, scenes.shared_gpu, timeout_s=120, variables={"CUDA_VISIBLE_DEVICES": "0"}):
        assert text.startswith("ParamError: ")
        assert "ranks 0, 1 share GPU-" in text
        assert str(torch.cuda.get_device_properties(0).uuid) in text


def test_memory_of_the_host_is_refused_and_the_group_stays_usable() -> None:
    (text,) = run_ranks(1, scenes.host_array, timeout_s=120)
    assert "is not in memory that CUDA knows" in text
