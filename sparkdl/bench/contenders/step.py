"""What ``sparkdl bench step`` times: one training step by each contender. Runs on the *rank*."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contenders.sessions import Session

if TYPE_CHECKING:
    import torch

_SEQUENCE = 16
_LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A Transformer encoder of so many layers of a width."""

    width: int
    num_layers: int
    num_heads: int


MODELS = {
    "25M": ModelSize(width=512, num_layers=8, num_heads=8),
    "100M": ModelSize(width=768, num_layers=14, num_heads=12),
}
"""Models by their number of parameters."""


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """What a contender makes of a model and its optimizer.

    Attributes:
        model: computes the output.
        optimizer: ends the step.
        keeps_gradients: gradients are zeroed where they are, not given up.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    keeps_gradients: bool = False


Wrap = Callable[[Trainee, Session], Trainee]


class StepTrial:
    """Training steps of one model by one contender; forward, backward, allreduce and optimizer."""

    # The first backward pass of DistributedDataParallel finds out the order of the gradients, and the second
    # makes its buckets by it.
    num_warm_ups = 2

    def __init__(self, session: Session, wrap: Wrap, case: Mapping[str, Any]) -> None:
        import torch

        self._shape = (case["rows"], _SEQUENCE, MODELS[case["model"]].width)
        # All contenders begin with the same weights.
        torch.manual_seed(0)
        model = make_model(MODELS[case["model"]])
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=0.9)
        self._parameters = list(model.parameters())
        self._trainee = wrap(Trainee(model=model, optimizer=optimizer), session)
        self._generator = torch.Generator().manual_seed(session.rank)
        self._batches: list[torch.Tensor] = []

    def prepare(self, repetition: int, operations: int) -> None:  # noqa: ARG002  # a trial's signature
        """Draw new batches."""
        import torch

        self._batches = [torch.randn(self._shape, generator=self._generator) for _ in range(operations)]

    def run(self, operations: int) -> None:
        """So many steps."""
        assert operations == len(self._batches)
        model, optimizer = self._trainee.model, self._trainee.optimizer
        for batch in self._batches:
            if self._trainee.keeps_gradients:
                optimizer.zero_grad(set_to_none=False)
            else:  # as Horovod's optimizers have it
                optimizer.zero_grad()
            output = model(batch)
            (output - batch).square().mean().backward()
            optimizer.step()

    def check(self) -> None:
        """Do nothing: :meth:`result` has the checksums of the ranks."""

    def result(self) -> dict[str, Any]:
        """The parameters' sum, which all ranks must have alike where they communicate, and their bytes."""
        return {
            "checksum": sum(float(parameter.detach().double().sum()) for parameter in self._parameters),
            "bytes": sum(parameter.numel() * parameter.element_size() for parameter in self._parameters),
            "tensors": len(self._parameters),
        }


def make_model(size: ModelSize) -> torch.nn.Module:
    """A Transformer encoder, without dropout; it gives the shape that it takes."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(
        size.width, size.num_heads, 4 * size.width, dropout=0.0, batch_first=True, norm_first=True
    )
    return torch.nn.TransformerEncoder(layer, size.num_layers, enable_nested_tensor=False)


def step_trial(session: Session, contender: str, case: Mapping[str, Any]) -> StepTrial:
    """The trial of a turn; ``contender`` is a key of :data:`WRAPPERS`."""
    return StepTrial(session, WRAPPERS[contender], case)


# All are called alike; most have no use for the session.


def _alone(trainee: Trainee, _: Session) -> Trainee:
    """The reference: every rank trains a model of its own, at the same time."""
    return trainee


def _gradient_arena(trainee: Trainee, session: Session) -> Trainee:
    """Sparkdl's own, with gradients in memory that the ranks share."""
    from sparkdl.torch import DataParallel

    model = DataParallel(trainee.model, session.communicator)
    return Trainee(model=model, optimizer=trainee.optimizer, keeps_gradients=True)


def _distributed_data_parallel(trainee: Trainee, _: Session) -> Trainee:
    """Torch's own, on the backend with which torch.distributed was initialized."""
    import torch

    model = torch.nn.parallel.DistributedDataParallel(trainee.model)
    return Trainee(model=model, optimizer=trainee.optimizer)


def _horovod_optimizer(module: str) -> Wrap:
    """``DistributedOptimizer`` of Horovod or of its drop-in."""

    def wrap(trainee: Trainee, _: Session) -> Trainee:
        hvd: Any = import_module(module)
        hvd.broadcast_parameters(trainee.model.state_dict(), root_rank=0)
        named = trainee.model.named_parameters()
        return Trainee(
            model=trainee.model,
            optimizer=hvd.DistributedOptimizer(trainee.optimizer, named_parameters=named),
        )

    return wrap


WRAPPERS: dict[str, Wrap] = {
    "alone": _alone,
    "DataParallel": _gradient_arena,
    "DDP on sparkdl": _distributed_data_parallel,
    "DDP on gloo": _distributed_data_parallel,
    "DDP on gloo tuned": _distributed_data_parallel,
    "hvd of sparkdl": _horovod_optimizer("sparkdl.horovod.torch"),
    "hvd of Horovod": _horovod_optimizer("horovod.torch"),
}
