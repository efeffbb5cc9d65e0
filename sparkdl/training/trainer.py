"""The training loop of one rank, over an open communicator and a dataset.

A rank computes on its own GPU, or in the number of threads that its launcher set in ``OMP_NUM_THREADS``. Without
that, the ranks of a host share its cores.
"""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sparkdl.cores import threads_of_local_rank
from sparkdl.data import ParquetDataset, PlannedFeed
from sparkdl.errors import ParamError
from sparkdl.random_state import refuse_what_varies, seed_rank
from sparkdl.torch import collective_errors, destroy_process_group, init_process_group
from sparkdl.training.balance import RankSpeeds, StragglerWatch
from sparkdl.training.callbacks import FitControl
from sparkdl.training.checkpoint.checkpointing import Checkpoints
from sparkdl.training.checkpoint.choice import agree_on_checkpoint
from sparkdl.training.device_batches import (
    batches_for,
    most_batches_ahead,
    read_timeout_s,
    single_rows_allowed,
)
from sparkdl.training.distribution import DividedModel, ModelDistribution, Replicas
from sparkdl.training.history import EpochMeter, EpochRecord, FitOutcome, ProgressReporter, Report
from sparkdl.training.learning_rate import LearningRate, RangeTest, scaling_factor
from sparkdl.training.metrics import EpochMetrics
from sparkdl.training.objective import ErrorContext, Objective, StepPosition
from sparkdl.training.precision import Precision
from sparkdl.training.stages import Stages
from sparkdl.training.step import TrainingStep
from sparkdl.training.update import (
    UpdatePlan,
    WeightUpdate,
    fuse,
    make_optimizer,
    updates_per_epoch,
    warn_of_untrained_parameters,
)
from sparkdl.training.validation import Validation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sparkdl.collective import Communicator
    from sparkdl.training.checkpoint.handover import Handover
    from sparkdl.training.objective import Batch
    from sparkdl.training.spec import TrainingSpec


logger = logging.getLogger(__name__)


