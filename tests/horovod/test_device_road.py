"""Tensors on GPUs take the road of NCCL; NCCL's stand-in takes CPU tensors in their place.

The same checks hold as for tensors that travel through the communicator. tests/gpu runs them on GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import require
from tests.horovod.substitute_roads import take_stand_in
from tests.horovod.worlds import checks_of, run_world
from tests.nccl_stand_in.building import stand_in_variables

MODULES = [
    "tests.horovod.device_checks",
    "tests.horovod.collective_checks",
    "tests.horovod.gradient_checks",
    "tests.horovod.joining_checks",
    "tests.horovod.optimizer_checks",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    variables = stand_in_variables(Path(tmp_path_factory.mktemp("nccl")), CUDA_STAND_IN_ALL_MEMORY="1")
    return run_world(MODULES, 2, take_stand_in, variables)


@pytest.mark.parametrize("check", checks_of(MODULES))
def test_check_holds_on_the_road(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
