"""DataParallel gives the results of one process on the joined batch; tolerance as in ``test_training``."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.collective import current_communicator
from sparkdl.errors import ParamError, RankLostError
from sparkdl.torch import DataParallel
from tests.checks import checks_in, require
from tests.run_ranks import RankEnvironment, run_ranks
from tests.torch.checks import run_checks
from tests.torch.training_examples import (
    NUM_STEPS,
    assert_gradients,
    assert_trained,
    batch,
    joined_batch,
    loss_of,
    model,
    optimizer_of,
    reference_gradients,
)

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def wrap(module: nn.Module, **options: Any) -> DataParallel:
    return DataParallel(module, current_communicator(), **options)


def rank() -> int:
    return current_communicator().rank


def world_size() -> int:
    return current_communicator().world_size


def check_gradients_equal_one_process_whatever_the_buckets() -> None:
    for bucket_bytes in (1, 500, 1 << 20):
        module = model()
        loss_of(wrap(module, bucket_bytes=bucket_bytes), batch(rank(), 0)).backward()
        assert_gradients(module, reference_gradients(world_size()))


def check_training_equals_one_process_whether_gradients_are_kept_or_dropped() -> None:
    for set_to_none in (True, False):
        module = model()
        wrapped, optimizer = wrap(module, bucket_bytes=500), optimizer_of(module)
        for step in range(NUM_STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(wrapped, batch(rank(), step)).backward()
            optimizer.step()
        assert_trained(module, world_size())


def check_gradients_stay_where_they_are_reduced() -> None:
    module = model()
    wrapped = wrap(module)
    loss_of(wrapped, batch(rank(), 0)).backward()
    places = [parameter.grad.data_ptr() for parameter in module.parameters()]
    wrapped.zero_grad(set_to_none=False)
    loss_of(wrapped, batch(rank(), 1)).backward()
    assert places == [parameter.grad.data_ptr() for parameter in module.parameters()]


def check_ranks_start_from_the_weights_and_buffers_of_rank_zero() -> None:
    torch.manual_seed(rank())
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    wrapped = wrap(module)
    torch.manual_seed(0)
    torch.testing.assert_close(module[0].weight, nn.Linear(3, 4).weight, rtol=0, atol=0)
    for _ in range(2):
        wrapped(torch.randn(5, 3) * (rank() + 1))
    wrapped.train()
    sent = module[1].running_mean.clone()
    wrapped(torch.zeros(5, 3))
    gathered = torch.empty(world_size(), 4)
    current_communicator().allgather(0.1 * module[0].bias.detach() + 0.9 * sent, gathered)
    torch.testing.assert_close(module[1].running_mean, gathered[0], **TOLERANCE)


def check_sums_of_several_passes_are_averaged_once() -> None:
    module = model()
    wrapped = wrap(module)
    with wrapped.no_sync():
        loss_of(wrapped, batch(rank(), 0)).backward()
    loss_of(wrapped, batch(rank(), 1)).backward()
    expected = [reference_gradients(world_size(), step) for step in (0, 1)]
    assert_gradients(module, {name: expected[0][name] + expected[1][name] for name in expected[0]})


class Branches(nn.Module):
    """A module in which rank 0 uses one branch, the other ranks another, and no rank the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.branches = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[min(rank(), 1)](x).sum()


def check_parameters_may_take_part_on_some_ranks_or_none() -> None:
    module = Branches()
    wrapped = wrap(module, bucket_bytes=8)
    x = torch.arange(6.0).view(2, 3)
    for _ in range(2):
        module.zero_grad()
        wrapped(x).backward()
        taken = [1 / world_size(), 1 - 1 / world_size()]
        for branch, share in zip(module.branches, taken, strict=False):
            torch.testing.assert_close(branch.weight.grad, x.sum(0).expand(2, 3) * share, **TOLERANCE)
        assert module.branches[2].weight.grad is None


def check_parameters_may_take_part_on_some_ranks_in_a_pass_without_averaging() -> None:
    module = Branches()
    wrapped = wrap(module, bucket_bytes=8)
    x = torch.arange(6.0).view(2, 3)
    with wrapped.no_sync():
        wrapped(x).backward()
    module.branches[min(rank(), 1)].requires_grad_(False)
    module.branches[2].weight.requires_grad_(True)
    (wrapped(x) + module.branches[2](x).sum()).backward()
    taken = [1 / world_size(), 1 - 1 / world_size(), 1.0]
    for branch, share in zip(module.branches, taken, strict=True):
        torch.testing.assert_close(branch.weight.grad, x.sum(0).expand(2, 3) * share, **TOLERANCE)


