"""The process group's backends: CPU tensors over the communicator, CUDA tensors over NCCL or through host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.checks import Outcomes, first_failures, require
from tests.gpu.gpu_scenes import (
    ask_for,
    average_on_gpus,
    exchange,
    nccl_variables,
    needs_gpu,
    needs_nccl_over,
    needs_two_gpus,
    overlap,
    play_checks,
    sum_on_both_devices,
    train_data_parallel,
)
from tests.run_ranks import run_ranks
from tests.torch.scenes.accelerator_checks import CHECKS

pytestmark = [pytest.mark.gpu, needs_gpu]

ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
BACKENDS = ("auto", "torch", "sparkdl", "host")
OWN_BACKENDS: list[Any] = [
    ("sparkdl", 1),
    pytest.param("sparkdl", 2, marks=needs_nccl_over(2)),
    # On two simulated hosts: two ranks and one, and two each.
    pytest.param("hierarchical", 3, marks=needs_nccl_over(3)),
    pytest.param("hierarchical", 4, marks=needs_nccl_over(4)),
    ("host", 2),
]
own_backends = pytest.mark.parametrize(("backend", "world_size"), OWN_BACKENDS)
all_backends = pytest.mark.parametrize(
    ("backend", "world_size"), [*OWN_BACKENDS, ("auto", 1), pytest.param("auto", 2, marks=needs_two_gpus)]
)


def run_backend(world_size: int, scene: Callable[..., Any], backend: str) -> list[Any]:
    """Run a function on ranks of a backend; with ``host`` they share a GPU."""
    variables = ONE_GPU if backend == "host" else nccl_variables(world_size)
    return run_ranks(world_size, scene, backend, timeout_s=150, variables=variables)


def expected_sums(world_size: int) -> dict[str, tuple[str, float]]:
    total = world_size * (world_size + 1) / 2
    return {"cpu": ("cpu", total), "cuda": ("cuda", total)}


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=needs_two_gpus)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_group_of_ranks_with_a_gpu_each_sums_on_both_devices(backend: str, world_size: int) -> None:
    sums = run_ranks(world_size, sum_on_both_devices, backend, timeout_s=150)
    assert sums == [expected_sums(world_size)] * world_size


@needs_two_gpus
@pytest.mark.parametrize("backend", BACKENDS)
def test_average_on_two_gpus_is_the_mean(backend: str) -> None:
    assert run_ranks(2, average_on_gpus, backend, timeout_s=150) == [1.5, 1.5]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_share_a_gpu_sum_through_host_memory(world_size: int) -> None:
    sums = run_ranks(world_size, sum_on_both_devices, timeout_s=150, variables=ONE_GPU)
    assert sums == [expected_sums(world_size)] * world_size


@pytest.mark.parametrize("backend", ["torch", "sparkdl"])
def test_nccl_is_refused_to_ranks_that_share_a_gpu(backend: str) -> None:
    for text in run_ranks(2, ask_for, backend, timeout_s=120, variables=ONE_GPU):
        assert text.startswith(f"cuda={backend!r} needs a GPU for every rank"), text
        assert "ranks 0, 1 share GPU" in text


@cache
def checked(backend: str, world_size: int) -> Outcomes:
    return first_failures(run_backend(world_size, play_checks, backend))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("backend", "world_size"),
    # NCCL refuses ranks that share a GPU inside a host, but not two hosts of one rank each that share one.
    [*OWN_BACKENDS, pytest.param("hierarchical", 2, id="one-rank-per-host"), ("host", 1)],
)
def test_own_cuda_backend_passes_each_check(backend: str, world_size: int, check: str) -> None:
    require(checked(backend, world_size)[check])


@own_backends
def test_collective_returns_while_the_gpu_is_busy_and_keeps_the_streams_order(
    backend: str, world_size: int
) -> None:
    for is_early, value in run_backend(world_size, overlap, backend):
        assert is_early
        assert value == world_size * (world_size + 1)


@all_backends
def test_batch_of_large_messages_that_begins_with_the_sends_arrives(backend: str, world_size: int) -> None:
    assert all(run_backend(world_size, exchange, backend))


@all_backends
def test_data_parallel_keeps_the_ranks_weights_equal(backend: str, world_size: int) -> None:
    first, *others = run_backend(world_size, train_data_parallel, backend)
    assert all(weights == first for weights in others)
