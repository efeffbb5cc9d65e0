"""``DistributedOptimizer`` and the optimizer that it wraps: shared state, their parameters, and its lifetime."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch

import sparkdl.horovod.torch as hvd
from tests.torch.training_examples import batch, loss_of, model, optimizer_of


def take_step(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    optimizer.zero_grad()
    loss_of(module, batch(hvd.rank(), 0)).backward()
    optimizer.step()


def step_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns because it does not see the steps of the wrapped optimizer
        scheduler.step()


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def check_schedulers_made_first_still_act() -> None:
    module = model()
    plain = optimizer_of(module)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.0)
    optimizer = hvd.DistributedOptimizer(plain)
    take_step(optimizer, module)
    weights = hvd.allgather_object(module.state_dict())
    torch.testing.assert_close(weights[0], weights[1])
    step_scheduler(scheduler)
    assert rate_of(optimizer) == 0.0


def check_schedulers_act_alike_on_all_ranks_after_a_broadcast() -> None:
    for op in (hvd.Average, hvd.Adasum):
        for which in ("wrapped", "plain"):
            module = model()
            plain = torch.optim.SGD(module.parameters(), lr=1.0 + hvd.rank(), momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
            optimizer = hvd.DistributedOptimizer(plain, named_parameters=module.named_parameters(), op=op)
            hvd.broadcast_optimizer_state(optimizer if which == "wrapped" else plain, root_rank=0)
            take_step(optimizer, module)
            step_scheduler(scheduler)
            assert hvd.allgather_object((rate_of(plain), rate_of(optimizer))) == [(0.5, 0.5)] * 2
            assert len(plain.state_dict()["state"]) == len(list(module.parameters()))


def check_schedulers_still_act_after_elastic_state_is_restored() -> None:
    module = model()
    plain = optimizer_of(module)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    state = hvd.elastic.TorchState(module, optimizer)
    state.sync()
    take_step(optimizer, module)
    state.restore()
    assert not optimizer.state_dict()["state"]
    step_scheduler(scheduler)
    assert rate_of(plain) == rate_of(optimizer) == 0.05


def check_adasum_begins_anew_when_state_is_loaded() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(module), op=hvd.Adasum)
    loss_of(module, batch(hvd.rank(), 0)).backward()
    hvd.barrier()
    optimizer.load_state_dict(optimizer.state_dict())
    take_step(optimizer, module)
    weights = hvd.allgather_object(module.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def check_two_optimizers_may_share_a_model_and_its_names() -> None:
    for op in (hvd.Average, hvd.Adasum):
        module = model()
        parts = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(part.parameters(), lr=0.1), named_parameters=module.named_parameters(), op=op
            )
            for part in (module[:2], module[2:])
        ]
        loss_of(module, batch(hvd.rank(), 0)).backward()
        for part in parts:
            part.step()
        before = model().state_dict()
        weights = hvd.allgather_object(module.state_dict())
        for name in before:
            torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=0)
            assert not torch.equal(weights[0][name], before[name])


def check_gradients_of_parameters_that_the_optimizer_lacks_stay_this_ranks() -> None:
    module = model()
    head = module[4]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(head.parameters(), lr=0.1), named_parameters=module.named_parameters()
    )
    loss_of(module, batch(hvd.rank(), 0)).backward()
    own = model()
    loss_of(own, batch(hvd.rank(), 0)).backward()
    optimizer.step()
    assert torch.equal(module[0].weight.grad, own[0].weight.grad)
    assert not torch.equal(head.weight.grad, own[4].weight.grad)
    frozen = module[:4].requires_grad_(False)
    frozen.zero_grad()
    take_step(optimizer, module)
    assert all(parameter.grad is None for parameter in frozen.parameters())


def check_an_optimizer_that_is_dropped_goes_with_its_model() -> None:
    for op in (hvd.Average, hvd.Adasum):
        module = model()
        optimizer = hvd.DistributedOptimizer(optimizer_of(module), op=op)
        take_step(optimizer, module)
        gone = [weakref.ref(optimizer), weakref.ref(module), weakref.ref(module[0].weight)]
        del module, optimizer
        gc.collect()
        assert [reference() for reference in gone] == [None] * 3


def check_a_module_can_be_wrapped_again() -> None:
    for op in (hvd.Average, hvd.Adasum):
        module = model()
        for _ in range(3):
            optimizer = hvd.DistributedOptimizer(
                optimizer_of(module), named_parameters=module.named_parameters(), op=op
            )
            take_step(optimizer, module)
        weights = hvd.allgather_object(module.state_dict())
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def check_gradients_cannot_be_cleared_between_the_backward_passes_of_a_step() -> None:
    for op in (hvd.Average, hvd.Adasum):
        module = model()
        optimizer = hvd.DistributedOptimizer(optimizer_of(module), backward_passes_per_step=2, op=op)
        loss_of(module, batch(hvd.rank(), 0)).backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        loss_of(module, batch(hvd.rank(), 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())


def check_what_is_not_reduced_may_be_cleared_at_any_time() -> None:
    alone = hvd.add_process_set([1])
    module = model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(module), process_set=alone)
    if hvd.rank() == 0:
        loss_of(module, batch(0, 0)).backward()
        optimizer.zero_grad()
        assert module[0].weight.grad is None
    hvd.remove_process_set(alone)


def check_a_wrapped_optimizer_tells_how_it_reduces() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(
        optimizer_of(module), gradient_predivide_factor=2.0, backward_passes_per_step=3, sparse_as_dense=True
    )
    assert (optimizer.op, optimizer.gradient_predivide_factor) == (hvd.Average, 2.0)
    assert (optimizer.backward_passes_per_step, optimizer.sparse_as_dense) == (3, True)
    assert optimizer.process_set is hvd.global_process_set


def check_names_of_parameters_are_checked() -> None:
    module = model()
    named = list(module.named_parameters())
    with pytest.raises(ValueError, match="must be unique"):
        hvd.DistributedOptimizer(optimizer_of(module), named_parameters=[("a", p) for _, p in named])
    with pytest.raises(ValueError, match="were not named"):
        hvd.DistributedOptimizer(optimizer_of(module), named_parameters=named[1:])
    with pytest.raises(ValueError, match="sequence of tuples"):
        hvd.DistributedOptimizer(optimizer_of(module), named_parameters=[p for _, p in named])
