from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from sparkdl.errors import ParamError
from sparkdl.training.update import make_optimizer


@pytest.fixture(params=[True, False])
def collects(request: pytest.FixtureRequest) -> Any:
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


def test_making_an_optimizer_pauses_the_collector_and_leaves_it_as_it_was(collects: bool) -> None:
    seen = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        seen.append(gc.isenabled())
        return torch.optim.SGD(parameters, lr=0.1)

    make_optimizer(factory, torch.nn.Linear(1, 1))
    assert seen == [False]
    assert gc.isenabled() == collects


def test_factory_that_fails_leaves_the_collector_as_it_was(collects: bool) -> None:
    def fail(parameters: Any) -> Any:
        raise LookupError("in vain")

    with pytest.raises(ParamError, match="in vain"):
        make_optimizer(fail, torch.nn.Linear(1, 1))
    assert gc.isenabled() == collects
