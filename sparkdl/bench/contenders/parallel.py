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
        self._step = (
            _Step(make_decoder(size)) if contender in ALONE else _divided(size, kind, communicator.world_size)
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

        if self._is_idle:
            return float("nan"), 0
        storages = {part.untyped_storage().data_ptr() for part in map(_local, self._step.module.parameters())}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = _local(tensor).untyped_storage()
            if storage.data_ptr() not in storages:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self._step.backward(self._tokens, self._labels)
        return loss, sum(saved.values())

    def _state_bytes(self) -> int:
        import torch

        parameters = self._step.module.parameters()
        tensors = [tensor for parameter in parameters for tensor in (parameter, parameter.grad)]
        for state in self._optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]
        return sum(_local(tensor).nbytes for tensor in tensors if tensor is not None)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


class _Step:
    """Computes the loss of a module and its gradients; a divided module needs the group of its ranks for the loss."""

    def __init__(self, module: torch.nn.Module, group: Any = None) -> None:
        self.module, self._group = module, group

    def backward(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        """Add the gradients of a batch to the present gradients, and return the mean loss."""
        from torch.nn.functional import cross_entropy

        loss = cross_entropy(self.module(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.item()


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


def sizes_of(kind: str, ranks: int) -> Parallelism:
    """Return the sizes of one of :data:`KINDS` over all ranks."""
    from sparkdl.parallel import Parallelism

    return {
        "FSDP2": Parallelism(shard=ranks),
        "TP": Parallelism(tensor=ranks),
        "TP+SP": Parallelism(tensor=ranks, sequence=True),
        "PP": Parallelism(pipeline=ranks, microbatches=MICROBATCHES),
        "CP": Parallelism(context=ranks),
    }[kind]


def _divided(size: DecoderSize, kind: str, ranks: int) -> _Step:
    from sparkdl.parallel import parallelize

    parallelism = sizes_of(kind, ranks)
    if kind == "PP":
        return _PipelineStep(size, parallelism)
    layout = parallelism.lay_out()
    module = parallelize(make_decoder(size), layout)
    if kind == "FSDP2":
        return _Step(module)
    if kind == "CP":
        return _ContextStep(module, layout.group("context"))
    return _TensorStep(module, layout.group("tensor"))


class _TensorStep(_Step):
    def backward(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        from sparkdl.parallel import cross_entropy

        loss = cross_entropy(self.module(tokens), labels, self._group)
        loss.backward()
        return loss.item()


class _ContextStep(_Step):
    def backward(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        import torch
        from torch.nn.functional import cross_entropy

        from sparkdl.parallel import sequence

        positions = sequence.positions(tokens.shape[1], self._group)
        own, targets = (sequence.shard(rows, 1, self._group) for rows in (tokens, labels))
        loss = cross_entropy(self.module(own, positions).flatten(0, 1), targets.flatten())
        loss.backward()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean, op=torch.distributed.ReduceOp.SUM, group=self._group)
        return mean.item() / torch.distributed.get_world_size(self._group)


class _PipelineStep(_Step):
    def __init__(self, size: DecoderSize, parallelism: Parallelism) -> None:
        from torch.nn.functional import cross_entropy

        from sparkdl.parallel import Pipeline, cut

        group = parallelism.lay_out().group("pipeline")
        (stage,) = cut(make_decoder(size), group, schedule="1f1b")
        super().__init__(stage)
        self._pipeline = Pipeline(
            [stage],
            group,
            schedule="1f1b",
            microbatches=MICROBATCHES,
            loss=lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten()),
        )

    def backward(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        return self._pipeline.step(tokens, target=labels).item()


def takes(contender: str, rows: int) -> bool:
    """Return whether a contender can train on a batch of this many rows; a pipeline divides it into microbatches."""
    return not contender.startswith("PP") or rows % MICROBATCHES == 0
