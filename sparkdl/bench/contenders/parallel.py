"""The training steps that ``sparkdl bench parallel`` times, of a decoder under each kind of parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contenders.sessions import Trial
from sparkdl.collective import Communicator

if TYPE_CHECKING:
    import torch

    from sparkdl.parallel import Parallelism

MICROBATCHES = 4
"""Number of microbatches of the pipeline."""


@dataclass(frozen=True, kw_only=True)
class DecoderSize:
    """Number of layers, width, number of heads and vocabulary of a decoder."""

    width: int
    num_layers: int
    num_heads: int
    vocabulary: int


MODELS = {
    "23M": DecoderSize(width=512, num_layers=6, num_heads=8, vocabulary=4096),
    "100M": DecoderSize(width=768, num_layers=12, num_heads=12, vocabulary=8192),
}
"""Models by their number of parameters."""

KINDS = ("FSDP2", "TP", "TP+SP", "PP", "CP")
"""Kinds of parallelism over all ranks."""

ALONE = {"one rank": 1, "two threads": 2}
"""Contenders that run the whole step in one process while the other ranks sleep, and their numbers of threads."""


class ParallelTrial(Trial):
    """Training steps of one contender: forward, backward and AdamW, with the same batch on all ranks."""

    def __init__(self, communicator: Communicator, contender: str, case: Mapping[str, Any]) -> None:
        import torch

        self._is_idle = contender in ALONE and communicator.rank != 0
        torch.set_num_threads(ALONE.get(contender, 1))
        size = MODELS[case["model"]]
        shape = (case["rows"], case["positions"] + 1)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(size.vocabulary, shape, generator=generator)
        self._tokens, self._labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        torch.manual_seed(0)  # all contenders begin with the same weights
        kind = contender.partition(" on ")[0]
        module = make_decoder(size)
        self._step = (
            WholeStep(module)
            if contender in ALONE
            else DividedStep(module, _sizes_of(kind, communicator.world_size), case["rows"])
        )
        self._optimizer = torch.optim.AdamW(self._step.module.parameters(), lr=1e-4, fused=True)
        self._loss, self._saved_bytes = self._first_loss()

    def run(self, operations: int) -> None:
        """Run this number of steps."""
        if self._is_idle:
            return
        for _ in range(operations):
            self._optimizer.zero_grad()
            self._step.backward(self._tokens, self._labels)
            self._optimizer.step()

    def result(self) -> dict[str, Any]:
        """Return the loss with the initial weights, and the bytes of training state and of activations on this rank."""
        return {"loss": self._loss, "state_bytes": self._state_bytes(), "saved_bytes": self._saved_bytes}

    def _first_loss(self) -> tuple[float, int]:
        """Return the loss of the batch, and the bytes that its forward pass keeps for the backward pass."""
        import torch

        from sparkdl.torch.buffers import local_part

        if self._is_idle:
            return float("nan"), 0
        parts = map(local_part, self._step.module.parameters())
        storages = {part.untyped_storage().data_ptr() for part in parts}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = local_part(tensor).untyped_storage()
            if storage.data_ptr() not in storages:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self._step.backward(self._tokens, self._labels).item()
        return loss, sum(saved.values())

    def _state_bytes(self) -> int:
        import torch

        from sparkdl.torch.buffers import local_part

        parameters = self._step.module.parameters()
        tensors = [tensor for parameter in parameters for tensor in (parameter, parameter.grad)]
        for state in self._optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]
        return sum(local_part(tensor).nbytes for tensor in tensors if tensor is not None)


def make_decoder(size: DecoderSize) -> torch.nn.Module:
    """Make the language model of a size, on torch's default device."""
    from sparkdl.networks.decoder import Decoder, DecoderSizes

    return Decoder(
        DecoderSizes(
            vocabulary=size.vocabulary,
            width=size.width,
            layers=size.num_layers,
            heads=size.num_heads,
            is_tied=False,  # with a shared weight, a pipeline would send more
        )
    )


def _sizes_of(kind: str, ranks: int) -> Parallelism:
    """Return the sizes of one of :data:`KINDS` over all ranks."""
    from sparkdl.parallel import Parallelism

    return {
        "FSDP2": Parallelism(shard=ranks),
        "TP": Parallelism(tensor=ranks),
        "TP+SP": Parallelism(tensor=ranks, sequence=True),
        "PP": Parallelism(pipeline=ranks, microbatches=MICROBATCHES),
        "CP": Parallelism(context=ranks),
    }[kind]


class WholeStep:
    """Computes the loss of a module and its gradients."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def backward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Add the gradients of some rows to the present gradients, and return the mean loss."""
        from torch.nn.functional import cross_entropy

        loss = cross_entropy(self.module(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        return loss


class DividedStep(WholeStep):
    """Computes the loss of a module that ``sparkdl.parallel`` divides among ranks, and its gradients.

    Attributes:
        module: this rank's part of the module.
        reader: number of the group of ranks that read the same rows; ``readers`` is the number of groups.
    """

    def __init__(self, module: torch.nn.Module, parallelism: Parallelism, rows: int) -> None:
        """Divide a module.

        Args:
            module: the whole module.
            parallelism: how it is divided.
            rows: number of rows of a step, over all ranks.
        """
        from sparkdl.parallel import Pipeline, cut, parallelize

        layout = parallelism.lay_out()
        self.reader, self.readers = layout.row_reader
        self._tensor = layout.group("tensor") if parallelism.tensor > 1 else None
        self._context = layout.group("context") if parallelism.context > 1 else None
        self._pipeline: Pipeline | None = None
        if parallelism.pipeline > 1:
            group = layout.group("pipeline")
            (stage,) = cut(module, group, schedule="1f1b")
            module = parallelize(stage, layout)
            # Without a choice the largest number up to four times the stages that divides the rows.
            numbers = range(1, 4 * parallelism.pipeline + 1)
            most = max(number for number in numbers if rows // self.readers % number == 0)
            microbatches = parallelism.microbatches or most
            self._pipeline = Pipeline(
                [module], group, schedule="1f1b", microbatches=microbatches, loss=self._loss_of
            )
            super().__init__(module)
        else:
            super().__init__(parallelize(module, layout))

    def backward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Do as :class:`WholeStep`; the loss is that of this rank's part of the rows."""
        from sparkdl.parallel import sequence

        if self._pipeline is not None:
            return self._pipeline.step(inputs, target=labels)
        arguments: tuple[torch.Tensor, ...] = (inputs,)
        if self._context is not None:
            positions = sequence.positions(inputs.shape[1], self._context)
            inputs, labels = (sequence.shard(part, 1, self._context) for part in (inputs, labels))
            arguments = (inputs, positions)
        loss = self._loss_of(self.module(*arguments), labels)
        loss.backward()
        return loss

    def _loss_of(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import cross_entropy as whole_cross_entropy

        from sparkdl.parallel import cross_entropy

        if self._tensor is None:
            return whole_cross_entropy(outputs.flatten(0, -2), labels.flatten())
        return cross_entropy(outputs, labels, self._tensor)
