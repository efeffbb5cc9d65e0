"""Takes checkpoints during a fit, and resumes a fit from one.

:mod:`sparkdl.checkpoint` writes and reads them. Rank 0 writes; if the module is divided among ranks, each rank writes
its part, and rank 0 the state that all ranks share. A fit resumes from the newest complete checkpoint, if it is of the
same fit, whether the module was divided or not when it was written.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.checkpoint.folder import DamagedCheckpointError
from sparkdl.checkpoint.held import HeldCheckpoint
from sparkdl.checkpoint.values import copy_to_host
from sparkdl.errors import CheckpointError
from sparkdl.random_state import random_numbers_apart, seed_rank, set_random_state
from sparkdl.training.checkpoint.choice import Choice
from sparkdl.training.checkpoint.fit_manifest import FitManifest, fit_folder
from sparkdl.training.checkpoint.state import (
    gather_rank_states,
    loss_buffers,
    module_state,
    read_rank_state,
    set_buffers,
)
from sparkdl.training.history import EpochRecord, join_meter_states
from sparkdl.training.objective import StepPosition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from torch.optim import Optimizer

    from sparkdl.checkpoint.folder import Checkpoint
    from sparkdl.checkpoint.tensors import Content, TrainingTensors
    from sparkdl.checkpoint.writer import CheckpointWriter
    from sparkdl.collective import Communicator
    from sparkdl.data import PlannedFeed
    from sparkdl.training.callbacks import FitControl
    from sparkdl.training.distribution import ModelDistribution
    from sparkdl.training.history import EpochMeter
    from sparkdl.training.learning_rate import LearningRate
    from sparkdl.training.spec import CheckpointPlan, TrainingSpec
    from sparkdl.training.step import TrainingStep
    from sparkdl.training.update import UpdatePlan


_EARLIER_TIMEOUT_S = 240.0
"""How long a checkpoint of replicas waits for the previous one: less than other ranks wait for rank 0."""

_LAST_TIMEOUT_S = 1800.0
"""How long the end of a fit waits for its last checkpoint."""


@dataclass(frozen=True)
class ResumePoint:
    """Position at which a fit begins or resumes.

    Attributes:
        epoch: number of the epoch, from 1; the number of epochs plus 1 if nothing is left to do.
        step: number of completed steps of the epoch.
        history: records of the completed epochs.
        meter: state of this rank's meter of the epoch; empty if the epoch begins.
        has_steps: whether steps of the epoch are left to do.
    """

    epoch: int = 1
    step: int = 0
    history: tuple[EpochRecord, ...] = ()
    meter: dict[str, Any] = field(default_factory=dict)
    has_steps: bool = True


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints of one fit on one rank; a context manager that, if the fit succeeds, waits for the last one.

    Args:
        choice: the checkpoint from which the fit resumes.
        spec: spec of the fit, which says where and when checkpoints are taken, if at all.
        optimizer: optimizer of the module's parameters.
        learning_rate: learning rate of the optimizer.
        parts: further parts whose state is the same on all ranks, by name: objects with ``state_dict()`` and
            ``load_state_dict()``, whose states consist of numbers, strings, tensors, and dicts and lists of them.
        step: training step of this rank.
        updates: plan of the steps that update the weights.
        feed: feed of this rank's rows.
        control: control of the fit, which knows whether a callback of this rank has asked to stop.
        distribution: distribution of the module over the ranks.
        communicator: communicator of all ranks.
        compare: function that compares the replicas before a checkpoint within an epoch is taken; called with a text
            that names epoch and step.
    """

    def __init__(
        self,
        choice: Choice,
        *,
        spec: TrainingSpec,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        parts: Mapping[str, Any],
        step: TrainingStep,
        updates: UpdatePlan,
        feed: PlannedFeed,
        control: FitControl,
        distribution: ModelDistribution,
        communicator: Communicator,
        compare: Callable[[str], None],
    ) -> None:
        self._compare = compare
        self._choice, self._plan, self._control = choice, spec.checkpoints, control
        self._spec, self._step, self._module = spec, step, distribution.module
        self._optimizer, self._learning_rate, self._parts = optimizer, learning_rate, parts
        self._updates, self._feed, self._communicator = updates, feed, communicator
        self._distribution = distribution
        self._writer: CheckpointWriter | None = None
        self._num_updates = 0
        self._is_due = False
        self._position = ResumePoint()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None and kind is None:
            self._writer.close(_LAST_TIMEOUT_S)
        elif self._writer is not None:
            self._writer.__exit__(kind, error, traceback)

    def resume(self, held: HeldCheckpoint | None = None) -> ResumePoint:
        """Load the chosen checkpoint or the held one, if there is one. Collective; call it last before training.

        Args:
            held: state of an earlier world of the ranks, from which the fit continues.

        Raises:
            CheckpointError: if this rank cannot read the checkpoint.
            StoreError: if the folder cannot be read.
        """
        if self._plan is not None:
            self._open_folder(self._plan)
        if held is not None:
            self._position = self._restore(held)
        return self._position

    def _open_folder(self, plan: CheckpointPlan) -> None:
        """Begin to write checkpoints, and restore the one that was chosen."""
        is_divided = self._distribution.is_divided
        folder = fit_folder(plan.url, num_kept=plan.num_kept, lease=plan.lease)
        folder.damaged = self._choice.damaged
        if is_divided or self._communicator.rank == 0:
            from sparkdl.checkpoint.writer import CheckpointWriter  # only fits with checkpoints need it

            self._writer = CheckpointWriter(
                folder,
                is_divided=is_divided,
                timeout_s=None if is_divided else _EARLIER_TIMEOUT_S,
                advice="Choose a checkpointDir on a faster store, or a larger checkpointEverySteps.",
            )
        if self._choice.name:
            try:
                self._position = self._restore(folder.open(self._choice.name))
            except DamagedCheckpointError as error:
                raise CheckpointError(
                    f"The checkpoint {folder.url}/{self._choice.name} was intact when the ranks checked it, but rank "
                    f"{self._communicator.rank} cannot read it: {error} Check that every executor can read it."
                ) from error

    def begin_epoch(self, epoch: int, meter: EpochMeter) -> None:
        """Begin an epoch; in the epoch in which the fit resumes, restore plan and meter."""
        is_resumed = epoch == self._position.epoch and self._position.step > 0
        step = self._position.step if is_resumed else 0
        has_steps = not is_resumed or self._position.has_steps
        self._updates.begin(epoch, step, has_steps=has_steps)
        has_rows = has_steps and self._feed.rows_in_step(0, epoch - 1)[self._distribution.reader]
        if self._step.last_batch is None and not has_rows:
            self._step.last_batch = self._earlier_batch(epoch, step)
        if is_resumed and self._position.meter:
            meter.load_state_dict(self._position.meter)

    def count_update(self) -> bool:
        """Count an update of the weights; return whether a checkpoint waits for all ranks to have the same weights."""
        if self._plan is not None:
            self._num_updates += 1
            if self._plan.every_updates and self._num_updates % self._plan.every_updates == 0:
                self._is_due = True
        return self._is_due

    def after_update(self, epoch: int, step: int, meter: EpochMeter) -> None:
        """Take a checkpoint if one is due after this step, counted from 1, after which all ranks have the same weights.

        Collective.
        """
        if step == self._updates.num_steps:
            self._is_due = False  # the checkpoint at the end of the epoch follows
        if self._is_due:
            self._is_due = False
            self._step.finite.compare_records(epoch=epoch, step=step, steps=step)
            self._compare(f"epoch {epoch}, step {step}")
            where = {"epoch": epoch, "step": step, "ends_epoch": False, "finished": False}
            self._take(where, {"meter": meter.state_dict()}, self._position.history)

    def after_epoch(
        self, history: Sequence[EpochRecord], *, finished: bool = False, is_best: bool = False
    ) -> None:
        """Take a checkpoint after an epoch, its validation and its callbacks. Collective.

        Args:
            history: records of all epochs so far.
            finished: whether the fit ends after this epoch.
            is_best: whether the checkpoint is kept until a better one is written.
        """
        self._position = ResumePoint(epoch=history[-1].epoch + 1, history=tuple(history))
        if self._plan is not None:
            step = self._updates.num_steps
            where = {"epoch": history[-1].epoch, "step": step, "ends_epoch": True, "finished": finished}
            self._take(where, {}, history, is_best=is_best)

    def _take(
        self,
        where: dict[str, Any],
        of_rank: dict[str, Any],
        history: Sequence[EpochRecord],
        *,
        is_best: bool = False,
    ) -> None:
        of_replica = self._distribution.rank_state()
        of_rank = {**of_rank, "wants_to_stop": self._control.wants_to_stop, **of_replica}
        if self._distribution.is_local and self._communicator.rank != 0:
            of_rank["optimizer"] = self._optimizer.state_dict()["state"]
        ranks = gather_rank_states(
            self._module, self._spec.losses, self._step.device, of_rank, self._communicator
        )
        if self._writer is None:
            return
        self._writer.wait()
        self._writer.write(self._content(where, ranks, history, is_best=is_best))

    def hold(
        self, where: dict[str, Any], history: Sequence[EpochRecord], *, has_steps: bool
    ) -> HeldCheckpoint:
        """Copy the state into the memory of this process; of a module that is divided among ranks, its part.

        Args:
            where: position, in the fields of a :class:`FitManifest`.
            history: records of all completed epochs.
            has_steps: whether steps of the epoch are left.
        """
        return HeldCheckpoint.of(self._content(where, [], history, held={"has_steps": has_steps}))

    def _content(
        self,
        where: dict[str, Any],
        ranks: Sequence[bytes],
        history: Sequence[EpochRecord],
        *,
        is_best: bool = False,
        held: Mapping[str, Any] | None = None,
    ) -> Content:
        """Copy this rank's part of a checkpoint; rank 0 adds the state that all ranks share.

        So does every rank for a copy in memory, which has the further values ``held``.
        """
        from sparkdl.checkpoint.tensors import Content

        tensors = self._tensors()
        copies = tensors.copy()
        manifest = FitManifest(
            **where,
            epochs=self._spec.epochs,
            layout=self._distribution.name,
            num_ranks_at_start=self._choice.num_ranks_at_start,
            identity=self._choice.identity,
        )
        state: dict[str, Any] = {}
        if self._communicator.rank == 0 or held is not None:
            fit = {
                "learning_rate": self._learning_rate.state_dict(),
                "parts": {name: part.state_dict() for name, part in self._parts.items()},
                "buffers": module_state(self._module)["buffers"],
                "history": [asdict(record) for record in history],
                "feed": self._feed.state(where["step"] - self._updates.steps_before, where["epoch"] - 1),
                "num_updates": self._num_updates,
                **(held or {}),
            }
            fit = copy_to_host(fit, "the state of the fit")
            state = {"training": copies.values, "fit": fit, "ranks": ranks}
        return Content(
            label=f"epoch-{manifest.epoch:05d}-step-{manifest.step:08d}",
            tensors=copies.tensors,
            state=state,
            groups=tensors.groups(),
            about=asdict(manifest),
            is_best=is_best,
        )

    def _tensors(self) -> TrainingTensors:
        """The tensors of module and optimizer, and the best weights so far, on this rank."""
        from sparkdl.checkpoint.tensors import TrainingTensors

        return TrainingTensors(
            self._distribution.parts,
            self._optimizer,
            None if self._control.best is None else self._control.best.tensors(),
            is_divided=self._distribution.is_divided,
        )

    def _restore(self, checkpoint: Checkpoint | HeldCheckpoint) -> ResumePoint:
        manifest = FitManifest.of(checkpoint)
        state = checkpoint.load_state()
        fit = state["fit"]
        epoch, step = (manifest.epoch + 1, 0) if manifest.ends_epoch else (manifest.epoch, manifest.step)
        self._feed.resume(fit["feed"])
        has_steps = fit.get("has_steps", True)
        self._updates.begin(epoch, step, has_steps=has_steps)
        self._num_updates = fit["num_updates"]
        for name, part in self._parts.items():  # makes room for the best weights
            if name in fit["parts"]:
                part.load_state_dict(fit["parts"][name])
        tensors, group = self._tensors(), None
        if self._writer is not None and not isinstance(checkpoint, HeldCheckpoint):
            group = self._writer.group
        tensors.check(checkpoint, group)
        tensors.check_optimizer(state["training"], checkpoint.url)
        tensors.load(checkpoint, state["training"], group)
        set_buffers(dict(self._module.named_buffers()), fit["buffers"])
        self._learning_rate.load_state_dict(fit["learning_rate"])  # sets that of the optimizer
        is_alike = manifest.layout == self._distribution.name
        meter = self._restore_rank(state["ranks"], (epoch, step), is_alike=is_alike)
        return ResumePoint(
            epoch, step, tuple(EpochRecord.from_dict(record) for record in fit["history"]), meter, has_steps
        )

    def _restore_rank(
        self, ranks: Sequence[bytes], position: tuple[int, int], *, is_alike: bool
    ) -> dict[str, Any]:
        """Restore this rank's own state, and return the state of its meter, or an empty dict if an epoch begins.

        If the layout of the ranks has changed, generators are seeded again, and meters are joined.
        """
        rank, module = self._communicator.rank, self._module
        states = [read_rank_state(state) for state in ([ranks[rank]] if is_alike else ranks)]
        first = states[0]  # in another layout, the buffers of losses are rank 0's, like the model's
        set_buffers(loss_buffers(self._spec.losses, module), first["loss_buffers"])
        self._control.wants_to_stop = any(state["wants_to_stop"] for state in states)
        if not is_alike:
            # Each pipeline stage had its own; of those that several ranks had, rank 0's count.
            for state in reversed(states):
                set_buffers(dict(module.named_buffers()), state["buffers"])
            seed_rank(self._spec.seed, self._distribution.generator_index, *position)
            meters = [state["meter"] for state in states if state.get("meter")]
            return join_meter_states(meters, rank) if meters else {}
        set_buffers(dict(module.named_buffers()), first["buffers"])
        self._distribution.load_rank_state(first)
        if "optimizer" in first:
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": first["optimizer"]})
        set_random_state(first["random"], self._step.device)
        meter: dict[str, Any] = first.get("meter", {})
        return meter

    def _earlier_batch(self, epoch: int, step: int) -> Any:
        """Return the last batch with rows that this rank has had; the rank uses it in steps without rows."""
        index, batch = self._feed.batch_before(epoch - 1, step)
        position = StepPosition(self._communicator.rank, epoch, index + 1, self._distribution.reader)
        with random_numbers_apart(self._step.device):
            return self._step.objective.prepare(batch, position=position)