def choose_device(kind: str, communicator: Communicator) -> torch.device:
    """Return the device for ``"cpu"`` or ``"cuda"``, and make a GPU the current one.

    Raises:
        ParamError: if a GPU was asked for and torch sees none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if not num_devices:
        raise ParamError(
            f"Rank {communicator.rank} was asked to train on a GPU, but torch {torch.__version__} sees "
            "none there. Set gpusPerWorker to 0, or give the executors GPUs and a CUDA build of torch."
        )
    device = torch.device("cuda", communicator.topology.local_rank % num_devices)
    torch.cuda.set_device(device)
    return device


def distribute(
    spec: TrainingSpec,
    communicator: Communicator,
    device: torch.device,
    resources: ExitStack,
    *,
    by_replica: bool = False,
) -> ModelDistribution:
    """Place the module of a fit on the ranks. Collective.

    Args:
        spec: what to train and how.
        communicator: communicator of all ranks.
        device: device of this rank.
        resources: exit stack that undoes the changes to the module at the end of the fit.
        by_replica: whether the ranks of each replica of a divided module follow each other, and are lost together.

    Raises:
        ParamError: if the sizes of the parallelism do not fit the ranks or the module.
    """
    if spec.parallelism is None or communicator.world_size == 1:
        return Replicas(spec, communicator, device, resources)
    sizes = spec.parallelism.resolve(communicator.world_size)
    if sizes.data == communicator.world_size:
        return Replicas(spec, communicator, device, resources)
    init_process_group(communicator, cuda=device.type == "cuda")
    layout = sizes.lay_out(device_type=device.type, by_replica=by_replica)
    return (DividedModel if sizes.pipeline == 1 else Stages)(layout, spec, device, resources)


def plan_layout(
    spec: TrainingSpec, communicator: Communicator, device: torch.device, report: Report
) -> TrainingSpec:
    """Return the spec with the layout that its planner chooses, and report the choice. Collective.

    Raises:
        ParamError: if the model fits in no layout.
    """
    assert spec.planner is not None
    was_initialized = torch.distributed.is_initialized()
    if not was_initialized:
        init_process_group(communicator, cuda=device.type == "cuda")
    try:
        parallelism, about = spec.planner(spec.model, device)
    finally:
        if not was_initialized:
            destroy_process_group()
    if communicator.rank == 0:
        report({"kind": "layout", **about})
    return replace(spec, parallelism=parallelism)


class StepMonitor(Protocol):
    """Called at the start and end of each step of a rank; :class:`sparkdl.monitor.sampler.RankSampler` is one."""

    def begin_step(self, number: int) -> None:
        """Note that a step begins; its batch has been read. Steps are numbered from 1 over all epochs."""

    def end_step(self, rows: int, *, batch: Mapping[str, Any], reading_s: float) -> None:
        """Note that a step has ended, with the seconds that the rank has waited for data in the epoch so far."""


def train(
    spec: TrainingSpec,
    *,
    communicator: Communicator,
    dataset: ParquetDataset,
    keep: Callable[[ModelDistribution], Any],
    report: Report | None = None,
    on_step: Callable[[], None] = lambda: None,
    on_position: Callable[[str], None] = lambda _: None,
    handover: Handover | None = None,
    monitor: StepMonitor | None = None,
) -> FitOutcome:
    """Train a module on this rank's shard of a dataset, together with all other ranks.

    N ranks with batches of B rows compute what one process would with batches of the joined N * B rows; with
    a fixed seed and number of ranks a fit on CPU repeats to the bit. If ``spec.checkpoints`` is set, checkpoints
    are taken, and an interrupted fit continues from the last one as if it had not been interrupted.

    Args:
        spec: what to train and how; the same on every rank.
        communicator: communicator of all ranks, open. It is aborted if this rank fails, so that other ranks do not wait
            for it.
        dataset: the Parquet files, with the columns that ``spec`` names.
        keep: called on every rank with the distribution that holds the trained module; its result is
            ``FitOutcome.module``.
        report: function that is called with the events of :class:`~sparkdl.training.history.ProgressReporter`, on
            rank 0 only; None to discard them.
        on_step: called on every rank after each step and each batch of validation.
        on_position: called on every rank before each step with a text that names epoch and step, and with an empty text
            after the last step.
        handover: state that this rank has brought from an earlier world of an elastic launch, and takes along when it
            leaves; None if the ranks stay together.
        monitor: called at the start and end of each step of this rank; None for no monitor.

    Raises:
        TrainingError: if the loss is no longer finite, or the user's code fails: the model, its losses, a trainStep,
            augment, a metric, the scheduler or a callback. The message names rank and epoch, and the step if there is
            one.
        ParamError: if the device or the optimizer cannot be used.
        ReplicasDifferError: if the weights of ranks differ that should have the same.
        CheckpointError: if the checkpoints are of another fit, or a state cannot be written.
        StoreError: if a checkpoint cannot be written or read.
        CommunicatorError: if another rank failed or was lost, or all ranks leave their world.
    """
    was_initialized = torch.distributed.is_initialized()
    try:
        # DistributedDataParallel would otherwise hide which rank was lost behind a plain RuntimeError.
        with collective_errors(), ExitStack() as resources:
            trainer = Trainer(
                spec,
                communicator,
                dataset,
                resources,
                report=report or (lambda _: None),
                on_step=on_step,
                on_position=on_position,
                handover=handover,
                monitor=monitor,
            )
            try:
                return trainer.fit(keep)
            except BaseException as error:
                if handover is not None and handover.context.can_continue(error):
                    handover.left = trainer
                raise
    except BaseException as error:
        communicator.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        if torch.distributed.is_initialized() and not was_initialized:
            destroy_process_group()  # the process may train again


class Trainer:
    """The training loop of one rank, with the objects that it uses. They are made in the order of their dependencies.

    Args:
        spec: what to train and how.
        communicator: communicator of all ranks, open.
        dataset: the Parquet files.
        resources: exit stack that closes the feed and other resources at the end of the fit.
        report: function that is called with progress events, on rank 0 only.
        on_step: called after each step and each batch of validation.
        on_position: called with a text that names epoch and step.
        handover: state from an earlier world of the ranks; None if they stay together.
        monitor: called at the start and end of each step; None for no monitor.

    Attributes:
        device: device on which the module computes.
        distribution: distribution of the module over the ranks.
        module: module that is trained.
        feed: feed of this rank's rows.
        plan: plan of the steps that lead to an update of the weights.
        learning_rate: learning rate of the optimizer.
        update: applies gradients to the weights.
        step: applies a batch to the module.
        range_test: records the loss by learning rate; None except in a range test.
        has_exploded: whether the loss of a range test has exploded, which ends the fit.
        speeds: measures the speeds of the ranks; None if nothing depends on them.
        replicas: compares the weights of the ranks; None without replicas, or if they are not to be compared.
        validation: evaluates the module on the validation rows; None without validation.
        control: callbacks, early stopping and the best weights.
        checkpoints: writes checkpoints during the fit, and resumes from one.
        progress: reports steps and epochs.
        history: records of the epochs so far.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        communicator: Communicator,
        dataset: ParquetDataset,
        resources: ExitStack,
        *,
        report: Report,
        on_step: Callable[[], None],
        on_position: Callable[[str], None],
        handover: Handover | None = None,
        monitor: StepMonitor | None = None,
    ) -> None:
        self.monitor = monitor
        self.handover = handover
        self.communicator = communicator
        self.on_position = on_position
        refuse_what_varies(spec.deterministic)
        torch.set_num_threads(threads_of_local_rank(communicator.topology.local_size))
        self.device = choose_device(spec.device, communicator)
        if spec.planner is not None:
            spec = plan_layout(spec, communicator, self.device, report)
        self.spec = spec
        meet = agree_on_checkpoint if handover is None else handover.meet
        choice = meet(spec, dataset, communicator)
        self.distribution = distribute(
            spec, communicator, self.device, resources, by_replica=handover is not None
        )
        self.module = self.distribution.module
        seed_rank(spec.seed, self.distribution.generator_index)
        self.feed = resources.enter_context(
            PlannedFeed(
                dataset,
                columns=spec.columns(),
                rank=self.distribution.reader,
                world_size=self.distribution.num_readers,
                planned_ranks=choice.num_ranks_at_start,
                batch_size=spec.batch_size,
                shuffle=spec.shuffle,
                seed=spec.seed,
                num_threads=spec.num_reader_threads,
                row_filter=spec.training_rows,
                cache=spec.cache,
                read_timeout_s=read_timeout_s(communicator),
                has_identity=False,
            )
        )
        self.plan = UpdatePlan(self.feed, spec.accumulated_batches)
        optimizer = make_optimizer(spec.optimizer, self.module)
        if communicator.rank == 0:
            warn_of_untrained_parameters(optimizer, self.module)
        fuse(optimizer)
        self.learning_rate = LearningRate(
            optimizer,
            factor=scaling_factor(spec.learning_rate_scaling, choice.num_ranks_at_start),
            warmup_steps=spec.warmup_steps,
            scheduler=spec.scheduler,
            interval=spec.scheduler_interval,
            num_epochs=spec.epochs,
            updates_per_epoch=updates_per_epoch(self.feed.steps_per_epoch, spec.accumulated_batches),
            watched=spec.watched,
        )
        precision = Precision(spec.precision, self.device)
        self.update = WeightUpdate(
            self.distribution, optimizer, self.learning_rate, precision, spec.max_grad_norm
        )
        self.step = TrainingStep(
            distribution=self.distribution,
            objective=Objective(spec, precision=precision, device=self.device),
            plan=self.plan,
            update=self.update,
            precision=precision,
            communicator=communicator,
            device=self.device,
        )
        self.range_test = RangeTest(communicator) if spec.is_range_test else None
        self.has_exploded = False
        self.step.finite.raises = not spec.is_range_test
        self.speeds = self._open_speeds()
        self.replicas = self.distribution.replica_check(optimizer) if spec.compare_replicas else None
        self.validation = self._open_validation(dataset, resources, on_step)
        self.control = FitControl(
            spec,
            communicator=communicator,
            module=self.module,
            optimizer=optimizer,
            steps_per_epoch=self.feed.steps_per_epoch,
            keeps_best=communicator.rank == 0 or self.distribution.is_divided or handover is not None,
        )
        parts = {
            "scaler": precision.scaler,
            "update": self.update,
            "step": self.step,
            "course": self.control,
            "local": self.distribution.local,
        }
        self.checkpoints = resources.enter_context(
            Checkpoints(
                choice,
                spec=spec,
                optimizer=optimizer,
                learning_rate=self.learning_rate,
                parts={name: part for name, part in parts.items() if part is not None},
                step=self.step,
                updates=self.plan,
                feed=self.feed,
                control=self.control,
                distribution=self.distribution,
                communicator=communicator,
                compare=self._compare_replicas,
            )
        )
        self.progress = ProgressReporter(
            report if communicator.rank == 0 else (lambda _: None),
            epochs=spec.epochs,
            steps_per_epoch=self.feed.steps_per_epoch,
            on_step=on_step,
        )
        self.history: list[EpochRecord] = []

    def fit(self, keep: Callable[[ModelDistribution], Any]) -> FitOutcome:
        """Train the remaining epochs; see :func:`train`."""
        with single_rows_allowed(self.module):
            for epoch in range(self._resume(), self.spec.epochs + 1):
                if self.control.has_ended or self.has_exploded:
                    break
                self.run_epoch(epoch)
            self.on_position("")
            if self.handover is not None:
                self.handover.hold(self)  # before the best weights replace the last ones
            model_epoch = self.control.end()
        losses = () if self.range_test is None else tuple(self.range_test.losses)
        return FitOutcome(keep(self.distribution), tuple(self.history), model_epoch, losses)

    def run_epoch(self, epoch: int) -> None:
        """Train on all rows once, validate, and take a checkpoint if one is due."""
        meter = EpochMeter(
            epoch, self.device, self.communicator, EpochMetrics(self.spec.metrics, self.device)
        )
        self.checkpoints.begin_epoch(epoch, meter)
        self.control.call("on_epoch_start", epoch=epoch)
        self._run_steps(epoch, meter)
        rank, where = self.communicator.rank, f"epoch {epoch}"
        with ErrorContext("the end of the training", rank=rank, where=where):
            rank_rows = self.speeds.rows if self.speeds and self.spec.balance == "speed" else ()
            record = meter.close(learning_rate=self.learning_rate.last, rank_rows=rank_rows)
        if self.validation is not None:
            self.on_position(f"the validation of epoch {epoch}")
            with ErrorContext("validation", rank=rank, where=where):
                values, seconds = self.validation.run(epoch, self.step.last_batch)
            record = replace(record, metrics={**record.metrics, **values}, validation_s=seconds)
        self.on_position(f"the end of epoch {epoch}")
        if self.handover is None:
            self._end_epoch(record)
        else:
            keeps = self if self.spec.callbacks else None
            self.handover.settle(meter, partial(self._end_epoch, record), keeps=keeps)
        self.control.agree_to_stop()
        self._compare_replicas(f"the end of epoch {epoch}")
        self.checkpoints.after_epoch(
            self.history,
            finished=epoch == self.spec.epochs or self.control.has_ended,
            is_best=self.control.best is not None and self.control.best.epoch == epoch,
        )
        if self.handover is not None:
            self.handover.leave_if_asked()

    def _end_epoch(self, record: EpochRecord) -> None:
        """Take in the record of an epoch. No communication, except of callbacks."""
        self.update.end_epoch(record.epoch)
        with ErrorContext("the scheduler", rank=self.communicator.rank, where=f"epoch {record.epoch}"):
            self.learning_rate.end_epoch(record)
        self.progress.epoch(record)
        self.history.append(record)
        self.control.end_epoch(record)
        if self.handover is not None:
            self.handover.note_epoch(self, record.epoch)

    def run_step(self, position: StepPosition, batch: Batch, meter: EpochMeter) -> None:
        """Apply one batch, together with all other ranks, and take a checkpoint if one is due."""
        epoch, step = position.epoch, position.step
        text = position.text()
        self.on_position(text)
        if self.speeds is not None:
            self.speeds.begin_step()
        if self.monitor is not None:
            self.monitor.begin_step((epoch - 1) * self.plan.num_steps + step)
        with ErrorContext("training", rank=position.rank, where=text, batch=batch):
            loss, weight, num_rows = self.step.run(batch, epoch=epoch, step=step, metrics=meter.metrics)
            meter.add(loss, weight, num_rows)
            if self.range_test is not None:
                self.range_test.add(loss, weight)
            # Whether all ranks have the same weights, between two updates.
            are_equal = self.plan.is_last_of_update(step) and self._update(epoch, step, meter)
        self.control.call("on_step_end", epoch=epoch, step=step, loss=loss)
        if self.replicas is not None and not self.replicas.were_equal_at and are_equal:
            self._compare_replicas(text)
        self.progress.step(epoch=epoch, step=step, rows=self.plan.rows_of_step(step), meter=meter)
        if self.monitor is not None:
            self.monitor.end_step(num_rows, batch=batch, reading_s=meter.waited_s)
        if are_equal:
            self.checkpoints.after_update(epoch, step, meter)
        if self.handover is not None and are_equal and step < self.plan.num_steps:
            self.handover.leave_if_asked()
        if self.speeds is not None:
            following = step - self.plan.steps_before
            self.speeds.end_step(num_rows, epoch=epoch, step=step, following=following)

    def _update(self, epoch: int, step: int, meter: EpochMeter) -> bool:
        """Update the weights; return whether all ranks have the same now. In an elastic launch this is a border."""
        if self.range_test is not None:
            self.has_exploded = self.range_test.ends_before_update(self.learning_rate.scheduled)
            if self.has_exploded:
                return False
        handover = self.handover
        if handover is None or self.distribution.local is not None:
            self.step.update()
            are_equal = self._after_update(epoch, step)
            if handover is not None and are_equal:
                handover.settle(meter, partial(handover.note_step, self, epoch, step, meter))
            return are_equal

        def update() -> None:
            self.step.update()
            self.checkpoints.count_update()
            handover.note_step(self, epoch, step, meter)

        handover.settle(meter, update)
        return True

    def _after_update(self, epoch: int, step: int) -> bool:
        """Count an update, and synchronize the ranks if it is time; return whether all have the same weights."""
        is_due = self.checkpoints.count_update()
        if self.handover is not None:
            is_due = self.handover.count_update(self) or is_due
        with ErrorContext(
            "the synchronization", rank=self.communicator.rank, where=f"epoch {epoch}, step {step}"
        ):
            return self.distribution.after_update(ends_epoch=step == self.plan.num_steps, is_due=is_due)

    def _run_steps(self, epoch: int, meter: EpochMeter) -> None:
        if not self.plan.has_steps:
            return
        first = StepPosition(
            self.communicator.rank, epoch, self.plan.steps_before + 1, self.distribution.reader
        )
        objective = self.step.objective
        prepared = objective.prepare_all(self.feed.epoch(epoch - 1), first)
        # Without closing(), the traceback of a failed step would keep the batches and the threads that make them.
        with closing(batches_for(self.device, prepared, ahead=not objective.draws)) as batches:
            for step, batch in enumerate(meter.time_waits(batches), start=first.step):
                self.run_step(first._replace(step=step), batch, meter)
                if self.has_exploded:
                    break
        if self.speeds is not None:
            self.speeds.time.pause()

    def _resume(self) -> int:
        """Restore the checkpoint that was chosen, if any, and return the epoch to continue with."""
        held = None if self.handover is None else self.handover.share(self.distribution, self.communicator)
        start = self.checkpoints.resume(held)
        self.distribution.begin()
        self.progress.resume(
            epoch=start.epoch,
            steps=start.step,
            history=start.history,
            is_restart=self.handover is None or not self.handover.world.has_state,
        )
        self.history = list(start.history)
        self.control.begin(self.history, in_epoch=start.step > 0)
        return start.epoch

    def _compare_replicas(self, at: str) -> None:
        if self.replicas is not None:
            self.distribution.take_up_changes()  # since the last step, by callbacks
            self.replicas.compare(at)

    def _open_speeds(self) -> RankSpeeds | None:
        spec, num_ranks = self.spec, self.communicator.world_size
        divides_rows = spec.balance == "speed" and num_ranks <= self.plan.rows_of_step(1)
        if num_ranks == 1 or not (divides_rows or spec.straggler_factor):
            return None
        factor, seconds = spec.straggler_factor, spec.straggler_seconds
        speeds = RankSpeeds(
            self.feed,
            self.communicator,
            self.device,
            divides_rows=divides_rows,
            watch=None if factor is None else StragglerWatch(factor, seconds),
            on_straggler=self._name_straggler,
            batches_ahead=most_batches_ahead(self.device, ahead=not self.step.objective.draws),
        )
        self.step.on_loss = speeds.time.end_forward
        return speeds

    def _name_straggler(self, rank: int, ratio: float) -> None:
        """Name a rank that takes ``ratio`` times as long as others for a row; it leaves if it is to be replaced."""
        self.progress.report({"kind": "straggler", "slow_rank": rank, "ratio": ratio})
        if rank != self.communicator.rank:
            return
        is_replaced = self.handover is not None and self.spec.replaces_stragglers
        logger.warning(
            "Rank %d on %s has taken %.1f times the median time of the other ranks for a row, for %g s or more.%s",
            rank,
            socket.gethostname(),
            ratio,
            self.spec.straggler_seconds,
            " It leaves, and another one takes its place." if is_replaced else "",
        )
        if self.handover is not None and is_replaced:
            self.handover.context.ask_to_leave()  # another rank takes the place of this one

    def _open_validation(
        self, dataset: ParquetDataset, resources: ExitStack, on_step: Callable[[], None]
    ) -> Validation | None:
        if self.spec.validation_rows is None:
            return None
        return Validation(
            self.spec,
            dataset=dataset,
            communicator=self.communicator,
            distribution=self.distribution,
            objective=self.step.objective,
            device=self.device,
            resources=resources,
            on_step=on_step,
        )
