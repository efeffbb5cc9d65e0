"""Takes a training along when the ranks of an elastic launch form another world. Runs on the *rank*.

A *border* is a point between two steps, or at the end of an epoch, to which a rank can return. Weights and optimizer
change only in an update, so between two updates they need no copy; the buffers that a step changes are copied at the
border. Ranks pass a border in two phases, like a commit in a database. First all of them settle that each has the
gradients of all. Then each updates its weights, for which it needs no other rank. If a rank is lost meanwhile, the
others end at the same border: all of them pass it if one has passed it, and all return to the border before if none
has. When a rank leaves a world, it copies its state into memory and continues from it. A rank that joins gets the state
of a rank that has the same part of the model.

If ranks update their own weights, a border is a synchronization. The whole state is copied there, as the weights change
before the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.checkpoint.held import HeldCheckpoint
from sparkdl.collective.byte_exchange import allgather_bytes
from sparkdl.errors import CheckpointError, WorldLeftError
from sparkdl.training.checkpoint.choice import Choice, agree_on_checkpoint
from sparkdl.training.checkpoint.identity import fit_identity
from sparkdl.training.checkpoint.state import loss_buffers, write_rank_state
from sparkdl.training.device_batches import read_timeout_s
from sparkdl.training.distribution import num_readers

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.data import ParquetDataset
    from sparkdl.launch.rank.context import RankContext
    from sparkdl.launch.wire.world import World
    from sparkdl.training.distribution import ModelDistribution
    from sparkdl.training.history import EpochMeter
    from sparkdl.training.spec import TrainingSpec
    from sparkdl.training.trainer import Trainer


_MOST_ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class Border:
    """The last point to which this rank can return.

    Attributes:
        where: epoch and step, in the fields of a manifest of a fit.
        has_steps: whether steps of the epoch are left.
        meter: returns the state of this rank's meter of the epoch; an empty dict at the end of the epoch.
        buffers: buffers of the module and of the losses, which a step changes before its update, each with a copy.
        wants_to_stop: whether a callback of this rank has asked to end the fit.
        held: copy of the whole state; None if the state stays what it is until the next border.
    """

    where: dict[str, Any]
    has_steps: bool
    meter: Callable[[], dict[str, Any]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    wants_to_stop: bool
    held: HeldCheckpoint | None = None


class Handover:
    """The state of a training between two worlds; one for each rank process.

    Args:
        context: the launcher's context of this rank.
        planned_ranks: number of ranks for which the rows are planned in all worlds; None for the number of ranks of
            each world.

    Attributes:
        context: the launcher's context.
        progress: number of borders that the training has passed; -1 before the first.
        left: training that has failed because of another rank, for :meth:`leave`.
    """

    def __init__(self, context: RankContext, planned_ranks: int | None) -> None:
        self.context, self._planned_ranks = context, planned_ranks
        self.progress = -1
        self.left: Trainer | None = None
        self._border: Border | None = None
        self._change: Callable[[], None] | None = None
        """What leads to the next border, while the ranks settle that all of them can do it."""
        self._held: HeldCheckpoint | None = None
        self._own = b""
        """State of this rank alone, as :func:`~sparkdl.training.checkpoint.state.read_rank_state` reads it."""
        self._num_since_border = 0
        self._progress_of_ranks: list[int] = []
        self._losses = torch.nn.ModuleList()
        self._is_asked_to_leave = False

    def settle(self, meter: EpochMeter, change: Callable[[], None], *, keeps: Trainer | None = None) -> None:
        """Make a change that leads to the next border, once all ranks can make it. Collective.

        If a rank is lost meanwhile, some ranks may have made the change and others not. Those then make it in
        :meth:`leave`.

        Args:
            meter: the meter of the epoch, whose sums the ranks share.
            change: function that makes the change, without another rank.
            keeps: training whose state is copied first, for a change that another rank can make fail: a callback may
                communicate. None for any other change.
        """
        if keeps is not None and self._border is not None and self._border.held is None:
            self._border = replace(self._border, held=_hold(keeps, self._border))
        self._change = change
        self._is_asked_to_leave = meter.share(float(self.context.is_to_leave)) > 0
        self._change = None
        change()

    def count_update(self, trainer: Trainer) -> bool:
        """Count an update of the weights; return whether a border is due, because there was none for eight rounds.

        Ranks that overlap averaging with steps never have the same weights within an epoch, unless they wait for an
        average.
        """
        self._num_since_border += 1
        local = trainer.spec.synchronization
        return local is not None and self._num_since_border >= _MOST_ROUNDS * local.every

    def note_step(self, trainer: Trainer, epoch: int, step: int, meter: EpochMeter) -> None:
        """Note the border after an update of the weights."""
        kept = meter.metrics.state_dict() if trainer.spec.metrics else None

        def state() -> dict[str, Any]:
            # The sums of this rank are those of a step that has not led to a border.
            state = {**meter.state_dict(), "loss_sum": 0.0, "weight": 0.0, "rows": 0}
            return state if kept is None else {**state, "metrics": [kept]}

        self._note(trainer, {"epoch": epoch, "step": step, "ends_epoch": False}, state)

    def note_epoch(self, trainer: Trainer, epoch: int) -> None:
        """Note the border at the end of an epoch, after validation and callbacks."""
        self._note(trainer, {"epoch": epoch, "step": trainer.plan.num_steps, "ends_epoch": True}, dict)

    def _note(self, trainer: Trainer, where: dict[str, Any], meter: Callable[[], dict[str, Any]]) -> None:
        self.progress += 1
        self._num_since_border = 0
        with torch.no_grad():
            # A buffer of both is there twice, which does no harm.
            buffers = [
                (buffer, buffer.clone())
                for buffer in (*trainer.update.live.buffers(), *self._losses.buffers())
            ]
        border = Border(
            where={**where, "finished": False},
            has_steps=where["step"] < trainer.plan.num_steps,
            meter=meter,
            buffers=buffers,
            wants_to_stop=trainer.control.wants_to_stop,
        )
        if trainer.distribution.local is not None:
            border = replace(border, held=_hold(trainer, border))
        self._border = border

    def leave_if_asked(self) -> None:
        """Leave the world if ranks wait to join, or are to leave the run. All ranks do so at the same border.

        Raises:
            WorldLeftError: if so.
        """
        if self._is_asked_to_leave:
            raise WorldLeftError("ranks wait to join, or are to leave")

    def leave(self) -> None:
        """Take the state along into the next world, which the ranks are about to enter.

        If another rank has passed a border that this one was about to pass, this one passes it first.
        """
        trainer, self.left = self.left, None
        change, self._change = self._change, None
        if trainer is None:
            return
        if change is not None and self.progress < self.world.progress:
            try:
                change()
            except Exception as error:
                if not self.context.can_continue(error):
                    raise  # else the state of a rank that has passed the border is taken over
        self.hold(trainer)

    def hold(self, trainer: Trainer) -> None:
        """Copy the state at the last border into memory.

        If no border was passed in this world, the state from its beginning is kept.
        """
        border = self._border
        if border is None:
            return
        with torch.no_grad():
            for buffer, copy in border.buffers:
                buffer.copy_(copy)
        of_rank = {
            "buffers": {},
            "loss_buffers": loss_buffers(trainer.spec.losses, trainer.module),
            "wants_to_stop": border.wants_to_stop,
            "meter": border.meter(),
        }
        self._own = write_rank_state(of_rank)
        self._held = border.held or _hold(trainer, border)
        self._border = None

    def meet(self, spec: TrainingSpec, dataset: ParquetDataset, communicator: Communicator) -> Choice:
        """Choose the state from which the ranks of a new world continue. Collective.

        Without a state, as in the first world, it is that of the last checkpoint, if there is one. Else it is that of
        the ranks that have come farthest, which :meth:`share` gives to the others.
        """
        self._border, self._num_since_border = None, 0
        self._losses = spec.losses
        if not self.world.has_state:
            return agree_on_checkpoint(spec, dataset, communicator, planned_ranks=self._planned_ranks)
        about = {} if self._held is None else self._held.content.about
        head = json.dumps([self.progress, about.get("num_ranks_at_start", 0)]).encode()
        heads = [head]
        if communicator.world_size > 1:
            heads = allgather_bytes(communicator, head, name="progress of ranks")
        self._progress_of_ranks = [json.loads(text)[0] for text in heads]
        num_ranks = json.loads(heads[0])[1]
        if self._planned_ranks is None:
            num_ranks = num_readers(spec, communicator.world_size)
        identity = {}
        if communicator.rank == 0 and spec.checkpoints is not None:
            identity = fit_identity(spec, dataset, read_timeout_s=read_timeout_s(communicator))
        return Choice(None, num_ranks, identity=identity)

    @property
    def world(self) -> World:
        """The world that the ranks form now."""
        assert self.context.world is not None
        return self.context.world

    def share(self, distribution: ModelDistribution, communicator: Communicator) -> HeldCheckpoint | None:
        """Give the state of the ranks that have come farthest to the others; None if there is none. Collective."""
        from sparkdl.torch.objects import (
            broadcast_object,  # on ranks only: the driver does without torch's backend
        )

        if not self.world.has_state:
            return None
        owns, progress = [self._own], self.world.progress
        if communicator.world_size > 1:
            owns = allgather_bytes(communicator, self._own, name="states of ranks")
        sharers, ranks = distribution.sharers
        if self._progress_of_ranks[ranks[0]] != progress:
            raise CheckpointError(
                f"No rank that is left has part {distribution.rank} of the model after border {progress}: rank "
                f"{ranks[0]} has it after border {self._progress_of_ranks[ranks[0]]}. Fit again; a fit with a "
                "checkpointDir continues from its last checkpoint."
            )
        if any(self._progress_of_ranks[rank] != progress for rank in ranks):
            self._held = broadcast_object(sharers, self._held, "state of the training")
        assert self._held is not None, "shared"
        content = self._held.content
        # The same ranks, too, seed their generators again and join their meters, as others' may have more steps.
        about = {**content.about, "layout": "other ranks"}
        # If all ranks with a state of their own are lost, those remain that the others got together with the state.
        state = {
            **content.state,
            "ranks": [state_of_rank for state_of_rank in owns if state_of_rank] or content.state["ranks"],
        }
        self._held = replace(self._held, content=replace(content, about=about, state=state))
        self.progress = progress
        return self._held


def _hold(trainer: Trainer, border: Border) -> HeldCheckpoint:
    return trainer.checkpoints.hold(border.where, trainer.history, has_steps=border.has_steps)
