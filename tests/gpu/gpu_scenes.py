"""Functions that the GPU tests run on ranks, and the marks that skip tests where there is no GPU.

Every function is at the top of this module, because ranks receive it by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparkdl.torch
from sparkdl.collective.nccl.opening import SHARING_VARIABLE, load_nccl
from sparkdl.errors import ParamError, TransportUnavailableError
from sparkdl.torch.gpu.lanes import GpuLane
from tests.checks import Outcomes, outcome_of
from tests.torch.scenes.accelerator_checks import run_checks

if TYPE_CHECKING:
    from sparkdl.parallel import Parallelism
    from tests.run_ranks import RankEnvironment

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

needs_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason=f"torch {torch.__version__} sees no CUDA device")
needs_two_gpus = pytest.mark.skipif(
    NUM_GPUS < 2, reason=f"NCCL needs a GPU per rank, torch {torch.__version__} sees {NUM_GPUS}"
)


@cache
def _takes_ranks_that_share_a_gpu() -> bool:
    try:
        return NUM_GPUS > 0 and tuple(int(part) for part in load_nccl().version.split(".")) >= (2, 30)
    except TransportUnavailableError:
        return False


def needs_nccl_over(num_ranks: int) -> pytest.MarkDecorator:
    """Skip a test where NCCL cannot be opened over that many ranks: each has its own GPU, or NCCL is 2.30 or later."""
    return pytest.mark.skipif(
        num_ranks > NUM_GPUS and not _takes_ranks_that_share_a_gpu(),
        reason=f"NCCL before 2.30 needs a GPU for each of {num_ranks} ranks, torch sees {NUM_GPUS}",
    )


def nccl_variables(num_ranks: int) -> dict[str, str] | None:
    """The environment of ranks over which NCCL is opened: they share a GPU if there are too few."""
    return {SHARING_VARIABLE: "1", "CUDA_VISIBLE_DEVICES": "0"} if num_ranks > NUM_GPUS else None


class NotFiniteFromStep(nn.CrossEntropyLoss):
    """A loss that is NaN from its ``first``-th call in this process."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        loss = super().forward(outputs, targets)
        return loss * float("nan") if self.calls >= self.first else loss


def own_device(environment: RankEnvironment) -> torch.device:
    """Make the GPU of this rank current and return it: its own GPU if there are enough, else the first one for all."""
    torch.cuda.set_device(environment.rank if environment.world_size <= torch.cuda.device_count() else 0)
    return torch.device("cuda", torch.cuda.current_device())


def hosts_for(environment: RankEnvironment, backend: bool | str) -> list[int] | None:
    """Divide the ranks into two simulated hosts, for the backend that needs several hosts."""
    if backend != "hierarchical":
        return None
    return [2 * rank // environment.world_size for rank in range(environment.world_size)]


@contextmanager
def process_group(environment: RankEnvironment, cuda: bool | str) -> Iterator[torch.device]:
    """Initialize torch.distributed with a backend for CUDA; give the GPU of this rank."""
    device = own_device(environment)
    with environment.open(host_of_rank=hosts_for(environment, cuda)) as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=60.0, cuda=cuda)
        try:
            yield device
        finally:
            sparkdl.torch.destroy_process_group()


def sum_on_both_devices(
    environment: RankEnvironment, cuda: bool | str = True
) -> dict[str, tuple[str, float]]:
    """Sum a tensor on the CPU and one on this rank's GPU; return the device and the value of each result."""
    with process_group(environment, cuda):
        results = {}
        for device in ("cpu", "cuda"):
            tensor = torch.full((1000,), float(environment.rank + 1), device=device)
            dist.all_reduce(tensor)
            results[device] = (tensor.device.type, float(tensor[-1]))
        return results


def average_on_gpus(environment: RankEnvironment, cuda: str) -> float:
    """Average on the GPUs: the mean of ranks 1, 2, ... is (n + 1) / 2."""
    with process_group(environment, cuda):
        tensor = torch.full((1000,), float(environment.rank + 1), device="cuda")
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        return float(tensor[-1])


def ask_for(environment: RankEnvironment, cuda: str) -> str:
    """The error message of a process group whose ranks share a GPU."""
    try:
        with process_group(environment, cuda):
            return "no error"
    except ParamError as error:
        return str(error)


def play_checks(environment: RankEnvironment, backend: str) -> dict[str, str | None]:
    """Run the checks of sparkdl's CUDA backends on streams of the GPU."""
    device = own_device(environment)
    return run_checks(environment, backend, GpuLane(device), device, hosts_for(environment, backend))


def overlap(environment: RankEnvironment, backend: str) -> tuple[bool, float]:
    """Whether a collective returns while the GPU is busy, and its result afterwards."""
    with process_group(environment, backend):
        dist.all_reduce(torch.ones(1, device="cuda"))  # connects the ranks
        torch.cuda.synchronize()
        tensor = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(1 << 30)  # about half a second, before the tensor has its values
        tensor.fill_(environment.rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
        is_early = not work.is_completed()
        work.wait()
        tensor *= 2
        return is_early, float(tensor[-1])


def exchange(environment: RankEnvironment, backend: str) -> bool:
    """Send a large tensor around the ring in a batch that begins with the sends; return whether it arrived."""
    with process_group(environment, backend):
        rank, size = environment.rank, environment.world_size
        sent = torch.full((1 << 24,), float(rank), device="cuda")
        received = torch.zeros_like(sent)
        batch = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return bool((received == (rank - 1) % size).all())


def train_in_parts(environment: RankEnvironment, backend: str, cases: dict[str, Parallelism]) -> Outcomes:
    """Train a decoder under each kind of parallelism; return what differs from one process on the CPU."""
    from tests.parallel.test_pairs import check

    with process_group(environment, backend) as device:
        return {
            name: outcome_of(lambda: check(case, device=device, tolerance=1e-3), environment.rank)  # noqa: B023
            for name, case in cases.items()
        }


def attend(environment: RankEnvironment) -> Outcomes:
    """Run the checks of attention over a sharded sequence with all tensors on the GPU."""
    from tests.parallel import test_attention

    with process_group(environment, "host") as device, torch.device(device):
        return {
            name: outcome_of(getattr(test_attention, name), environment.rank)
            for name in test_attention.CHECKS
        }


def train_data_parallel(environment: RankEnvironment, backend: str) -> list[float]:
    """Train some steps with DistributedDataParallel; return the weights, which must be equal on all ranks."""
    torch.manual_seed(environment.rank)
    with process_group(environment, backend) as device:
        module = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).to(device), device_ids=[device])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            module(torch.randn(16, 8, device=device)).square().sum().backward()
            optimizer.step()
        return [float(value) for value in module.module.weight.detach().flatten().cpu()]
