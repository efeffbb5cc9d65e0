"""Takes checkpoints during a fit, and resumes a fit from one. Runs on every *rank*.

Rank 0 writes; where ranks have parts of the module, each writes its own, and rank 0 what they have alike. A fit resumes
from the newest complete checkpoint, if it is of the same fit, whether ranks had parts of the module then or not.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.byte_exchange import broadcast_bytes
from sparkdl.errors import CheckpointError
from sparkdl.random_state import random_numbers_apart, seed_rank, set_random_state
from sparkdl.training.batches import read_timeout_s
from sparkdl.training.checkpoint.files import (
    DIVIDED_VERSION,
    FIT,
    MODEL,
    OPTIMIZER,
    RANKS,
    WHOLE_VERSION,
    Content,
    DamagedFileError,
    Manifest,
    load_file,
)
from sparkdl.training.checkpoint.folder import CheckpointFolder, CheckpointWriter
from sparkdl.training.checkpoint.identity import check_progress, fit_identity
from sparkdl.training.checkpoint.state import (
    FitState,
    gather_rank_states,
    load_module_state,
    loss_buffers,
    read_rank_state,
    set_buffers,
)
from sparkdl.training.distribution import num_readers
from sparkdl.training.history import EpochRecord, join_meter_states
from sparkdl.training.objective import StepPosition

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import TracebackType

    from sparkdl.collective import Communicator
    from sparkdl.data import ParquetDataset, PlannedFeed
    from sparkdl.parallel import ShardedCheckpoints
    from sparkdl.training.callbacks import FitControl
    from sparkdl.training.distribution import ModelDistribution
    from sparkdl.training.history import EpochMeter
    from sparkdl.training.spec import TrainingSpec
    from sparkdl.training.step import TrainingStep
    from sparkdl.training.update import UpdatePlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """Where a fit begins.

    Attributes:
        epoch: number of the epoch, from 1; one more than there are if nothing is left to do.
        step: how many of its steps are done.
        history: records of the epochs before.
        meter: state of this rank's meter of the epoch, if some of it is done.
    """

    epoch: int = 1
    step: int = 0
    history: tuple[EpochRecord, ...] = ()
    meter: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one fit on one rank; a context manager that leaves none half written when the fit ends well.

    Args:
        choice: the checkpoint from which the fit resumes.
        spec: of the fit; it says where and when checkpoints are taken, if they are.
        state: what all ranks have alike.
        step: of the training.
        updates: says which steps update the weights.
        feed: of the rows.
        control: of the fit, whose end a callback of this rank may have requested.
        distribution: of the module over the ranks.
        communicator: of all ranks.
    """

    def __init__(
        self,
        choice: Choice,
        *,
        spec: TrainingSpec,
        state: FitState,
        step: TrainingStep,
        updates: UpdatePlan,
        feed: PlannedFeed,
        control: FitControl,
        distribution: ModelDistribution,
        communicator: Communicator,
    ) -> None:
        self._choice, self._plan, self._control = choice, spec.checkpoints, control
        self._spec, self._state, self._step = spec, state, step
        self._updates, self._feed, self._communicator = updates, feed, communicator
        self._distribution = distribution
        self._writer: CheckpointWriter | None = None
        self._parts: ShardedCheckpoints | None = None
        self._num_updates = 0
        self._position = ResumePoint()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._parts is not None:
                self._parts.__exit__(kind, error, traceback)
        finally:
            if self._writer is not None:
                self._writer.close(failed=kind is not None)

    def resume(self) -> ResumePoint:
        """Continue from the chosen checkpoint, if there is one. Collective; the last step before training.

        Raises:
            CheckpointError: if this rank cannot read it.
            StoreError: if the folder cannot be read.
        """
        if self._plan is None:
            return self._position
        folder, name = CheckpointFolder(self._plan.url), self._choice.name
        self._parts = self._distribution.open_checkpoints(folder.url)
        if self._communicator.rank == 0:
            self._writer = CheckpointWriter(
                folder, num_kept=self._plan.num_kept, damaged=self._choice.damaged
            )
        if name:
            try:
                self._position = self._restore(folder, name)
            except DamagedFileError as error:
                raise CheckpointError(
                    f"The checkpoint {folder.url}/{name} was whole when rank 0 looked, and rank "
                    f"{self._communicator.rank} cannot read it: {error}. See whether every executor reaches it."
                ) from error
        return self._position

    def begin_epoch(self, epoch: int, meter: EpochMeter) -> None:
        """Resume plan and meter in the epoch in which the fit resumes; those of later epochs start fresh."""
        is_resumed = epoch == self._position.epoch and self._position.step > 0
        step = self._position.step if is_resumed else 0
        self._updates.begin(epoch, step)
        if not self._step.has_batch and not self._feed.rows_in_step(0, epoch - 1)[self._distribution.reader]:
            self._step.remember(self._earlier_batch(epoch, step))
        if is_resumed and self._position.meter:
            meter.load_state_dict(self._position.meter)

    def after_step(self, epoch: int, step: int, meter: EpochMeter) -> None:
        """Take a checkpoint if one is due after this step, counted from 1; collective."""
        if self._plan is None or not self._updates.is_last_of_update(step):
            return
        self._num_updates += 1
        if step == self._updates.num_steps:
            return  # that of the end of the epoch follows
        if self._plan.every_updates and self._num_updates % self._plan.every_updates == 0:
            self._step.settle(epoch=epoch, step=step)
            where = {"epoch": epoch, "step": step, "ends_epoch": False, "finished": False}
            self._take(where, {"meter": meter.state_dict()}, self._position.history)

    def after_epoch(
        self, history: Sequence[EpochRecord], *, finished: bool = False, is_best: bool = False
    ) -> None:
        """Take a checkpoint when an epoch and all that follows it are done; collective.

        Args:
            history: records of all epochs so far.
            finished: whether the fit ends here.
            is_best: whether the checkpoint is kept until a better one comes.
        """
        self._position = ResumePoint(epoch=history[-1].epoch + 1, history=tuple(history))
        if self._plan is not None:
            step = self._updates.num_steps
            where = {"epoch": history[-1].epoch, "step": step, "ends_epoch": True, "finished": finished}
            self._take(where, {}, history, is_best=is_best)

    def _take(
        self,
        where: dict[str, Any],
        own: dict[str, Any],
        history: Sequence[EpochRecord],
        *,
        is_best: bool = False,
    ) -> None:
        module = self._state.module
        own = {**own, "wants_to_stop": self._control.wants_to_stop}
        ranks = gather_rank_states(module, self._spec.losses, self._step.device, own, self._communicator)
        if self._writer is None and self._parts is None:
            return
        manifest = Manifest(
            **where,
            epochs=self._spec.epochs,
            world_size=self._communicator.world_size,
            num_ranks_at_start=self._choice.num_ranks_at_start,
            identity=self._choice.identity,
            format_version=WHOLE_VERSION if self._parts is None else DIVIDED_VERSION,
        )
        name = manifest.new_name()
        written = None
        if self._parts is not None:
            assert self._plan is not None, "which has a folder"
            name = broadcast_bytes(self._communicator, name.encode(), root=0, name="new checkpoint").decode()
            written = self._parts.save(
                where["step"],
                self._distribution.parts,
                self._state.optimizer,
                tensors=self._control.best_tensors,
                folder=f"{self._plan.url}/{name}",
            )
        if self._writer is None:
            return
        given = where["step"] - self._updates.steps_before
        states = self._state.capture(
            whole=self._parts is None,
            history=[asdict(record) for record in history],
            feed=self._feed.state(given, where["epoch"] - 1),
            num_updates=self._num_updates,
            layout=self._distribution.name,
        )
        self._writer.write(
            Content(manifest=manifest, states={**states, RANKS: ranks}, name=name, parts=written),
            is_best=is_best,
        )

    def _restore(self, folder: CheckpointFolder, name: str) -> ResumePoint:
        location, manifest = folder.location(name), folder.manifest(name)
        fit = load_file(location, FIT)
        epoch, step = (manifest.epoch + 1, 0) if manifest.ends_epoch else (manifest.epoch, manifest.step)
        # The rows may have been rewritten to files of other names; the identity has shown that they are the same rows.
        self._feed.resume({**fit["feed"], "of": self._feed.state()["of"]})
        self._updates.begin(epoch, step)
        self._num_updates = fit["num_updates"]
        self._state.restore_parts(fit)  # makes room for the best weights
        if manifest.is_divided:
            self._load_parts(f"{folder.url}/{name}")
            set_buffers(dict(self._state.module.named_buffers()), fit["buffers"])
        else:
            load_module_state(self._state.module, load_file(location, MODEL))
            self._state.restore_optimizer(load_file(location, OPTIMIZER), fit)
        self._state.restore_learning_rate(fit)
        is_alike = (
            manifest.world_size == self._communicator.world_size
            and self._distribution.name == fit.get("layout", self._distribution.name)
        )
        meter = self._restore_rank(load_file(location, RANKS), (epoch, step), is_alike=is_alike)
        return ResumePoint(
            epoch, step, tuple(EpochRecord.from_dict(record) for record in fit["history"]), meter
        )

    def _load_parts(self, url: str) -> None:
        """Load module, optimizer and best weights from what ranks wrote that had parts of them."""
        optimizer, best = self._state.optimizer, self._control.best_tensors
        if self._parts is not None:
            self._parts.load(self._distribution.parts, optimizer, tensors=best, folder=url)
        else:
            from sparkdl.parallel import load_whole

            load_whole(url, self._state.module, optimizer, tensors=best)

    def _restore_rank(
        self, ranks: Sequence[bytes], position: tuple[int, int], *, is_alike: bool
    ) -> dict[str, Any]:
        """Give this rank what it had of its own, and return the state of its meter, if an epoch is under way."""
        rank, module = self._communicator.rank, self._state.module
        states = [read_rank_state(state) for state in ([ranks[rank]] if is_alike else ranks)]
        own = states[0]  # as the model's, the buffers of losses are otherwise those of rank 0
        set_buffers(loss_buffers(self._spec.losses, module), own["loss_buffers"])
        self._control.wants_to_stop = any(state["wants_to_stop"] for state in states)
        if not is_alike:
            seed_rank(self._spec.seed, self._distribution.num_generator, *position)
            meters = [state.get("meter") for state in states]
            return join_meter_states([meter for meter in meters if meter], rank) if all(meters) else {}
        set_buffers(dict(module.named_buffers()), own["buffers"])
        set_random_state(own["random"], self._step.device)
        meter: dict[str, Any] = own.get("meter", {})
        return meter

    def _earlier_batch(self, epoch: int, step: int) -> Any:
        """The last batch with rows that this rank has had: it takes part with it in steps without any."""
        index, batch = self._feed.batch_before(epoch - 1, step)
        position = StepPosition(self._communicator.rank, epoch, index + 1, self._distribution.reader)
        with random_numbers_apart(self._step.device):
            return self._step.objective.prepare(batch, position=position)


