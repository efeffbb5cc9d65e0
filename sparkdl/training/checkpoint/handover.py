"""Takes a training along when the ranks of an elastic launch form another world. Runs on the *rank*.

A *border* is a point between two steps, or at the end of an epoch, to which a rank can return: its weights and the
optimizer are those of the last update until the next one, and what a step changes before its update is copied at the
border. When a rank leaves a world, it copies its whole state into memory. In the next world all ranks continue from the
state of rank 0, which is at the last border that any of them has passed.

Where ranks update their own weights, a border is a synchronization, after which they go on: the whole state is copied
there.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sparkdl.checkpoint.held import HeldCheckpoint
from sparkdl.checkpoint.values import copy_to_host
from sparkdl.collective.byte_exchange import allgather_bytes
from sparkdl.collective.error_origin import is_consequence
from sparkdl.errors import WorldLeftError
from sparkdl.random_state import random_state, set_random_state
from sparkdl.training.checkpoint.choice import Choice, agree_on_checkpoint
from sparkdl.training.checkpoint.identity import fit_identity
from sparkdl.training.checkpoint.state import loss_buffers
from sparkdl.training.device_batches import read_timeout_s
from sparkdl.training.distribution import num_readers

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.data import ParquetDataset
    from sparkdl.training.history import EpochMeter
    from sparkdl.training.spec import TrainingSpec
    from sparkdl.training.trainer import Trainer


_MOST_ROUNDS = 8


class ElasticContext(Protocol):
    """The part of the launcher's context that is used here; :class:`sparkdl.launch.RankContext` has it."""

    rank: int
    world_size: int

    @property
    def is_to_leave(self) -> bool:
        """Whether ranks wait to join."""

    @property
    def world(self) -> Any:
        """The current world, whose ``has_state`` says whether rank 0 has a state."""


@dataclass(frozen=True, kw_only=True)
class Border:
    """The last point to which this rank can return.

    Attributes:
        where: epoch and step, in the fields of a manifest of a fit.
        has_steps: whether steps of the epoch are left.
        meter: returns the state of this rank's meter of the epoch; an empty dict at the end of the epoch.
        random: states of the generators of random numbers.
        buffers: buffers of the module and of the losses, which a step changes before its update, each with a copy.
        held: copy of the whole state; None if the state stays what it is until the next border.
        optimizer: with ``held``, a copy of what this rank does not share with rank 0, the state of its optimizer.
    """

    where: dict[str, Any]
    has_steps: bool
    meter: Callable[[], dict[str, Any]]
    random: dict[str, Any]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    held: HeldCheckpoint | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)


