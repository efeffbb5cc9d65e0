"""The process group's two roads: CPU tensors over the communicator, CUDA tensors over NCCL."""

from __future__ import annotations

import pytest

from tests.gpu.gpu_scenes import (
    average_on_gpus,
    needs_gpu,
    needs_two_gpus,
    sum_on_a_shared_gpu,
    sum_on_both_devices,
)
from tests.run_ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpu]


def test_group_of_one_serves_both_devices() -> None:
    assert run_ranks(1, sum_on_both_devices, timeout_s=120) == [{"cpu": ("cpu", 1.0), "cuda": ("cuda", 1.0)}]


@needs_two_gpus
def test_group_of_two_gpus_sums_on_both_devices() -> None:
    expected = {"cpu": ("cpu", 3.0), "cuda": ("cuda", 3.0)}
    assert run_ranks(2, sum_on_both_devices, timeout_s=150) == [expected, expected]


@needs_two_gpus
def test_average_on_gpus_is_an_average() -> None:
    assert run_ranks(2, average_on_gpus, timeout_s=150) == [1.5, 1.5]


def test_ranks_that_share_a_gpu_are_told_so() -> None:
    for text in run_ranks(2, sum_on_a_shared_gpu, timeout_s=120, variables={"CUDA_VISIBLE_DEVICES": "0"}):
        assert text.startswith("ParamError: This process group serves CPU tensors, got one on cuda:0.")
