"""What the GPU tests run on ranks, and the marks by which they skip where there is no GPU.

Everything here is at the top of a module, as ranks receive it by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparkdl.torch

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

needs_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason=f"torch {torch.__version__} sees no CUDA device")
needs_two_gpus = pytest.mark.skipif(
    NUM_GPUS < 2, reason=f"NCCL needs a GPU per rank, torch {torch.__version__} sees {NUM_GPUS}"
)


class NotFiniteFromStep(nn.CrossEntropyLoss):
    """A loss that is NaN from its ``first``-th call on in this process."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        loss = super().forward(outputs, targets)
        return loss * float("nan") if self.calls >= self.first else loss


def sum_on_both_devices(environment: RankEnvironment) -> dict[str, tuple[str, float]]:
    """Sum a tensor on the CPU and one on this rank's GPU; say where the results lie and what they are."""
    torch.cuda.set_device(environment.rank)
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=60.0)
        try:
            results = {}
            for device in ("cpu", "cuda"):
                tensor = torch.full((1000,), float(environment.rank + 1), device=device)
                dist.all_reduce(tensor)
                results[device] = (tensor.device.type, float(tensor[-1]))
            return results
        finally:
            sparkdl.torch.destroy_process_group()


def average_on_gpus(environment: RankEnvironment) -> float:
    """Average on the GPUs: NCCL knows AVG, the mean of ranks 1, 2, ... is (n + 1) / 2."""
    torch.cuda.set_device(environment.rank)
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=60.0)
        try:
            tensor = torch.full((1000,), float(environment.rank + 1), device="cuda")
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            return float(tensor[-1])
        finally:
            sparkdl.torch.destroy_process_group()


def sum_on_a_shared_gpu(environment: RankEnvironment) -> str:
    """Try to sum over ranks that share a GPU; the error's text."""
    torch.cuda.set_device(0)
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=60.0)
        try:
            dist.all_reduce(torch.ones(10, device="cuda"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            sparkdl.torch.destroy_process_group()
    return "no error"
