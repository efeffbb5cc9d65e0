"""The training loop of one rank, over an open communicator and a dataset.

A rank computes on a GPU of its own, or on its share of the host's cores.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.data import ParquetDataset, PlannedFeed
from sparkdl.errors import ParamError
from sparkdl.torch import (
    DataParallel,
    collective_errors,
    destroy_process_group,
    init_process_group,
    synchronized_batch_norms,
)
from sparkdl.training.batches import batches_for, read_timeout_s
from sparkdl.training.callbacks import FitCourse
from sparkdl.training.checkpoint.checkpointing import Checkpoints, Choice, agree_on_checkpoint
from sparkdl.training.checkpoint.state import FitState
from sparkdl.training.history import EpochMeter, EpochRecord, ProgressReporter, Report
from sparkdl.training.learning_rate import LearningRate, scaling_factor
from sparkdl.training.metrics import EpochMetrics
from sparkdl.training.objective import Objective, Place, StepModule, told_with_place
from sparkdl.training.random_state import refuse_what_varies, seed_rank
from sparkdl.training.step import TrainingStep, single_rows_allowed
from sparkdl.training.update import Precision, UpdatePlan, WeightUpdate, make_optimizer
from sparkdl.training.validation import Validation

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.collective import Communicator
    from sparkdl.training.spec import TrainingSpec


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


def cores_per_rank(ranks_on_host: int) -> int:
    """Return how many of this host's cores each of its ranks may use, one at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks_on_host)


@dataclass(frozen=True)
class TrainingResult:
    """What training leaves on a rank.

    Attributes:
        module: the trained module, on CPU and in ``eval()`` mode; equal on all ranks, except for buffers.
        history: one record per epoch, equal on all ranks.
        model_epoch: the epoch that the weights are from: the best one where the fit keeps it, and then on rank 0 alone,
            while other ranks have the last one's.
    """

    module: nn.Module
    history: tuple[EpochRecord, ...]
    model_epoch: int


def train(
    spec: TrainingSpec,
    *,
    communicator: Communicator,
    dataset: ParquetDataset,
    report: Report | None = None,
    went_on: Callable[[], None] = lambda: None,
    note_place: Callable[[str], None] = lambda _: None,
) -> TrainingResult:
    """Train a module on this rank's shard of a dataset, together with all other ranks.

    N ranks with batches of B rows compute what one process would with batches of the joined N * B rows; with
    a fixed seed and number of ranks a fit on CPU repeats to the bit. Where ``spec.checkpoints`` says so, checkpoints
    are taken, and a fit that was interrupted goes on from the last of them as if it had not been.

    Args:
        spec: what to train and how; the same on every rank.
        communicator: open over all ranks. It is aborted when this rank fails, so that none waits for it.
        dataset: the Parquet files, with the columns that ``spec`` names.
        report: takes the events of :class:`~sparkdl.training.history.ProgressReporter`; called on rank 0
            only.
        went_on: called on every rank after each step and each batch of validation.
        note_place: called on every rank with epoch and step in words before each step, and with an empty text after
            the last one.

    Raises:
        TrainingError: if the loss is no longer finite, or code of the user's fails: the model, its losses, a trainStep,
            augment, a metric, the scheduler or a callback; told with rank and epoch, and the step where it is in one.
        ParamError: if the device or the optimizer cannot be used.
        CheckpointError: if the checkpoints are of another fit, or a state cannot be written.
        StoreError: if a checkpoint cannot be written or read.
        CommunicatorError: if another rank failed or was lost.
    """
    was_initialized = torch.distributed.is_initialized()
    try:
        # DistributedDataParallel would otherwise hide which rank was lost behind a plain RuntimeError.
        with collective_errors():
            return _train(spec, communicator, dataset, report or _report_nothing, went_on, note_place)
    except BaseException as error:
        communicator.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        if torch.distributed.is_initialized() and not was_initialized:
            destroy_process_group()  # the process may train again