@dataclass(frozen=True)
class Choice:
    """The checkpoint from which a fit resumes.

    Attributes:
        name: of the checkpoint; None where the fit starts from the beginning.
        num_ranks_at_start: how many ranks read rows of their own when the fit began; for these the rows are planned.
        damaged: names of later checkpoints that cannot be read.
        identity: of the fit, on rank 0.
    """

    name: str | None
    num_ranks_at_start: int
    damaged: tuple[str, ...] = ()
    identity: dict[str, Any] = field(default_factory=dict)


def agree_on_checkpoint(spec: TrainingSpec, dataset: ParquetDataset, communicator: Communicator) -> Choice:
    """Have rank 0 choose the checkpoint to resume from, and broadcast the choice; collective.

    Raises:
        CheckpointError: as :func:`choose_checkpoint`.
        StoreError: if the folder cannot be read.
    """
    choice = Choice(None, num_readers(spec, communicator.world_size))
    if spec.checkpoints is None:
        return choice
    folder = CheckpointFolder(spec.checkpoints.url)
    identity: dict[str, Any] = {}
    if communicator.rank == 0:
        identity = fit_identity(spec, dataset, read_timeout_s=read_timeout_s(communicator))
    damaged: tuple[str, ...] = ()
    while True:
        is_divided = False
        if communicator.rank == 0:
            name, manifest, damaged = choose_checkpoint(folder, identity, spec.epochs, known_damaged=damaged)
            planned = num_readers(spec, spec.checkpoints.num_ranks or communicator.world_size)
            num_ranks = planned if manifest is None else manifest.num_ranks_at_start
            choice = Choice(name, num_ranks, damaged, identity)
            is_divided = manifest is not None and manifest.is_divided
        if communicator.world_size > 1:
            message = json.dumps([choice.name, choice.num_ranks_at_start, is_divided]).encode()
            name, num_ranks, is_divided = json.loads(
                broadcast_bytes(communicator, message, root=0, name="checkpoint")
            )
            choice = Choice(name, num_ranks, choice.damaged, choice.identity)
        if not is_divided or _parts_are_whole(folder, str(choice.name), communicator):
            return choice
        damaged = (*damaged, str(choice.name))


