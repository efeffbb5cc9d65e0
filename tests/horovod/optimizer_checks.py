"""``DistributedOptimizer`` trains N ranks as one process with the N-fold batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import sparkdl.horovod.torch as hvd
from tests.torch.training_examples import (
    NUM_STEPS,
    batch,
    joined_batch,
    loss_of,
    model,
    optimizer_of,
    reference_weights,
)


def train(optimizer: torch.optim.Optimizer, module: torch.nn.Module, passes: int = 1) -> None:
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            (loss_of(module, batch(hvd.rank(), step)) / passes).backward()
        optimizer.step()


def assert_trained_as_one_process(
    module: torch.nn.Module, num_steps: int = NUM_STEPS, *, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """The default tolerance is for another order of float32 sums than in one process."""
    for name, expected in reference_weights(hvd.size(), num_steps).items():
        torch.testing.assert_close(module.state_dict()[name], expected, rtol=rtol, atol=atol)


def check_distributed_optimizer_trains_as_one_process() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(module), named_parameters=module.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    train(optimizer, module)
    assert_trained_as_one_process(module)


def check_closures_are_averaged() -> None:
    """Also of LBFGS, whose number of calls depends on the losses."""
    for make in (optimizer_of, partial(torch.optim.LBFGS, lr=0.5, max_iter=4)):
        weights = []
        for is_joined in (True, False):
            module = model()
            optimizer = make(module.parameters()) if make is not optimizer_of else make(module)
            if not is_joined:
                optimizer = hvd.DistributedOptimizer(optimizer)
            for step in range(NUM_STEPS):
                rows = joined_batch(hvd.size(), step) if is_joined else batch(hvd.rank(), step)
                loss = optimizer.step(partial(_evaluate, optimizer, module, rows))
            weights.append([*module.state_dict().values(), loss.detach()])
        torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-4)


def _evaluate(optimizer: torch.optim.Optimizer, module: torch.nn.Module, rows: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(module, rows)
    loss.backward()
    return loss


def check_groups_of_gradients_train_alike() -> None:
    for form in ("number", "lists"):
        module = model()
        groups = 2 if form == "number" else [list(module.parameters())[1:4]]
        optimizer = hvd.DistributedOptimizer(
            optimizer_of(module), named_parameters=module.named_parameters(), groups=groups
        )
        train(optimizer, module)
        assert_trained_as_one_process(module)
    module = model()
    with pytest.warns(DeprecationWarning, match="num_groups"):
        train(hvd.DistributedOptimizer(optimizer_of(module), num_groups=3), module)
    assert_trained_as_one_process(module)
    for groups, message in (
        (-1, "non-negative integer"),
        ("ab", "non-negative integer"),
        ([["a"]], "must consist of torch.Tensor"),
        ([[module[0].weight], [module[0].weight]], "only appear once"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(optimizer_of(module), groups=groups)


def check_distributed_optimizer_adds_up_backward_passes() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(module), backward_passes_per_step=2)
    train(optimizer, module, passes=2)
    assert_trained_as_one_process(module)
    loss_of(module, batch(hvd.rank(), 0)).backward()
    loss_of(module, batch(hvd.rank(), 0)).backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        loss_of(module, batch(hvd.rank(), 0)).backward()
    optimizer.synchronize()
    with pytest.raises(ValueError, match="must be > 0"):
        hvd.DistributedOptimizer(optimizer_of(module), backward_passes_per_step=0)


def check_gradients_can_be_clipped_between_synchronize_and_step() -> None:
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
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
    loss_of(module, batch(hvd.rank(), 0)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def check_predivide_compression_and_sum_are_honoured() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(module), gradient_predivide_factor=2.0)
    train(optimizer, module)
    assert_trained_as_one_process(module)
    for groups in (None, 2):
        module = model()
        half = hvd.DistributedOptimizer(optimizer_of(module), compression=hvd.Compression.fp16, groups=groups)
        train(half, module)
        # float16 gradients have 11 significant bits.
        assert_trained_as_one_process(module, rtol=1e-2, atol=1e-3)
    module = model()
    summing = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1 / hvd.size()), op=hvd.Sum)
    loss_of(module, batch(hvd.rank(), 0)).backward()
    summing.step()
    assert_trained_as_one_process(module, 1)
    with pytest.raises(ValueError, match="not supported with op != Average"):
        hvd.DistributedOptimizer(optimizer_of(module), op=hvd.Sum, gradient_predivide_factor=2.0)


def check_ranks_that_use_different_parameters_still_match() -> None:
    for groups in (None, 2):
        branches = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(3)])
        hvd.broadcast_parameters(branches.state_dict(), 0)
        before = [branch.weight.detach().clone() for branch in branches]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(branches.parameters(), lr=1.0), groups=groups)
        mine = [0, 1] if hvd.rank() == 0 else [1, 0]
        x = torch.ones(1, 2)
        branches[mine[1]](branches[mine[0]](x).expand(1, 2)).sum().backward()
        optimizer.step()
        for branch, old in zip(branches, before, strict=True):
            torch.testing.assert_close(*hvd.allgather_object(branch.weight.detach()))
            assert (branch is branches[2]) == torch.equal(branch.weight.detach(), old)


def check_sparse_gradients_are_averaged() -> None:
    for as_dense in (False, True):
        torch.manual_seed(5)
        embedding = torch.nn.Embedding(6, 2, sparse=True)
        before = embedding.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0), sparse_as_dense=as_dense
        )
        embedding(torch.tensor([0, 1] if hvd.rank() == 0 else [1, 3, 3])).sum().backward()
        optimizer.step()
        change = (before - embedding.weight.detach())[:, 0]
        torch.testing.assert_close(change, torch.tensor([0.5, 1.0, 0.0, 1.0, 0.0, 0.0]))
        assert embedding.weight.grad.is_sparse
        # A rank whose backward pass does not use the embedding still takes part.
        optimizer.zero_grad()
        if hvd.rank() == 0:
            embedding(torch.tensor([5])).sum().backward()
        optimizer.step()
        torch.testing.assert_close((before - embedding.weight.detach())[5], torch.tensor([0.5, 0.5]))


def check_a_group_may_have_sparse_and_dense_gradients() -> None:
    embedding, linear = torch.nn.Embedding(1, 1, sparse=True), torch.nn.Linear(2, 3, bias=False)
    # Parameters with one element and equal values must not be confused with each other.
    factor = torch.nn.Parameter(torch.ones(1, 1))
    parameters = [embedding.weight, factor, linear.weight]
    for parameter in parameters:
        torch.nn.init.ones_(parameter)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), groups=[parameters])
    loss = embedding(torch.tensor([0])).sum() + factor.sum() + linear(torch.ones(2)).sum()
    (loss * float(hvd.rank())).backward()
    optimizer.step()
    for parameter in parameters:
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 0.5))


def check_adasum_combines_the_steps_of_the_ranks() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum)
    # Orthogonal gradients: both are applied in full.
    (weight * torch.eye(2)[hvd.rank()]).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    assert weight.tolist() == [-0.5, -0.5]
    # Equal gradients: one of them is applied.
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [-1.0, -1.0]
    with pytest.raises(AssertionError, match="not supported when using Adasum"):
        optimizer.skip_synchronize()


def check_adasum_trains_and_takes_several_passes() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(
        optimizer_of(module),
        named_parameters=module.named_parameters(),
        op=hvd.Adasum,
        backward_passes_per_step=2,
        compression=hvd.Compression.fp16,
    )
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        for _ in range(2):
            loss = loss_of(module, batch(hvd.rank(), step % 2))
            (loss / 2).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[6] < losses[0]  # losses of the same batch
    weights = hvd.allgather_object(module.state_dict())
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=0)
