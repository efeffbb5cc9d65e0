from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from sparkdl.errors import ParamError
from sparkdl.training.checkpoint.identity import describe_optimizer
from sparkdl.training.update import (
    fuse,
    make_optimizer,
    warn_of_untrained_parameters,
)


@pytest.fixture(params=[True, False])
def collects(request: pytest.FixtureRequest) -> Any:
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


def test_collector_is_paused_while_an_optimizer_is_made_and_then_as_it_was(collects: bool) -> None:
    seen = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise LookupError("in vain")
        return torch.optim.SGD(parameters, lr=0.1)

    make_optimizer(factory, torch.nn.Linear(1, 1))
    assert gc.isenabled() == collects
    with pytest.raises(ParamError, match="in vain"):
        make_optimizer(factory, torch.nn.Linear(1, 1))
    assert gc.isenabled() == collects
    assert seen == [False, False]


def test_a_factory_may_go_through_the_parameters_several_times() -> None:
    def decay_of_matrices_alone(parameters: Any) -> torch.optim.Optimizer:
        matrices = {
            "params": [parameter for parameter in parameters if parameter.ndim > 1],
            "weight_decay": 0.1,
        }
        others = {
            "params": [parameter for parameter in parameters if parameter.ndim < 2],
            "weight_decay": 0.0,
        }
        return torch.optim.AdamW([matrices, others])

    optimizer = make_optimizer(decay_of_matrices_alone, torch.nn.Linear(2, 2))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_trainable_parameters_that_no_group_holds_are_named(caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    module[1].requires_grad_(False)
    for held in (module[0].parameters(), [*module[0].parameters(), *module[2].parameters()]):
        caplog.clear()
        warn_of_untrained_parameters(torch.optim.SGD(held, lr=0.1), module)
        assert ("2.weight, 2.bias" in caplog.text) == isinstance(held, Iterator)
        assert "1.weight" not in caplog.text


ADAMS = [torch.optim.Adam, torch.optim.AdamW]


@pytest.mark.parametrize("kind", ADAMS)
def test_fused_adam_computes_what_adam_computes_by_default(kind: Any) -> None:
    torch.manual_seed(0)
    inputs = torch.rand(64, 16)
    weights = []
    for fused in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(16, 3)
        optimizer = kind(model.parameters(), lr=0.01)
        if fused:
            fuse(optimizer)
            assert optimizer.param_groups[0]["fused"] is True
        for _ in range(20):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        weights.append(model.weight.detach())
    torch.testing.assert_close(weights[0], weights[1])


class OwnAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("factory", "parameter"),
    [
        (OwnAdam, torch.zeros(2, 2)),
        (torch.optim.SGD, torch.zeros(2, 2)),
        (partial(torch.optim.Adam, fused=False), torch.zeros(2, 2)),
        (partial(torch.optim.AdamW, foreach=False), torch.zeros(2, 2)),
        (partial(torch.optim.Adam, foreach=True), torch.zeros(2, 2)),
        (partial(torch.optim.Adam, differentiable=True), torch.zeros(2, 2)),
        (torch.optim.Adam, torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        (torch.optim.Adam, torch.zeros(2, 2, dtype=torch.complex64)),
        (torch.optim.Adam, torch.zeros(2, 2, dtype=torch.bfloat16)),
    ],
)
def test_other_optimizers_and_parameters_keep_their_kernel(factory: Any, parameter: torch.Tensor) -> None:
    optimizer = factory([torch.nn.Parameter(parameter)])
    before = [dict(group) for group in optimizer.param_groups]
    fuse(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [group["fused"] for group in before]


def test_identity_of_a_fit_has_the_optimizer_as_the_program_made_it() -> None:
    module = torch.nn.Linear(2, 1)
    described = describe_optimizer(make_optimizer(torch.optim.AdamW, module), module)
    assert "fused" not in described["optimizer"]
