"""The training steps of each contender that ``sparkdl bench step`` times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contenders.sessions import Trial
from sparkdl.collective import Communicator

if TYPE_CHECKING:
    import torch

_SEQUENCE = 16
_LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class EncoderSize:
    """Width, number of layers and number of heads of a Transformer encoder."""

    width: int
    num_layers: int
    num_heads: int


MODELS = {
    "25M": EncoderSize(width=512, num_layers=8, num_heads=8),
    "100M": EncoderSize(width=768, num_layers=14, num_heads=12),
}
"""Models by their number of parameters."""


Trainee = tuple["torch.nn.Module", "torch.optim.Optimizer"]
"""A model, and the optimizer that ends a step, as a contender wraps them."""

Wrap = Callable[["torch.nn.Module", "torch.optim.Optimizer", Communicator], Trainee]


class StepTrial(Trial):
    """Training steps of one model by one contender; forward, backward, allreduce and optimizer."""

    # The first backward pass of DistributedDataParallel finds the order of the gradients; the second one makes the
    # buckets by that order.
    num_warm_ups = 2

    def __init__(self, communicator: Communicator, wrap: Wrap, case: Mapping[str, Any]) -> None:
        import torch

        self._shape = (case["rows"], _SEQUENCE, MODELS[case["model"]].width)
        self._device = torch.device("cpu")
        if case["device"] == "cuda":
            self._device = torch.device("cuda", communicator.rank)
            torch.cuda.set_device(self._device)
        # All contenders begin with the same weights.
        torch.manual_seed(0)
        model = make_model(MODELS[case["model"]]).to(self._device)
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=0.9)
        self._parameters = list(model.parameters())
        self._model, self._optimizer = wrap(model, optimizer, communicator)
        self._generator = torch.Generator().manual_seed(communicator.rank)
        self._batches: list[torch.Tensor] = []

    def prepare(self, repetition: int, operations: int) -> None:  # noqa: ARG002  # the signature of all trials
        """Draw new batches."""
        import torch

        self._batches = [
            torch.randn(self._shape, generator=self._generator).to(self._device) for _ in range(operations)
        ]

    def run(self, operations: int) -> None:
        """Run this number of steps."""
        import torch

        assert operations == len(self._batches)
        for batch in self._batches:
            self._optimizer.zero_grad()
            output = self._model(batch)
            (output - batch).square().mean().backward()
            self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def result(self) -> dict[str, Any]:
        """Return the sum of the parameters, their bytes and their number.

        The sum must be the same on all ranks, unless they train alone.
        """
        return {
            "checksum": sum(float(parameter.detach().double().sum()) for parameter in self._parameters),
            "bytes": sum(parameter.numel() * parameter.element_size() for parameter in self._parameters),
            "tensors": len(self._parameters),
        }


def make_model(size: EncoderSize) -> torch.nn.Module:
    """Make a Transformer encoder without dropout; its output has the shape of its input."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(
        size.width, size.num_heads, 4 * size.width, dropout=0.0, batch_first=True, norm_first=True
    )
    return torch.nn.TransformerEncoder(layer, size.num_layers, enable_nested_tensor=False)


def _gradient_arena(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, communicator: Communicator
) -> Trainee:
    """Wrap the model in ``DataParallel`` of sparkdl, with gradients in memory that the ranks share."""
    from sparkdl.torch import DataParallel

    return DataParallel(model, communicator), optimizer


def _distributed_data_parallel(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, _: Communicator
) -> Trainee:
    """Wrap the model in torch's ``DistributedDataParallel``, on the initialized backend of torch.distributed."""
    import torch

    return torch.nn.parallel.DistributedDataParallel(model), optimizer


def _horovod_optimizer(
    module: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, _: Communicator
) -> Trainee:
    """Wrap the optimizer in ``DistributedOptimizer`` of Horovod or of its drop-in."""
    hvd: Any = import_module(module)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


WRAPPERS: dict[str, Wrap] = {
    # The reference: every rank trains a model of its own, at the same time.
    "alone": lambda model, optimizer, _: (model, optimizer),
    "DataParallel": _gradient_arena,
    "DDP on sparkdl": _distributed_data_parallel,
    "DDP on gloo": _distributed_data_parallel,
    "DDP on gloo tuned": _distributed_data_parallel,
    "DDP on nccl": _distributed_data_parallel,
    "hvd of sparkdl": partial(_horovod_optimizer, "sparkdl.horovod.torch"),
    "hvd of Horovod": partial(_horovod_optimizer, "horovod.torch"),
}
"""Functions that wrap a model and its optimizer, by contender; most do not use the communicator."""