def _parts_are_whole(folder: CheckpointFolder, name: str, communicator: Communicator) -> bool:
    """Whether all files of the parts of a module are what was written, of which each rank reads its share. Collective.

    Raises:
        StoreError: if they cannot be read.
    """
    from sparkdl.parallel.checkpoint_files import (  # of fits that share modules alone
        check_files,
        newest_checkpoint,
    )

    is_damaged = np.zeros(1, np.int64)
    try:
        location, manifest = newest_checkpoint(f"{folder.url}/{name}")
        check_files(location, manifest, range(communicator.rank, manifest["ranks"], communicator.world_size))
    except CheckpointError as error:
        logger.warning("The checkpoint %s/%s is not used: %s The one before it is.", folder.url, name, error)
        is_damaged[0] = 1
    if communicator.world_size > 1:
        communicator.allreduce(is_damaged, op="max")
    return not is_damaged[0]


def choose_checkpoint(
    folder: CheckpointFolder, identity: dict[str, Any], epochs: int, *, known_damaged: Collection[str] = ()
) -> tuple[str | None, Manifest | None, tuple[str, ...]]:
    """Return name and manifest of the newest checkpoint that is whole, and the names of later ones, which are not.

    Args:
        folder: of the checkpoints.
        identity: of the fit.
        epochs: that it is to have.
        known_damaged: names of checkpoints that are not whole.

    Raises:
        CheckpointError: if it is of another fit, of one that has come further than ``epochs``, or of a newer version.
        StoreError: if the folder cannot be read.
    """
    damaged: list[str] = []
    for name, manifest in folder.newest_first():
        if name in known_damaged:
            damaged.append(name)
            continue
        try:
            if isinstance(manifest, DamagedFileError):
                raise manifest
            check_progress(folder.url, manifest, identity, epochs)
            folder.check(name, manifest)
        except DamagedFileError as error:
            logger.warning(
                "The checkpoint %s/%s is not used: %s. The one before it is.", folder.url, name, error
            )
            damaged.append(name)
            continue
        return name, manifest, tuple(damaged)
    if damaged:
        logger.warning("%s holds no other checkpoint: the fit starts from the beginning.", folder.url)
    return None, None, tuple(damaged)
