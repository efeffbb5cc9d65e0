"""``TrainingState``: a state that survives lost ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparkdl.checkpoint.commit_place import CommitPlace
from sparkdl.checkpoint.parts import Part, StateDictPart, mark_stages
from sparkdl.checkpoint.values import check_values
from sparkdl.collective.current import at_end, communicator_for, provided
from sparkdl.errors import CheckpointError, ParamError, WorldLeftError
from sparkdl.torch.objects import broadcast_object, pickle_for_others, refuse_shards

if TYPE_CHECKING:
    from sparkdl.checkpoint.folder import Checkpoint
    from sparkdl.checkpoint.tensors import TrainingTensors

_numbers = count()

_states: dict[int, TrainingState] = {}
"""The states of an elastic run by number: those of this world or, until they are made again, of the one before."""


def begin_world() -> None:
    """Number states from 0 again, and let them meet over a new communicator: the function is called in a new world."""
    global _numbers  # noqa: PLW0603  # there is one world at a time
    _numbers = count()
    _all_ranks.cache_clear()


def progress() -> int:
    """Return how far the states of this process have come: the number of their commits; -1 without a commit."""
    return sum(state._num_commits for state in _states.values()) or -1


def has_states() -> bool:
    """Whether this process has made states that the next world takes up."""
    return bool(_states)


def are_to_leave(broadcast: Callable[[Any], Any]) -> bool:
    """Whether the run is elastic, and all ranks are to leave their world because others wait to join. Collective.

    Args:
        broadcast: returns rank 0's object on all ranks.
    """
    worlds = provided.worlds
    return worlds is not None and bool(broadcast(worlds.is_to_leave()))


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a state.

    Attributes:
        rank: returns the number of this rank.
        size: returns the number of ranks.
        broadcast: returns rank 0's object on all ranks.
    """

    rank: Callable[[], int]
    size: Callable[[], int]
    broadcast: Callable[[Any], Any]


@cache
def _all_ranks() -> Ranks:
    """All ranks of the job, over a communicator of their own. Collective."""
    launched = communicator_for("A TrainingState")
    communicator = launched.split(range(launched.world_size), "training state")
    at_end(communicator.close)
    return Ranks(
        rank=lambda: communicator.rank,
        size=lambda: communicator.world_size,
        broadcast=partial(broadcast_object, communicator, name="state"),
    )


