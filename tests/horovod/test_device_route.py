"""Tensors on GPUs take the route of NCCL; NCCL's stand-in takes CPU tensors in their place.

The same checks hold as for tensors that travel through the communicator. tests/gpu runs those of the route on GPUs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sparkdl.collective import Communicator
from sparkdl.collective.nccl.opening import open_nccl_group
from sparkdl.horovod.torch.operations import device_route
from sparkdl.horovod.torch.operations.device_route import DeviceRoute, Routes
from sparkdl.torch.gpu.nccl import NcclAccelerator
from tests.checks import require
from tests.horovod.worlds import checks_of, run_world
from tests.nccl_stand_in.building import stand_in_variables
from tests.run_ranks import RankEnvironment
from tests.torch.scenes.host_lane import HostLane

MODULES = [
    "tests.horovod.device_checks",
    "tests.horovod.collective_checks",
    "tests.horovod.gradient_checks",
    "tests.horovod.joining_checks",
    "tests.horovod.optimizer_checks",
]


class SubstituteRoutes(Routes):
    """Routes for CPU tensors, as if they were on a GPU."""

    def serves(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def open(self, communicator: Communicator, device: torch.device) -> DeviceRoute:
        lane, timeout_s = HostLane(), communicator.timeout_s
        group = open_nccl_group(communicator, gpu=0, timeout_s=timeout_s)
        return DeviceRoute(NcclAccelerator(group, lane, timeout_s=timeout_s), lane, communicator, device)


def take_stand_in(environment: RankEnvironment) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(environment.rank)
    device_route.routes = SubstituteRoutes()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    variables = stand_in_variables(Path(tmp_path_factory.mktemp("nccl")), CUDA_STAND_IN_ALL_MEMORY="1")
    return run_world(MODULES, 2, take_stand_in, variables)


@pytest.mark.parametrize("check", checks_of(MODULES))
def test_check_holds_on_the_route(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
