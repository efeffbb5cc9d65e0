"""The parts of a :class:`~sparkdl.checkpoint.training_state.TrainingState`: modules, optimizers, and other objects.

If a part has DTensors, as with FSDP2 and tensor parallelism, each rank keeps its own piece of it.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from sparkdl.errors import ParamError


def mark_stages(parts: Iterable[Part]) -> None:
    """Let modules and optimizers be kept by every rank if one of the modules is a stage of a pipeline."""
    parts = [part for part in parts if part.has_tensors]
    if any(
        getattr(module, "is_pipeline_stage", False)
        for part in parts
        if isinstance(part.value, torch.nn.Module)
        for module in part.value.modules()
    ):
        for part in parts:
            part.is_of_stage = True


class Part(ABC):
    """Keeps one part of a state.

    Attributes:
        value: part of the state.
        is_of_stage: whether a module of the state is a pipeline stage.
        has_tensors: whether a commit stores the tensors of the part by their names: it is a module or an optimizer.
    """

    is_of_stage: bool = False
    has_tensors: bool = False

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def is_sharded(self) -> bool:  # a property, as the part may be sharded later
        """Whether each rank keeps its own piece of the part, which differs from rank 0's."""
        return self.is_of_stage or any(hasattr(tensor, "full_tensor") for tensor in _tensors_of(self.value))

    @abstractmethod
    def save(self) -> None:
        """Remember the part as it is now."""

    @abstractmethod
    def restore(self) -> None:
        """Set the part to its remembered state."""

    def set_value(self, value: Any) -> None:
        """Keep ``value`` as the part from now on."""
        self.value = value
        self.save()

    def saved_state(self) -> Any:
        """The remembered state, to store in a file; the part itself unless a subclass overrides this."""
        return self.value

    def set_saved_state(self, state: Any) -> None:
        """Remember a state that :meth:`saved_state` returned, and set the part to it."""
        self.set_value(state)


class StateDictPart(Part):
    """Keeps a part that has a ``state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.has_tensors = isinstance(value, torch.nn.Module | torch.optim.Optimizer)
        self.save()

    def save(self) -> None:
        """See :class:`Part`.

        Raises:
            ParamError: if it is a module sharded by FSDP1, or an optimizer of its parameters.
        """
        _refuse_other_shards(self.value)
        self._saved = _copy(self.value.state_dict())

    def restore(self) -> None:
        """See :class:`Part`."""
        # A copy, as what is loaded may become part of the value, which changes later.
        state: Any = _copy(self._saved)
        if isinstance(self.value, torch.nn.Module):  # with the versions of its layers, which no copy carries
            state = OrderedDict(state)
            state._metadata = getattr(self.value.state_dict(), "_metadata", None)
        self.value.load_state_dict(state)

    def saved_state(self) -> Any:
        """See :class:`Part`."""
        return self._saved

    def set_saved_state(self, state: Any) -> None:
        """See :class:`Part`."""
        self._saved = state
        self.restore()


def _copy(state: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), state
    )


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]


def _refuse_other_shards(value: Any) -> None:
    """Refuse modules and optimizers sharded without DTensors: rank 0's state is not that of the other ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    is_fsdp1 = isinstance(value, torch.nn.Module) and any(
        isinstance(module, fsdp.FullyShardedDataParallel) for module in value.modules()
    )
    if is_fsdp1 or any(isinstance(tensor, fsdp.FlatParameter) for tensor in _tensors_of(value)):
        raise ParamError(
            f"A {type(value).__name__} sharded by FullyShardedDataParallel (FSDP1) cannot be kept in a state: no rank "
            "has all of it, and its parts do not say what they are. Shard it by torch.distributed.fsdp.fully_shard."
        )
