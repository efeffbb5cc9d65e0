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
from sparkdl.errors import ParamError, RankLostError, ReplicasDifferError
from sparkdl.torch import DataParallel, ReplicaCheck
from sparkdl.torch.buffers import as_bytes, plain_parts
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


class Special(nn.Module):
    """Tensors of every kind whose elements a communicator cannot view as they are."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.complex = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
        self.narrow = nn.Parameter(torch.randn(3).to(torch.float8_e5m2), requires_grad=False)
        scales, zeros = torch.rand(3) + 0.1, torch.zeros(3, dtype=torch.int64)
        for name, tensor in {
            "pairs": torch.randn(2, dtype=torch.complex128),
            "eighth": torch.randn(3).to(torch.float8_e4m3fn),
            "coo": torch.randn(3, 3).to_sparse(),
            "csr": torch.randn(3, 3).to_sparse_csr(),
            "blocks": torch.randn(4, 4).to_sparse_bsc((2, 2)),
            "quantized": torch.quantize_per_tensor(torch.randn(3), 0.1, 3, torch.qint8),
            "by channel": torch.quantize_per_channel(torch.randn(3, 2), scales, zeros, 0, torch.qint8),
            "odd": torch.randn(7).to(torch.float16)[1:].conj(),
            "turned": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        }.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.complex).abs().sum()


def check_tensors_of_every_kind_are_sent_and_compared() -> None:
    module, own, of_rank_0 = Special(rank()), Special(rank()), Special(0)
    wrapped = wrap(module)
    for (name, tensor), expected in zip(
        module.state_dict().items(), of_rank_0.state_dict().values(), strict=True
    ):
        for part, other in zip(plain_parts(tensor), plain_parts(expected), strict=True):
            assert torch.equal(as_bytes(part), as_bytes(other)), name
    x = torch.ones(1, 3) * (rank() + 1)
    wrapped(x).backward()
    (expected,) = torch.autograd.grad(of_rank_0(x * (world_size() + 1) / 2 / (rank() + 1)), of_rank_0.complex)
    torch.testing.assert_close(module.complex.grad, expected, **TOLERANCE)
    check = ReplicaCheck(module)
    check.compare("the beginning")
    with torch.no_grad():
        own.complex.copy_(module.complex)
        own.narrow.copy_(torch.full((3,), float(rank())))
    with pytest.raises(ReplicasDifferError, match=r"'narrow' on ranks? 1.* differs from rank 0's") as caught:
        ReplicaCheck(own).compare("the end")
    assert "They have not been compared before." in str(caught.value)


def check_buffers_that_hold_still_are_compared() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    module.register_buffer("table", torch.arange(4.0))
    module.register_buffer("cache", torch.zeros(1 + rank()), persistent=False)  # grows with a rank's rows
    check = ReplicaCheck(module)
    check.compare("the beginning")
    module(torch.randn(8, 3))  # statistics of each rank's own rows
    check.compare("the first step")
    check.compare("the first step, once more")
    module.eval()  # frozen with what it has
    check.compare("the second step")
    table = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    for parameter in table.parameters():
        nn.init.ones_(parameter)
    table[1].register_buffer("table", torch.arange(4.0) * (1 + rank()))
    with pytest.raises(
        ReplicasDifferError, match=r"the buffer '1\.table' on ranks? 1.* differs .* by up to"
    ) as caught:
        ReplicaCheck(table).compare("the first step")
    assert "They have not been compared before." in str(caught.value)
    apart = nn.BatchNorm1d(2).requires_grad_(False)
    apart.running_mean.fill_(rank())
    with pytest.raises(ReplicasDifferError, match="the buffer 'running_mean' on"):
        ReplicaCheck(apart).compare("the end")
    with torch.no_grad():
        apart.running_mean.fill_(1 + rank() * 1e-7)
    healed = ReplicaCheck(apart)
    healed.compare("the end")
    assert apart.running_mean.tolist() == [1.0, 1.0]


def check_other_shapes_and_missing_parameters_are_named() -> None:
    for number, what in (
        (3 + rank(), r"'weight' is torch.float32 \(2, 3\) on rank 0 and torch.float32 \(2, 4\) on rank 1"),
        (3, r"'bias' is torch.float32 \(2,\) on rank 0 and missing on rank 1"),
    ):
        module = nn.Linear(number, 2, bias=number > 3 or rank() == 0)
        with pytest.raises(ReplicasDifferError, match=what):
            ReplicaCheck(module).compare("the end")


def check_nan_equals_nan_and_rounding_is_removed() -> None:
    module = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[float("nan") * (-1) ** rank(), 1 + rank() * 2e-7]]))
    ReplicaCheck(module).compare("the end")
    assert module.weight[0, 1] == 1


def check_what_ranks_cannot_average_is_refused_by_name() -> None:
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        module = nn.Linear(3, 3)
        module.weight = nn.Parameter(module.weight.detach().to(kind))
        with pytest.raises(ParamError, match=f"cannot average gradients of parameter 'weight' .{kind}"):
            wrap(module)
    module = nn.Sequential(nn.Identity())
    module[0].edges = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ParamError, match=r"parameter '0\.edges' \(torch.float32, torch.sparse_coo\)"):
        wrap(module)


def check_a_graph_of_gradients_is_refused_and_inner_derivatives_are_not() -> None:
    module = model()
    wrapped = wrap(module)
    with pytest.raises(ParamError, match=r"create_graph=True.* torch\.autograd\.grad"):
        loss_of(wrapped, batch(rank(), 0)).backward(create_graph=True)
    module.zero_grad()
    rows, labels = batch(rank(), 0)
    loss = loss_of(wrapped, (rows.requires_grad_(), labels))
    (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
    (loss + 0 * slope.square().sum()).backward()
    assert_gradients(module, reference_gradients(world_size()))


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
