"""``sparkdl.horovod.torch`` on GPUs; tests/horovod/test_device_route.py runs the same checks on NCCL's stand-in."""

from __future__ import annotations

import pytest
import torch

from tests.checks import Outcomes, require
from tests.gpu.gpu_scenes import nccl_variables, needs_gpu, needs_nccl_over, own_device
from tests.horovod.worlds import checks_of, run_world
from tests.run_ranks import RankEnvironment

pytestmark = [pytest.mark.gpu, needs_gpu, needs_nccl_over(2)]

MODULES = ["tests.horovod.device_checks"]


def take_gpu(environment: RankEnvironment) -> None:
    torch.set_default_device(own_device(environment))


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_world(MODULES, 2, take_gpu, nccl_variables(2))


@pytest.mark.parametrize("check", checks_of(MODULES))
def test_check_holds_on_gpus(check: str, outcomes: Outcomes) -> None:
    require(outcomes[check])
