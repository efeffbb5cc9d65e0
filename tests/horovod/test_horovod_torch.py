"""``sparkdl.horovod.torch`` behaves as ``horovod.torch`` 0.28 does."""

from __future__ import annotations

import warnings

import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.errors import LaunchError, ParamError
from tests.torch.claims import claims_in, run_claims
from tests.torch.training_examples import (
    NUM_STEPS,
    batch,
    joined_batch,
    loss_of,
    model,
    optimizer_of,
    reference_weights,
)

# float32 sums in another order than in one process.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def claim_ranks_know_their_places() -> None:
    assert hvd.is_initialized()
    assert hvd.size() == hvd.local_size() == 2
    assert hvd.rank() == hvd.local_rank()
    assert hvd.cross_rank() == 0
    assert hvd.cross_size() == 1
    assert hvd.is_homogeneous()


def claim_allreduce_averages_by_default_and_keeps_its_argument() -> None:
    tensor = torch.arange(6.0).view(2, 3) * (hvd.rank() + 1)
    torch.testing.assert_close(hvd.allreduce(tensor, name="x"), torch.arange(6.0).view(2, 3) * 1.5)
    torch.testing.assert_close(tensor, torch.arange(6.0).view(2, 3) * (hvd.rank() + 1))


def claim_allreduce_in_place_writes_to_its_argument() -> None:
    tensor = torch.full((3, 2), hvd.rank() + 1.0).t()
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert (tensor == 3).all()


def claim_allreduce_knows_every_operation_and_scales() -> None:
    own = torch.tensor([1.0, 4.0]) if hvd.rank() == 0 else torch.tensor([3.0, 2.0])
    expected = {hvd.Sum: [4, 6], hvd.Average: [2, 3], hvd.Min: [1, 2], hvd.Max: [3, 4], hvd.Product: [3, 8]}
    for op, values in expected.items():
        assert hvd.allreduce(own, op=op).tolist() == values
    assert hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist() == [8, 12]
    assert hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Average).tolist() == [0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert hvd.allreduce(own, average=False).tolist() == [4, 6]
        with pytest.raises(ValueError, match="supersedes"):
            hvd.allreduce(own, average=True, op=hvd.Sum)
    with pytest.raises(ParamError, match="op=2"):
        hvd.allreduce(own, op=2)


def claim_half_compression_gives_back_the_dtype() -> None:
    reduced = hvd.allreduce(torch.full((4,), float(hvd.rank())), compression=hvd.Compression.fp16)
    assert reduced.dtype == torch.float32
    assert reduced.tolist() == [0.5] * 4


def claim_handles_are_polled_and_synchronized() -> None:
    handles = [hvd.allreduce_async(torch.full((5,), float(i)), op=hvd.Sum) for i in range(3)]
    for i, handle in reversed(list(enumerate(handles))):
        assert hvd.synchronize(handle).tolist() == [2.0 * i] * 5
        assert hvd.poll(handle)


def claim_allgather_joins_unequal_first_dimensions() -> None:
    own = torch.full((hvd.rank() + 1, 2), hvd.rank(), dtype=torch.int16)
    assert hvd.allgather(own).tolist() == [[0, 0], [1, 1], [1, 1]]
    nothing = torch.empty(0 if hvd.rank() == 0 else 1, 2)
    assert hvd.allgather(nothing).shape == (1, 2)


def claim_allgather_of_tensors_that_do_not_fit_fails_alike_on_all_ranks() -> None:
    with pytest.raises(ParamError, match=r"rank 0: \(1, 2\).*rank 1: \(1, 3\)"):
        hvd.allgather(torch.empty(1, 2 + hvd.rank()))
    hvd.barrier()


def claim_broadcast_gives_the_roots_tensor() -> None:
    own = torch.full((2, 2), hvd.rank() == 1)
    assert hvd.broadcast(own, root_rank=1).all()
    assert bool(own.all()) == (hvd.rank() == 1)
    assert hvd.broadcast_(own, 1) is own
    assert own.all()
    with pytest.raises(ParamError, match="root_rank=7"):
        hvd.broadcast(own, 7)


def claim_gradients_flow_through_collectives() -> None:
    size, rank = hvd.size(), hvd.rank()
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Average) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [1.5] * 3
    x = torch.ones(rank + 1, requires_grad=True)
    (hvd.allgather(x) * torch.arange(3.0)).sum().backward()
    assert x.grad.tolist() == ([0.0] if rank == 0 else [2.0, 4.0])
    x = torch.ones(2, requires_grad=True)
    hvd.broadcast(x, 0).sum().backward()
    assert x.grad.tolist() == [float(size)] * 2 if rank == 0 else [0.0] * 2


def claim_objects_travel() -> None:
    assert hvd.broadcast_object({"a": [1, 2]} if hvd.rank() == 1 else None, root_rank=1) == {"a": [1, 2]}
    assert hvd.allgather_object("x" * hvd.rank()) == ["", "x"]