class TrainingState:
    """Modules, optimizers and plain values of a training; each is an attribute.

    Every rank has to create the state, at the same point of the program. All ranks then get the last commit of the
    ranks before them, or rank 0's values if there is no commit. Every rank also has to call ``commit()``, after a step
    that all ranks have made::

        state = TrainingState(model=model, optimizer=optimizer, epoch=0)
        while state.epoch < 10:
            train_one_epoch(model, optimizer)
            state.epoch += 1
            state.commit()

    Rank 0 writes a commit to the Runner's ``checkpoint_dir`` before its ``commit()`` returns; the call thus takes as
    long as writing the model and the optimizer.

    Modules whose parameters are DTensors (by FSDP2 or tensor parallelism), pipeline stages, and their optimizers are
    committed by all ranks together: each rank writes its own pieces. Any number of ranks can restore them, in any
    layout. If there is no commit, each rank keeps the values that it has, so the ranks have to begin with the same
    weights.

    Args:
        parts: parts of the state, by name. Those with a ``state_dict`` and a ``load_state_dict``, such as modules,
            optimizers and schedulers, are kept by it, all other values as they are: tensors, numbers, strings, and
            lists and dictionaries of them.

    Raises:
        CheckpointError: if the last commit is of other modules or optimizers.
        ParamError: if a part is sharded by FSDP1, or an optimizer has parameters of no module of the state.
    """

    _num_commits = 0

    def __init__(self, **parts: Any) -> None:
        is_part = {name: hasattr(value, "load_state_dict") for name, value in parts.items()}
        self._set_up(
            _all_ranks(),
            {name: StateDictPart(value) for name, value in parts.items() if is_part[name]},
            {name: value for name, value in parts.items() if not is_part[name]},
        )
        if not self._take_up_state():
            self.take_up_commit()
        self.sync()

    def _set_up(self, ranks: Ranks, parts: dict[str, Part], values: dict[str, Any]) -> None:
        """Set the attributes.

        Args:
            ranks: the ranks that share the state.
            parts: parts that are kept by their ``state_dict``, by name.
            values: values that are kept as they are, by name.
        """
        mark_stages(parts.values())
        self._ranks, self._parts, self._saved_state = ranks, parts, values
        # A later process of the same program finds its commits by this number.
        self._number = next(_numbers)
        for name, part in parts.items():
            object.__setattr__(self, name, part.value)
        self._set_values()

    def _take_up_state(self) -> bool:
        """Take up the last commit of this number in this process, of the world before; return whether there is one."""
        worlds = provided.worlds
        if worlds is None:
            return False
        before, _states[self._number] = _states.get(self._number), self
        if not worlds.has_state() or self._sharded_parts():
            return False
        if before is not None and before._num_commits:
            self._num_commits = before._num_commits
            for name, part in before._parts.items():
                if name in self._parts:
                    self._parts[name].set_saved_state(part.saved_state())
                    object.__setattr__(self, name, self._parts[name].value)
            self._saved_state = {
                name: before._saved_state.get(name, value) for name, value in self._saved_state.items()
            }
            self._set_values()
        # All ranks now get the state of rank 0, which has made most commits.
        self._num_commits = int(self._ranks.broadcast(self._num_commits))
        return True

    def _leave_if_asked(self) -> None:
        """Leave the world if other ranks wait to join, on all ranks after the same commit. Collective.

        Raises:
            WorldLeftError: if so.
        """
        if are_to_leave(self._ranks.broadcast):
            raise WorldLeftError("other ranks wait to join")

    def save(self) -> None:
        """Remember the state as it is now, on this rank.

        Raises:
            ParamError: if a value is or holds a DTensor: a commit would have rank 0's part of it alone.
        """
        for part in self._parts.values():
            part.save()
        values = {name: getattr(self, name) for name in self._saved_state}
        for tensor in tree_leaves(values):
            refuse_shards(tensor)
        self._saved_state = values

    def restore(self) -> None:
        """Set the state to the remembered one."""
        for part in self._parts.values():
            part.restore()
        self._set_values()

    def sync(self) -> None:
        """Set the state of all ranks to rank 0's, except for sharded parts, and remember it."""
        for part in self._parts.values():
            self._sync_part(part)
        if not self._saved_state:
            return
        try:
            self._saved_state = self._ranks.broadcast(self._saved_state)
        except (TypeError, AttributeError, pickle.PicklingError, ParamError) as error:
            _refuse_unpicklable(self._saved_state, error)
            raise
        self._set_values()

    def _sync_part(self, part: Part) -> None:
        part.save()
        if not part.is_sharded:
            part.set_saved_state(self._ranks.broadcast(part.saved_state()))

    def commit(self) -> None:
        """Remember the state as it is now, and store it where restarted ranks find it.

        Raises:
            CheckpointError: if a commit cannot hold a value.
            StoreError: if the commit cannot be written.
            CheckpointsInUseError: if another run, or the ranks of a restart, have taken the folder.
            WorldLeftError: if the run is elastic, and other ranks wait to join.
        """
        self.save()
        self._keep()
        self._num_commits += 1
        self._leave_if_asked()

    def _keep(self) -> None:
        """If the run stores commits, store this one: rank 0 all of it, or every rank its part if parts are sharded."""
        commits, sharded, rank = CommitPlace.provided, self._sharded_parts(), self._ranks.rank()
        if commits is None or not (sharded or rank == 0):
            return
        from sparkdl.checkpoint.tensors import Content, write_checkpoint

        tensors: dict[str, Tensor] = {}
        training: dict[str, dict[str, Any]] = {}
        for name, training_tensors in self._tensors(is_divided=bool(sharded)).items():
            state = training_tensors.collect()
            tensors |= state.tensors
            training[name] = state.values
        content: dict[str, Any] = {"buffers": self._plain_buffers(sharded)}
        if rank == 0:
            parts = {name: part.saved_state() for name, part in self._parts.items() if not part.has_tensors}
            content |= {"training": training, "parts": parts, "objects": self._saved_state}
        values = {
            kind: {name: check_values(value, f"the state's {name}") for name, value in entries.items()}
            for kind, entries in content.items()
        }
        write_checkpoint(
            commits.folder(self._number),
            Content(label="", tensors=tensors, state=values, about={"sharded": sorted(sharded)}),
            rank,
            torch.distributed.group.WORLD if sharded else None,
        )

    def take_up_commit(self) -> bool:
        """Restore the last intact commit, on rank 0, or on all ranks if parts are sharded; return whether there is one.

        Any number of ranks in any layout can do so. In the layout of the commit, each rank gets its own values of
        buffers that are not sharded; in another layout, all ranks get those of one rank.

        Raises:
            CheckpointError: if the commit is of other modules or optimizers.
        """
        commits, sharded, rank = CommitPlace.provided, self._sharded_parts(), self._ranks.rank()
        if commits is None or not (sharded or rank == 0):
            return False
        if rank == 0:
            commits.check()
        from sparkdl.checkpoint.tensors import call_on_all_ranks

        checkpoint = commits.folder(self._number).newest(
            share=(rank, self._ranks.size()) if sharded else (0, 1),
            on_all_ranks=partial(call_on_all_ranks, group=torch.distributed.group.WORLD if sharded else None),
        )
        if checkpoint is None:
            return False
        self._load(checkpoint, sharded)
        return True

    def _load(self, checkpoint: Checkpoint, sharded: list[str]) -> None:
        content = checkpoint.load_state()
        group = torch.distributed.group.WORLD if sharded else None
        for name, tensors in self._tensors(is_divided=bool(sharded)).items():
            tensors.check(checkpoint, group)
            if name not in content["training"]:
                raise CheckpointError(
                    f"The last commit, {checkpoint.url}, has no state of the {name}. Make the state of the same parts "
                    "as before, or start from the beginning with another checkpoint_dir."
                )
            tensors.check_optimizer(content["training"][name], checkpoint.url)
            tensors.load(checkpoint, content["training"][name], group)
        is_alike = len(checkpoint.manifest.ranks) == self._ranks.size()
        if is_alike and sorted(sharded) == checkpoint.manifest.about["sharded"]:
            buffers = self._plain_buffers(sharded)
            for name, value in checkpoint.load_state(self._ranks.rank())["buffers"].items():
                if name in buffers:
                    buffers[name].copy_(value)
        for name, part in self._parts.items():
            if part.has_tensors:
                part.save()
            elif name in content["parts"]:
                part.set_saved_state(content["parts"][name])
                object.__setattr__(self, name, part.value)
        self._saved_state = content["objects"]
        self._set_values()

    def _tensors(self, *, is_divided: bool) -> dict[str, TrainingTensors]:
        """The tensors of the modules with those of each optimizer, by the optimizer's name."""
        from sparkdl.checkpoint.tensors import TrainingTensors

        values = {name: part.value for name, part in self._parts.items() if part.has_tensors}
        modules = {name: value for name, value in values.items() if isinstance(value, nn.Module)}
        optimizers = {name: value for name, value in values.items() if name not in modules}
        return {
            name: TrainingTensors(modules, optimizer, is_divided=is_divided)
            for name, optimizer in (optimizers or {"modules": None}).items()
        }

    def _plain_buffers(self, sharded: list[str]) -> dict[str, Tensor]:
        """The buffers of sharded modules that are not sharded themselves, which may differ between ranks."""
        return {
            f"{name}.{key}": buffer.detach()
            for name in sharded
            if isinstance(self._parts[name].value, nn.Module)
            for key, buffer in self._parts[name].value.named_buffers()
            if not hasattr(buffer, "full_tensor")
        }

    def _sharded_parts(self) -> list[str]:
        """The names of the parts that are divided among ranks."""
        return [name for name, part in self._parts.items() if part.is_sharded]

    def _set_values(self) -> None:
        for name, value in self._saved_state.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_parts", ()):
            self._parts[name].set_value(value)
        super().__setattr__(name, value)


def _refuse_unpicklable(values: dict[str, Any], error: Exception) -> None:
    """Raise an error that names the value which cannot be sent to other ranks, if there is one.

    Raises:
        ParamError: if there is one.
    """
    for name, value in values.items():
        try:
            pickle_for_others(value)
        except Exception as reason:
            raise ParamError(
                f"The state's {name} is a {type(value).__name__}, which cannot be pickled, so it cannot be sent to the "
                f"other ranks: {reason}. Leave it out, and make it on each rank."
            ) from error
