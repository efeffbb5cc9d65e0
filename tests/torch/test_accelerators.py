"""sparkdl's backends for CUDA tensors (NCCL, host memory, and both) give the results of one process.

CPU tensors stand for GPU tensors: NCCL's stand-in accepts them, and host memory can be staged in host memory.
tests/gpu tests what needs a GPU, its streams.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from sparkdl.errors import ParamError
from sparkdl.torch.gpu.accelerator import choose_cuda_backend, warn_of_wire
from tests.checks import Outcomes, checks_in, first_failures, require
from tests.nccl_stand_in.building import stand_in_variables
from tests.run_ranks import RankEnvironment, run_ranks
from tests.torch.scenes import batch_checks, delegated_checks
from tests.torch.scenes.accelerator_checks import CHECKS, run_checks
from tests.torch.scenes.host_lane import HostLane

WORLDS = {
    # The backend, the transport, and the host of each rank.
    "NCCL": ("sparkdl", "auto", (0, 0, 0)),
    "host memory": ("host", "auto", (0, 0, 0)),
    "even hosts": ("hierarchical", "hierarchical", (0, 1, 0, 1)),
    "uneven hosts": ("hierarchical", "hierarchical", (0, 1, 1)),
    "MPI": ("hierarchical", "hierarchical-mpi", (0, 1, 0, 1)),
}

SLOW = ("even hosts", "MPI")


def run_on_cpu(environment: RankEnvironment, world: str) -> dict[str, str | None]:
    # Each rank sees one GPU, which no other rank sees.
    os.environ["CUDA_VISIBLE_DEVICES"] = str(environment.rank)
    backend, _, hosts = WORLDS[world]
    return run_checks(environment, backend, HostLane(), torch.device("cpu"), hosts)


@cache
def outcomes_of(world: str) -> Outcomes:
    _, transport, hosts = WORLDS[world]
    with TemporaryDirectory() as folder:
        variables = stand_in_variables(Path(folder), CUDA_STAND_IN_ALL_MEMORY="1")
        return first_failures(
            run_ranks(len(hosts), run_on_cpu, world, transport=transport, variables=variables)
        )


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "world", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in WORLDS]
)
def test_check_holds_for_cuda_tensors(world: str, check: str) -> None:
    require(outcomes_of(world)[check])


@pytest.fixture(scope="module")
def batches() -> Outcomes:
    return first_failures(run_ranks(batch_checks.SIZE, batch_checks.run_on_rank, timeout_s=120.0))


@pytest.mark.parametrize("check", checks_in(batch_checks.__name__))
def test_batch_of_messages(check: str, batches: Outcomes) -> None:
    require(batches[check])


@cache
def delegated(backend: str) -> Outcomes:
    with TemporaryDirectory() as folder:
        variables = (
            stand_in_variables(Path(folder), CUDA_STAND_IN_ALL_MEMORY="1") if backend == "NCCL" else {}
        )
        return first_failures(
            run_ranks(
                delegated_checks.SIZE,
                delegated_checks.run_on_rank,
                backend,
                timeout_s=120.0,
                variables=variables,
            )
        )


@pytest.mark.parametrize(
    ("backend", "check"),
    [
        (backend, check)
        for backend in ("gloo", "NCCL", "host memory")
        for check in delegated_checks.checks_of(backend)
    ],
)
def test_functions_of_torch_distributed_reach_the_accelerator(backend: str, check: str) -> None:
    require(delegated(backend)[check])


@pytest.mark.parametrize(
    ("backend", "gpus", "chosen"),
    [
        ("auto", ["a", "b"], "torch"),
        ("auto", ["a", "b", "a"], "host"),
        ("auto", ["a", ""], None),
        ("auto", ["", ""], None),
        ("torch", ["a", "b"], "torch"),
        ("sparkdl", ["a", "b"], "sparkdl"),
        ("host", ["a", "b"], "host"),
        ("host", ["a", "a"], "host"),
    ],
)
def test_backend_follows_the_request_and_the_gpus(backend: str, gpus: list[str], chosen: str | None) -> None:
    assert choose_cuda_backend([backend] * len(gpus), gpus) == chosen


@pytest.mark.parametrize(
    ("backend", "num_hosts", "chosen"),
    [
        ("auto", 2, "hierarchical"),
        ("auto", 1, "torch"),
        ("hierarchical", 2, "hierarchical"),
        ("host", 2, "host"),
    ],
)
def test_hierarchical_transport_chooses_the_backend_unless_another_was_asked_for(
    backend: str, num_hosts: int, chosen: str
) -> None:
    assert choose_cuda_backend([backend] * 2, ["a", "b"], is_hierarchical=True, num_hosts=num_hosts) == chosen
    assert choose_cuda_backend(["auto"] * 2, ["a", ""], is_hierarchical=True, num_hosts=num_hosts) is None


def test_ranks_that_may_share_a_gpu_get_the_backends_that_open_nccl_themselves() -> None:
    shared = ["a", "a"]
    assert choose_cuda_backend(["sparkdl"] * 2, shared, may_share=True) == "sparkdl"
    assert choose_cuda_backend(["hierarchical"] * 2, shared, num_hosts=2, may_share=True) == "hierarchical"
    assert choose_cuda_backend(["auto"] * 2, shared, may_share=True) == "host"
    for backend in ("torch", "hierarchical"):  # on one host both are torch's NCCL
        with pytest.raises(ParamError, match=r"ranks 0, 1 share GPU a"):
            choose_cuda_backend([backend] * 2, shared, may_share=True)


def test_hierarchical_transport_is_not_replaced_where_ranks_share_a_gpu() -> None:
    with pytest.raises(ParamError, match=r"cuda='hierarchical' needs a GPU for every rank"):
        choose_cuda_backend(["auto"] * 2, ["a", "a"], is_hierarchical=True, num_hosts=1)


def test_wire_that_nccl_ignores_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for backend, wire, num_hosts in (
        ("torch", "float32", 2),
        ("hierarchical", "float16", 2),
        ("torch", "float16", 1),
    ):
        warn_of_wire(backend, wire, num_hosts)
    assert not caplog.messages
    warn_of_wire("torch", "float16", 2)
    (message,) = caplog.messages
    assert message.startswith("wire='float16' does not reach CUDA tensors")


def test_unavailable_cuda_backend_is_refused_with_the_ranks_at_fault() -> None:
    for backend in ("torch", "sparkdl"):
        with pytest.raises(ParamError, match=r"ranks 0, 2 share GPU a.*use cuda='host'"):
            choose_cuda_backend([backend] * 3, ["a", "b", "a"])
    with pytest.raises(ParamError, match=r"needs a GPU on every rank, but rank 1 cannot see one"):
        choose_cuda_backend(["host"] * 2, ["a", ""])
    with pytest.raises(ParamError, match=r"\['auto', 'host'\]"):
        choose_cuda_backend(["auto", "host"], ["a", "b"])