def claim_parameters_become_the_roots() -> None:
    for form in ("state_dict", "named_parameters", "parameters"):
        module = model()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(hvd.rank())
        given = getattr(module, form)()
        hvd.broadcast_parameters(given if form == "state_dict" else list(given), root_rank=0)
        for mine, expected in zip(module.parameters(), model().parameters(), strict=True):
            torch.testing.assert_close(mine, expected)
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(3, 0)


def claim_optimizer_state_becomes_the_roots() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5 if hvd.rank() == 0 else 0.1)
    if hvd.rank() == 0:
        loss_of(module, batch(0, 0)).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.5
    states = hvd.allgather_object(
        {key: value["exp_avg"] for key, value in optimizer.state_dict()["state"].items()}
    )
    assert len(states[1]) == len(list(module.parameters()))
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(module.parameters()), 0)


def train(optimizer: torch.optim.Optimizer, module: torch.nn.Module, passes: int = 1) -> None:
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            (loss_of(module, batch(hvd.rank(), step)) / passes).backward()
        optimizer.step()


def assert_trained_as_one_process(module: torch.nn.Module) -> None:
    for name, expected in reference_weights(hvd.size()).items():
        torch.testing.assert_close(module.state_dict()[name], expected, **TOLERANCE)


def claim_distributed_optimizer_trains_as_one_process() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(module), named_parameters=module.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    train(optimizer, module)
    assert_trained_as_one_process(module)


def claim_distributed_optimizer_adds_up_backward_passes() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(module), backward_passes_per_step=2)
    train(optimizer, module, passes=2)
    assert_trained_as_one_process(module)
    loss_of(module, batch(hvd.rank(), 0)).backward()
    loss_of(module, batch(hvd.rank(), 0)).backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        loss_of(module, batch(hvd.rank(), 0)).backward()
    optimizer.synchronize()


def claim_gradients_can_be_clipped_between_synchronize_and_step() -> None:
    module, reference = model(), model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(module))
    loss_of(module, batch(hvd.rank(), 0)).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    loss_of(reference, joined_batch(hvd.size(), 0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(norm, expected, **TOLERANCE)
    loss_of(module, batch(hvd.rank(), 0)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def claim_predivide_compression_and_sum_are_honoured() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(module), gradient_predivide_factor=2.0)
    train(optimizer, module)
    assert_trained_as_one_process(module)
    module = model()
    half = hvd.DistributedOptimizer(optimizer_of(module), compression=hvd.Compression.fp16)
    train(half, module)
    for name, expected in reference_weights(hvd.size()).items():
        # float16 gradients have 11 bits of mantissa.
        torch.testing.assert_close(module.state_dict()[name], expected, rtol=1e-2, atol=1e-3)
    module = model()
    summing = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1 / hvd.size()), op=hvd.Sum)
    loss_of(module, batch(hvd.rank(), 0)).backward()
    summing.step()
    for name, expected in reference_weights(hvd.size(), 1).items():
        torch.testing.assert_close(module.state_dict()[name], expected, **TOLERANCE)


def claim_ranks_that_use_different_parameters_still_match() -> None:
    branches = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(3)])
    hvd.broadcast_parameters(branches.state_dict(), 0)
    before = [branch.weight.detach().clone() for branch in branches]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(branches.parameters(), lr=1.0))
    mine = [0, 1] if hvd.rank() == 0 else [1, 0]
    x = torch.ones(1, 2)
    branches[mine[1]](branches[mine[0]](x).expand(1, 2)).sum().backward()
    optimizer.step()
    for branch, old in zip(branches, before, strict=True):
        torch.testing.assert_close(*hvd.allgather_object(branch.weight.detach()))
        assert (branch is branches[2]) == torch.equal(branch.weight.detach(), old)


def claim_schedulers_made_first_still_act() -> None:
    module = model()
    plain = optimizer_of(module)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.0)
    optimizer = hvd.DistributedOptimizer(plain)
    loss_of(module, batch(hvd.rank(), 0)).backward()
    optimizer.step()
    weights = hvd.allgather_object(module.state_dict())
    torch.testing.assert_close(weights[0], weights[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0


def claim_names_of_parameters_are_checked() -> None:
    module = model()
    named = list(module.named_parameters())
    with pytest.raises(ValueError, match="must be unique"):
        hvd.DistributedOptimizer(optimizer_of(module), named_parameters=[("a", p) for _, p in named])
    with pytest.raises(ValueError, match="were not named"):
        hvd.DistributedOptimizer(optimizer_of(module), named_parameters=named[1:])


CLAIMS = claims_in(__name__)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_claims(__name__, 2, face="horovod")


@pytest.mark.parametrize("claim", CLAIMS)
def test_horovod(claim: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[claim] is None, outcomes[claim]


def test_init_outside_a_rank_says_how_to_start_ranks() -> None:
    with pytest.raises(LaunchError, match="run_on_ranks"):
        hvd.init()
    assert not hvd.is_initialized()


def test_calls_before_init_raise_horovods_error() -> None:
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)\."):
        hvd.rank()