def check_a_rank_whose_pass_is_not_counted_adds_no_gradient() -> None:
    """Its own branch keeps None, also if the pass is not averaged; the others' branch gets their gradients."""
    for bucket_bytes in (8, 1 << 20):
        module = Branches()
        wrapped = wrap(module, bucket_bytes=bucket_bytes)
        x = torch.arange(6.0).view(2, 3)
        uncounted = wrapped.uncounted if rank() == 0 else nullcontext
        with wrapped.no_sync(), uncounted():
            wrapped(x * (rank() > 0)).backward()
        assert module.branches[0].weight.grad is None
        assert (module.branches[1].weight.grad is None) == (rank() == 0)
        with uncounted():
            wrapped(x * (rank() > 0)).backward()
        expected = x.sum(0).expand(2, 3) * 2 * (1 - 1 / world_size())
        torch.testing.assert_close(module.branches[1].weight.grad, expected, **TOLERANCE)
        assert module.branches[0].weight.grad is module.branches[2].weight.grad is None
        with uncounted():
            wrapped(x).backward()  # gradients that exist are kept
        assert module.branches[0].weight.grad is None
        module.branches[0].weight.grad = torch.ones(2, 3) if rank() == 0 else None
        with uncounted():
            wrapped(x * (rank() > 0)).backward()
        torch.testing.assert_close(
            module.branches[0].weight.grad, torch.ones(2, 3) / world_size(), **TOLERANCE
        )


def check_a_backward_pass_that_failed_leaves_no_trace() -> None:
    module = model()
    wrapped = wrap(module)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("no gradient")

    output = module[0](batch(rank(), 0)[0])
    output.register_hook(fail)
    with pytest.raises(ArithmeticError, match="no gradient"):
        module[1:](output).sum().backward()
    module.zero_grad()
    loss_of(wrapped, batch(rank(), 0)).backward()
    assert_gradients(module, reference_gradients(world_size()))


def check_a_sparse_gradient_is_an_error_that_names_its_parameter() -> None:
    for bucket_bytes in (1, 1 << 20):  # a bucket that starts during the backward pass, and the last bucket
        module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        wrapped = wrap(nn.ModuleDict({"words": module}), bucket_bytes=bucket_bytes)
        with pytest.raises(ParamError, match=r"'words\.0\.weight' is sparse .* without sparse=True"):
            module(torch.tensor([rank(), 3])).sum().backward()
        wrapped.close()
    first = nn.Embedding(5, 3, sparse=True)
    wrapped = wrap(nn.Sequential(nn.Linear(3, 3), first), bucket_bytes=1)
    with pytest.raises(ParamError, match=r"'1\.weight' is sparse"):
        wrapped.module[0](first(torch.tensor([rank()]))).sum().backward()
    wrapped.close()
    module = model()
    loss_of(wrap(module), batch(rank(), 0)).backward()
    assert_gradients(module, reference_gradients(world_size()))


def check_dtypes_may_differ() -> None:
    torch.manual_seed(1)
    module = nn.ModuleDict({"wide": nn.Linear(3, 2).double(), "narrow": nn.Linear(3, 2).bfloat16()})
    _kept = wrap(module, bucket_bytes=1 << 20)
    x = torch.full((1, 3), float(rank()))
    (module["wide"](x.double()).sum() + module["narrow"](x.bfloat16()).sum()).backward()
    mean = (world_size() - 1) / 2
    for part in module.values():
        torch.testing.assert_close(part.weight.grad.float(), torch.full((2, 3), mean))


def check_a_wrapper_that_nobody_keeps_lasts_until_the_backward_pass_is_over() -> None:
    module = nn.Linear(1, 1)
    output = wrap(module)(torch.full((1, 1), float(rank())))
    gc.collect()
    output.sum().backward()
    assert module.weight.grad.item() == (world_size() - 1) / 2


def check_a_module_can_be_wrapped_again_once_its_wrapper_is_closed() -> None:
    module = model()
    first = wrap(module)
    loss = loss_of(first, batch(rank(), 0))
    first.close()
    second = wrap(module)
    loss_of(second, batch(rank(), 0)).backward()
    assert_gradients(module, reference_gradients(world_size(), 0))
    second.close()
    module.zero_grad()
    own = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    loss.backward()
    assert_gradients(module, dict(zip(dict(module.named_parameters()), own, strict=True)))


def check_a_module_that_is_dropped_goes_with_its_gradients() -> None:
    wrapped = wrap(model())
    loss_of(wrapped, joined_batch(2, 0)).backward()
    gradient = weakref.ref(next(wrapped.parameters()).grad)
    assert gradient() is not None
    del wrapped
    gc.collect()
    assert gradient() is None


CHECKS = checks_in(__name__)


@pytest.fixture(
    scope="module",
    params=[("auto", 2), pytest.param(("tcp", 3), marks=pytest.mark.slow)],
    ids=["shared memory, 2", "tcp, 3"],
)
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    transport, size = request.param
    return run_checks([__name__], size, transport=transport)


@pytest.mark.parametrize("check", CHECKS)
def test_check_holds_on_every_transport(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])


def _lose_rank_one(environment: RankEnvironment) -> str:
    with environment.communicator() as communicator:
        wrapped = DataParallel(model(), communicator)
        communicator.barrier()
        if communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankLostError) as caught:
            loss_of(wrapped, joined_batch(2, 0)).backward()
        return str(caught.value)


def test_a_lost_rank_is_named_by_the_backward_pass() -> None:
    assert "rank 1" in run_ranks(2, _lose_rank_one, may_die=[1])[0]