class Handover:
    """The state of a training between two worlds; one for each rank process.

    Args:
        context: the launcher's context of this rank.
        planned_ranks: number of ranks for which the rows are planned, whoever is there; None for the number of ranks of
            each world.

    Attributes:
        progress: number of borders that the training has passed; -1 before the first.
    """

    def __init__(self, context: ElasticContext, planned_ranks: int | None) -> None:
        self._context, self._planned_ranks = context, planned_ranks
        self.progress = -1
        self._border: Border | None = None
        self._held: HeldCheckpoint | None = None
        self._own = b""
        """State of this rank alone, as :func:`~sparkdl.training.checkpoint.state.read_rank_state` reads it."""
        self._is_meter_kept = False
        self._num_since_border = 0
        self._place = (0, 0)
        """Rank and number of ranks in the world that this rank has left."""

    def can_continue(self, error: BaseException) -> bool:
        """Whether the ranks can continue in another world after an error, as another rank is its cause."""
        return isinstance(error, WorldLeftError) or is_consequence(error)

    def meet(self, spec: TrainingSpec, dataset: ParquetDataset, communicator: Communicator) -> Choice:
        """Choose the state from which the ranks of a new world continue, and give rank 0's to all. Collective.

        Without a state, as in the first world, it is that of the last checkpoint, if there is one.
        """
        self._border, self._num_since_border = None, 0
        if not self._context.world.has_state:
            return agree_on_checkpoint(spec, dataset, communicator, planned_ranks=self._planned_ranks)
        self._share(communicator)
        assert self._held is not None, "shared"
        num_ranks = self._held.content.about["num_ranks_at_start"]
        if self._planned_ranks is None:
            num_ranks = num_readers(spec, communicator.world_size)
        identity = {}
        if communicator.rank == 0 and spec.checkpoints is not None:
            identity = fit_identity(spec, dataset, read_timeout_s=read_timeout_s(communicator))
        return Choice(None, num_ranks, identity=identity, held=self._held)

    def _share(self, communicator: Communicator) -> None:
        """Give all ranks the state of rank 0, and each rank's own. Collective."""
        from sparkdl.torch.objects import (
            broadcast_object,  # on ranks only: the driver does without torch's backend
        )

        content = None if self._held is None else self._held.content
        head = json.dumps([*self._place, self.progress]).encode()
        heads, owns = [head], [self._own]
        if communicator.world_size > 1:
            heads = allgather_bytes(communicator, head, name="places of ranks")
            owns = allgather_bytes(communicator, self._own, name="states of ranks")
            content = broadcast_object(communicator, content, "state of the training")
        assert content is not None, "rank 0 has a state"
        places = [json.loads(text) for text in heads]
        progress = places[0][2]
        are_alike = places == [[rank, len(places), progress] for rank in range(len(places))]
        about = content.about if are_alike else {**content.about, "layout": "other ranks"}
        state = {**content.state, "ranks": [own for own in owns if own]}
        self._held = HeldCheckpoint(replace(content, about=about, state=state))
        self.progress = progress

    def count_update(self, trainer: Trainer) -> bool:
        """Count an update of the weights; return whether a border is due, because there was none for eight rounds.

        Ranks that overlap the averages of their progress with steps have the same weights nowhere within an epoch,
        unless they wait for one.
        """
        self._num_since_border += 1
        local = trainer.spec.synchronization
        return local is not None and self._num_since_border >= _MOST_ROUNDS * local.every

    def note_step(self, trainer: Trainer, epoch: int, step: int, meter: EpochMeter) -> None:
        """Note the border after an update of the weights."""
        self._note(
            trainer, {"epoch": epoch, "step": step, "ends_epoch": False}, self._state_of(trainer, meter)
        )

    def note_epoch(self, trainer: Trainer, epoch: int) -> None:
        """Note the border at the end of an epoch, after validation and callbacks."""
        self._note(trainer, {"epoch": epoch, "step": trainer.plan.num_steps, "ends_epoch": True}, dict)

    def _state_of(self, trainer: Trainer, meter: EpochMeter) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the meter's state as it is now, until the next border."""
        self._is_meter_kept = (
            bool(trainer.spec.metrics)
            or trainer.spec.accumulated_batches > 1
            or trainer.distribution.local is not None
        )
        if not self._is_meter_kept:
            return meter.state_dict  # a step adds to it after its update, together with the next border
        state = meter.state_dict()
        return lambda: state

    def _note(self, trainer: Trainer, where: dict[str, Any], meter: Callable[[], dict[str, Any]]) -> None:
        self.progress += 1
        self._num_since_border = 0
        with torch.no_grad():
            buffers = [(buffer, buffer.clone()) for buffer in _buffers(trainer)]
        border = Border(
            where={**where, "finished": False},
            has_steps=where["step"] < trainer.plan.num_steps,
            meter=meter,
            random=random_state(trainer.device),
            buffers=buffers,
        )
        if trainer.distribution.local is not None:
            border = replace(
                border,
                held=_held(trainer, border),
                optimizer=copy_to_host(trainer.checkpoints.rank_state(), "the state of a rank"),
            )
        self._border = border

    @property
    def has_state(self) -> bool:
        """Whether this rank has the state of a training."""
        return self._held is not None

    def leave_if_asked(self, meter: EpochMeter) -> None:
        """Share the sums of the meters, and leave the world if ranks wait to join. Collective.

        Raises:
            WorldLeftError: if so.
        """
        is_asked = meter.share(float(self._context.is_to_leave)) > 0
        if self._is_meter_kept and self._border is not None and not self._border.where["ends_epoch"]:
            state = meter.state_dict()
            self._border = replace(self._border, meter=lambda: state)
        if is_asked:
            raise WorldLeftError("other ranks wait to join")

    def hold(self, trainer: Trainer) -> None:
        """Copy the state at the last border into memory, to take it along.

        If no border was passed in this world, the state from its beginning is kept.
        """
        border = self._border
        if border is None:
            return
        with torch.no_grad():
            for buffer, copy in border.buffers:
                buffer.copy_(copy)
        set_random_state(border.random, trainer.device)
        own = {
            "random": border.random,
            "buffers": {},
            "loss_buffers": loss_buffers(trainer.spec.losses, trainer.module),
            "wants_to_stop": trainer.control.wants_to_stop,
            "meter": border.meter(),
            **border.optimizer,
        }
        file = io.BytesIO()
        torch.save(copy_to_host(own, "the state of a rank"), file)
        self._own = file.getvalue()
        self._held = border.held or _held(trainer, border)
        self._place = self._context.rank, self._context.world_size
        self._border = None


def _held(trainer: Trainer, border: Border) -> HeldCheckpoint:
    return trainer.checkpoints.hold(border.where, [], trainer.history, has_steps=border.has_steps)


def _buffers(trainer: Trainer) -> list[torch.Tensor]:
    losses = loss_buffers(trainer.spec.losses, trainer.module)
    return [*trainer.module.buffers(), *losses.values()]