def _train(
    spec: TrainingSpec,
    communicator: Communicator,
    dataset: ParquetDataset,
    report: Report,
    went_on: Callable[[], None],
    note_place: Callable[[str], None],
) -> TrainingResult:
    seed_rank(spec.seed, communicator.rank)
    refuse_what_varies(spec.deterministic)
    torch.set_num_threads(spec.num_threads or cores_per_rank(communicator.topology.local_size))
    device = choose_device(spec.device, communicator)
    module = spec.model.to(device).train()
    choice = agree_on_checkpoint(spec, dataset, communicator)
    feed = PlannedFeed(
        dataset,
        columns=spec.columns(),
        rank=communicator.rank,
        world_size=communicator.world_size,
        planned_ranks=choice.num_ranks_at_start,
        batch_size=spec.batch_size,
        shuffle=spec.shuffle,
        seed=spec.seed,
        num_threads=spec.num_reader_threads,
        row_filter=spec.training_rows,
        cache=spec.cache,
        read_timeout_s=read_timeout_s(communicator),
    )
    with feed, single_rows_allowed(module), ExitStack() as stack:
        if spec.sync_batch_norm and communicator.world_size > 1:
            stack.enter_context(synchronized_batch_norms(module))
        if spec.compile:
            module.compile()
        wrapped = _distribute(module, spec, communicator, device)
        if isinstance(wrapped, DataParallel):
            stack.callback(wrapped.close)  # the module may be trained again
        step, update, learning_rate, plan, state = _prepare_step(
            spec, choice, module, wrapped, feed, communicator
        )
        progress = ProgressReporter(
            report if communicator.rank == 0 else _report_nothing,
            epochs=spec.epochs,
            steps_per_epoch=feed.steps_per_epoch,
            went_on=went_on,
        )
        validation = None
        if spec.validation_rows is not None:
            validation = Validation(
                spec,
                dataset=dataset,
                communicator=communicator,
                objective=step.objective,
                device=device,
                went_on=went_on,
            )
            stack.callback(validation.close)
        course = FitCourse(
            spec,
            communicator=communicator,
            module=module,
            optimizer=update.optimizer,
            steps_per_epoch=feed.steps_per_epoch,
        )
        state.add("course", course)
        checkpoints = stack.enter_context(
            Checkpoints(
                choice,
                spec=spec,
                state=state,
                step=step,
                updates=plan,
                feed=feed,
                course=course,
                communicator=communicator,
            )
        )
        position = checkpoints.resume()
        progress.resume(epoch=position.epoch, steps=position.step, history=position.history)
        history = list(position.history)
        course.begin(history, in_epoch=position.step > 0)
        for epoch in range(position.epoch, spec.epochs + 1):
            if not course.goes_on:
                break
            meter = EpochMeter(epoch, device, communicator, EpochMetrics(spec.metrics, device))
            checkpoints.begin_epoch(epoch, meter)
            course.begin_epoch(epoch)
            place = Place(communicator.rank, epoch, plan.steps_before + 1)
            record = _run_epoch(
                place, feed, step, plan, meter, progress, learning_rate, course, checkpoints, note_place
            )
            if validation is not None:
                note_place(f"the validation of epoch {epoch}")
                with told_with_place("validation", rank=communicator.rank, place=f"epoch {epoch}"):
                    record = record.with_validation(*validation.run(module, epoch))
            note_place(f"the end of epoch {epoch}")
            update.end_epoch(epoch)
            with told_with_place("the scheduler", rank=communicator.rank, place=f"epoch {epoch}"):
                learning_rate.end_epoch(record.metrics.get("val_loss", record.loss))
            progress.epoch(record)
            history.append(record)
            course.end_epoch(record)
            checkpoints.after_epoch(
                history,
                finished=epoch == spec.epochs or not course.goes_on,
                is_best=course.best_epoch == epoch,
            )
        note_place("")
        model_epoch = course.end()
    return TrainingResult(module.to("cpu").eval(), tuple(history), model_epoch)


def _prepare_step(
    spec: TrainingSpec,
    choice: Choice,
    module: nn.Module,
    wrapped: nn.Module,
    feed: PlannedFeed,
    communicator: Communicator,
) -> tuple[TrainingStep, WeightUpdate, LearningRate, UpdatePlan, FitState]:
    device = next(module.parameters()).device
    plan = UpdatePlan(feed, spec.accumulated_batches)
    optimizer = make_optimizer(spec.optimizer, module)
    learning_rate = LearningRate(
        optimizer,
        factor=scaling_factor(spec.learning_rate_scaling, choice.num_ranks_at_start),
        warmup_steps=spec.warmup_steps,
        scheduler=spec.scheduler,
        interval=spec.scheduler_interval,
        num_epochs=spec.epochs,
        steps_per_epoch=plan.num_updates,
    )
    precision = Precision(spec.precision, device)
    update = WeightUpdate(module, optimizer, learning_rate, precision, spec.max_grad_norm)
    step = TrainingStep(
        module=wrapped,
        objective=Objective(spec, precision=precision, device=device),
        plan=plan,
        update=update,
        precision=precision,
        communicator=communicator,
        device=device,
    )
    state = FitState(module, optimizer, learning_rate, scaler=precision.scaler, update=update, step=step)
    return step, update, learning_rate, plan, state


def _run_epoch(
    first: Place,
    feed: PlannedFeed,
    step: TrainingStep,
    plan: UpdatePlan,
    meter: EpochMeter,
    progress: ProgressReporter,
    learning_rate: LearningRate,
    course: FitCourse,
    checkpoints: Checkpoints,
    note_place: Callable[[str], None],
) -> EpochRecord:
    # A step that fails leaves them to its traceback, with the threads that make them.
    epoch = first.epoch
    prepared = step.objective.prepare_all(feed.epoch(epoch - 1), first)
    with closing(batches_for(step.device, prepared, ahead=not step.objective.draws)) as batches:
        for index, batch in enumerate(meter.time_waits(batches), start=first.step):
            place = Place(first.rank, epoch, index).told()
            note_place(place)
            with told_with_place("training", rank=first.rank, place=place, batch=batch):
                result = step.run(batch, epoch=epoch, step=index, metrics=meter.metrics)
            meter.add(result.loss_mean, result.weight, result.rows)
            course.end_step(epoch, index, result.loss_mean)
            progress.step(epoch=epoch, step=index, rows=plan.rows_of_step(index), meter=meter)
            checkpoints.after_step(epoch, index, meter)
    with told_with_place("the end of the training", rank=first.rank, place=f"epoch {epoch}"):
        return meter.close(learning_rate=learning_rate.last)


def _distribute(
    module: nn.Module, spec: TrainingSpec, communicator: Communicator, device: torch.device
) -> nn.Module:
    """Wrap the module so that backward averages gradients; rank 0's weights become everyone's."""
    if communicator.world_size == 1:
        return module
    # Also for modules that use torch.distributed themselves, as SyncBatchNorm does.
    init_process_group(communicator, cuda=device.type == "cuda")
    whole = module if spec.user_step is None else StepModule(module, spec.user_step)
    if device.type == "cpu":
        return DataParallel(whole, communicator)
    return DistributedDataParallel(
        whole,
        device_ids=[device],
        gradient_as_bucket_view=True,
        find_unused_parameters=spec.has_unused_parameters,
    )


def _report_nothing(event: dict[str, object]) -> None:
    del event
