"""A small model with data, and its training by one process on the joined batch, as the reference for ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

FEATURES = 12
ROWS_PER_RANK = 6
NUM_STEPS = 3


def model() -> torch.nn.Sequential:
    """Three layers with the same initial weights in every process."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 4),
    )


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Plain SGD: with Adam a wrong scale of the gradients could stay undetected."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(ROWS_PER_RANK, FEATURES, generator=generator),
        torch.randint(0, 4, (ROWS_PER_RANK,), generator=generator),
    )


def joined_batch(world_size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all ranks in one step."""
    batches = [batch(rank, step) for rank in range(world_size)]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def loss_of(module: torch.nn.Module, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean loss over the rows."""
    return torch.nn.functional.cross_entropy(module(rows[0]), rows[1])


def assert_gradients(
    module: torch.nn.Module, expected: Mapping[str, torch.Tensor], *, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Assert that the gradients, which may be sharded, agree; only the order of float32 sums differs."""
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(_full(parameter.grad), expected[name], rtol=rtol, atol=atol)


def assert_trained(module: torch.nn.Module, world_size: int) -> None:
    """Assert that the weights, which may be sharded, are those of one process after ``NUM_STEPS`` steps."""
    expected = reference_weights(world_size)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(_full(parameter), expected[name], rtol=1e-5, atol=1e-6)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def reference_gradients(world_size: int, step: int = 0) -> dict[str, torch.Tensor]:
    """The gradients of one process on the joined batch, with the initial weights."""
    module = model()
    loss_of(module, joined_batch(world_size, step)).backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def reference_weights(world_size: int, num_steps: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    """The weights of one process after some steps on the joined batches."""
    module = model()
    optimizer = optimizer_of(module)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(module, joined_batch(world_size, step)).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
