"""Callbacks of a fit, the weights of its best epoch, and early stopping.

Callbacks are called on every *rank*. The weights of the best epoch are kept on rank 0, whose model a fit returns.
Early stopping ends a fit that no longer improves. The ranks agree on the end of the fit in an allreduce, because
their values may differ by rounding.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sparkdl.errors import TrainingError
from sparkdl.foreign_errors import needing
from sparkdl.model.weights_file import can_be_written
from sparkdl.training.checkpoint.state import load_module_state, module_state

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sparkdl.collective import Communicator
    from sparkdl.training.history import EpochRecord
    from sparkdl.training.spec import Goal, TrainingSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitContext:
    """State of the fit on one rank, passed to callbacks.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks.
        epochs: total number of epochs of the fit.
        steps_per_epoch: number of steps of an epoch, the same on every rank.
        module: the model on this rank's device. A callback that changes weights, buffers or layers, or freezes
            parameters, has to do so equally on all ranks; new parameters get rank 0's values.
        optimizer: optimizer of the model's parameters.
        epoch: number of the epoch, from 1; 0 before the first.
        step: number of the step in the epoch, from 1; 0 before the first.
        loss: mean loss of this rank's rows in the step, a tensor on the device; reading its value waits for a GPU. None
            outside of ``on_step_end``.
        record: record of the epoch with its metrics, the same on every rank: in ``on_epoch_end`` of this epoch, in
            ``on_fit_end`` of the last epoch. None elsewhere.
        model_epoch: number of the epoch that rank 0's weights are from, in ``on_fit_end``; None elsewhere. Only rank 0
            has the weights of the best epoch, unless each rank has a part of the module.
    """

    rank: int
    world_size: int
    epochs: int
    steps_per_epoch: int
    module: nn.Module
    optimizer: Optimizer
    epoch: int = 0
    step: int = 0
    loss: Tensor | None = None
    record: EpochRecord | None = None
    model_epoch: int | None = None
    _control: FitControl | None = field(default=None, repr=False)

    def stop(self) -> None:
        """Ask to end the fit after this epoch. One rank's request is enough: all ranks then stop together."""
        if self._control is not None:  # else no fit has made this context
            self._control.wants_to_stop = True


class Callback:
    """Base class of callbacks: override the methods you need. ``TorchEstimator(callbacks=[...])`` takes instances.

    Each rank gets its own copy, made by pickling; the attributes of the copies do not come back to the driver. All
    ranks call the same methods in the same order::

        on_fit_start
          on_epoch_start             epoch 1
            on_step_end              each batch, after the weights were updated if it led to an update
          on_epoch_end               after validation, with the record
        on_fit_end                   with the weights that the fit returns

    A method that raises ends the fit on all ranks, with an error that names the callback. A method that calls
    torch.distributed has to do so on all ranks. A resumed fit restores the states of the callbacks from the checkpoint,
    and then calls ``on_fit_start`` again.
    """

    def on_fit_start(self, context: FitContext) -> None:
        """Called before the first epoch."""

    def on_epoch_start(self, context: FitContext) -> None:
        """Called before the first step of an epoch."""

    def on_step_end(self, context: FitContext) -> None:
        """Called after a step."""

    def on_epoch_end(self, context: FitContext) -> None:
        """Called after an epoch and its validation."""

    def on_fit_end(self, context: FitContext) -> None:
        """Called after the last epoch; not if the fit has failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints. Rank 0's state is saved, and restored on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""


class TensorBoard(Callback):
    """Writes losses, metrics and the learning rate of a fit for TensorBoard; rank 0 writes.

    Example::

        TorchEstimator(..., callbacks=[TensorBoard("/shared/runs/digits")]).fit(df)

    After each epoch it writes ``epoch/loss``, ``epoch/val_loss`` and so on, and every few steps ``step/loss``, the loss
    of rank 0. All have the number of the step as their step. ``Monitor(tensorboard=...)`` writes speed and waiting on
    the driver instead.

    Args:
        folder: folder on the host of rank 0, such as one that all hosts share, or a URL that tensorboard can write.
        every_steps: number of steps between two values of ``step/loss``; reading a value waits for the GPU.
        weights: whether to write histograms of the weights after each epoch: of all layers, or of those of rank 0's
            stage in a pipeline. Ranks gather sharded weights, one parameter after the other.

    Raises:
        TrainingError: on the rank, if tensorboard is not installed there.
    """

    def __init__(self, folder: str, *, every_steps: int = 50, weights: bool = False) -> None:
        self._folder, self._every_steps, self._writes_weights = folder, every_steps, weights
        self._writer: Any = None

    def on_fit_start(self, context: FitContext) -> None:
        """Open the folder on rank 0."""
        if context.rank:
            return
        with needing("The callback TensorBoard, on the ranks,", "monitor", "tensorboard", kind=TrainingError):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(self._folder)

    def on_step_end(self, context: FitContext) -> None:
        """Write the loss of some steps."""
        number = (context.epoch - 1) * context.steps_per_epoch + context.step
        if self._writer is not None and context.loss is not None and number % self._every_steps == 0:
            self._writer.add_scalar("step/loss", float(context.loss), number)

    def on_epoch_end(self, context: FitContext) -> None:
        """Write the record of the epoch. Collective if weights are written and sharded."""
        number = context.epoch * context.steps_per_epoch
        if self._writes_weights:
            for name, parameter in context.module.named_parameters():
                weights: Any = parameter.detach()
                if hasattr(weights, "full_tensor"):  # a DTensor, which all ranks gather
                    weights = weights.full_tensor()
                if self._writer is not None:
                    self._writer.add_histogram(name, weights.float().cpu(), number)
        if self._writer is None or context.record is None:
            return
        values = {**context.record.values, "learning_rate": context.record.learning_rate}
        for name, value in values.items():
            self._writer.add_scalar(f"epoch/{name}", value, number)
        self._writer.flush()

    def on_fit_end(self, context: FitContext) -> None:
        """Close the files."""
        del context
        if self._writer is not None:
            self._writer.close()


class TorchProfiler(Callback):
    """Records some steps of each rank with ``torch.profiler``, one file per rank.

    Example::

        TorchEstimator(..., callbacks=[TorchProfiler("/shared/profile", with_stack=True)]).fit(df)

    The files are those of ``torch.profiler.tensorboard_trace_handler``, which https://ui.perfetto.dev opens, too.
    ``Monitor(trace=...)`` merges all ranks and their communication into one file on the driver instead.

    Args:
        folder: folder on the hosts of the ranks, such as one that all hosts share.
        skip: number of steps that are not recorded at the beginning.
        steps: number of steps that are recorded.
        options: further arguments of ``torch.profiler.profile``: ``record_shapes``, ``profile_memory``, ``with_stack``
            and so on.
    """

    def __init__(self, folder: str, *, skip: int = 10, steps: int = 3, **options: Any) -> None:
        self._folder, self._skip, self._steps, self._options = folder, skip, steps, options
        self._profile: Any = None
        self._num_taken = 0

    def on_fit_start(self, context: FitContext) -> None:
        """Begin to count steps."""
        from torch import profiler

        warmup = min(1, self._skip)
        self._profile = profiler.profile(
            schedule=profiler.schedule(
                skip_first=self._skip - warmup, wait=0, warmup=warmup, active=self._steps, repeat=1
            ),
            on_trace_ready=profiler.tensorboard_trace_handler(self._folder, f"rank_{context.rank}"),
            **self._options,
        )
        self._num_taken = 0
        self._profile.start()

    def on_step_end(self, context: FitContext) -> None:
        """Count a step; write the file after the last recorded one."""
        del context
        self._num_taken += 1
        self._profile.step()

    def on_fit_end(self, context: FitContext) -> None:
        """Write the file, if the fit has ended before the last recorded step, and warn that it has fewer steps."""
        self._profile.stop()
        wanted = self._skip + self._steps
        if self._num_taken < wanted and context.rank == 0:
            logger.warning(
                "TorchProfiler recorded %d of %d steps: the fit took %d, and skip=%d leaves out the first ones. Give a "
                "smaller skip or steps, together at most %d, or train for more epochs.",
                max(self._num_taken - self._skip, 0),
                self._steps,
                self._num_taken,
                self._skip,
                self._num_taken,
            )


class BestWeights:
    """A copy of the module's state after the best epoch, in host memory; it takes as much memory as the module.

    Args:
        goal: metric that ranks epochs; of equal epochs the first one is the best.
        module: module whose state is kept.
        is_keeper: whether this rank keeps the weights, or its part of them; other ranks only record which epoch is the
            best.

    Attributes:
        epoch: number of the best epoch; None before the first.
    """

    def __init__(self, goal: Goal, module: nn.Module, *, is_keeper: bool) -> None:
        self._goal, self._module, self._is_keeper = goal, module, is_keeper
        self._kept: dict[str, dict[str, Any]] = {}
        """Copy of what :func:`~sparkdl.training.checkpoint.state.module_state` returned."""
        self._best: float | None = None
        self.epoch: int | None = None

    def offer(self, record: EpochRecord) -> None:
        """Copy the module's state if the epoch of the record is the best so far."""
        value = record.values[self._goal.metric]
        if not self._goal.is_better(value, self._best):
            return
        self._best, self.epoch = value, record.epoch
        if self._is_keeper:
            self._kept = {
                kind: {
                    name: _keep_part(part, self._kept.get(kind, {}).get(name)) for name, part in parts.items()
                }
                for kind, parts in module_state(self._module).items()
            }

    def restore(self) -> int | None:
        """Load the best weights into the module on ranks that keep them, and return their epoch.

        If the metric was NaN in all epochs, return None, with a warning; the module then keeps its last weights.
        """
        if self.epoch is None:
            if self._is_keeper:
                logger.warning(
                    "%s was NaN in every epoch, so no epoch is the best: the model is that of the last epoch.",
                    self._goal.metric,
                )
            return None
        if self._is_keeper:
            load_module_state(self._module, self._kept)
        return self.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its epoch, and what this rank keeps of the weights besides :meth:`tensors`."""
        others = {
            kind: {name: part for name, part in parts.items() if not can_be_written(part)}
            for kind, parts in self._kept.items()
        }
        return {"best": self._best, "epoch": self.epoch, "others": others}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned on rank 0; the caller has to overwrite :meth:`tensors`."""
        self._best, self.epoch = state["best"], state["epoch"]
        self._kept = {}
        if self._is_keeper and self.epoch is not None:
            self._kept = {
                kind: {name: _keep_part(part, None) for name, part in parts.items()}
                | state["others"].get(kind, {})
                for kind, parts in module_state(self._module).items()
            }

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are kept and that a checkpoint stores as such, by unique names."""
        return {
            f"{kind}/{name}": part
            for kind, parts in self._kept.items()
            for name, part in parts.items()
            if can_be_written(part)
        }


def _keep_part(part: Any, before: Any) -> Any:
    """Copy an entry of a state to the host, into the memory of the previous copy if that fits."""
    if not isinstance(part, Tensor):
        return copy.deepcopy(part)  # the extra state of a module
    if hasattr(
        part, "full_tensor"
    ):  # a DTensor stays on its device, where it can be gathered for a checkpoint
        return part.detach().clone()
    if isinstance(before, Tensor) and before.shape == part.shape and before.dtype == part.dtype:
        return before.copy_(part)
    return torch.empty_like(part, device="cpu").copy_(part.detach())


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a fit continues without an improvement.

    Attributes:
        epochs: number of consecutive epochs without an improvement after which the fit ends.
        min_delta: minimum change that counts as an improvement: a value has to be better by more than this.
    """

    epochs: int
    min_delta: float = 0.0


class EarlyStopping:
    """Counts epochs without an improvement over the best value so far.

    Args:
        goal: metric that has to improve.
        patience: how long to wait for an improvement.

    Attributes:
        best: best value so far; None before the first value that is not NaN.
        num_epochs: number of epochs since the last improvement.
    """

    def __init__(self, goal: Goal, patience: Patience) -> None:
        self._goal, self._patience = goal, patience
        self.best: float | None = None
        self.num_epochs = 0

    @property
    def is_over(self) -> bool:
        """Whether the fit should end."""
        return self.num_epochs >= self._patience.epochs

    def observe(self, record: EpochRecord) -> None:
        """Update the counts with the record of an epoch."""
        value = record.values[self._goal.metric]
        if self._goal.is_better(value, self.best, by=self._patience.min_delta):
            self.best, self.num_epochs = value, 0
        else:
            self.num_epochs += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the number of epochs since."""
        return {"best": self.best, "num_epochs": self.num_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.best, self.num_epochs = state["best"], state["num_epochs"]


class FitControl:
    """Callbacks, early stopping and the best weights of a fit; all ranks agree on whether the fit continues.

    Args:
        spec: spec of the fit.
        communicator: communicator of all ranks, open.
        module: module that is trained.
        optimizer: optimizer of the module's parameters.
        steps_per_epoch: number of steps of an epoch, the same on every rank.
        keeps_best: whether this rank keeps the best weights, or its part of them.

    Attributes:
        best: the weights of the best epoch; None if they are not kept.
        wants_to_stop: whether a callback on this rank has asked to end the fit.
        has_ended: whether no other epoch follows; the same on all ranks.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        *,
        communicator: Communicator,
        module: nn.Module,
        optimizer: Optimizer,
        steps_per_epoch: int,
        keeps_best: bool,
    ) -> None:
        self._communicator = communicator
        self._callbacks = spec.callbacks
        self._settings: dict[str, Any] = {
            "rank": communicator.rank,
            "world_size": communicator.world_size,
            "epochs": spec.epochs,
            "steps_per_epoch": steps_per_epoch,
            "module": module,
            "optimizer": optimizer,
        }
        self.wants_to_stop = False
        self.best: BestWeights | None = None
        if spec.best is not None:
            self.best = BestWeights(spec.best, module, is_keeper=keeps_best)
        self._stopping: EarlyStopping | None = None
        if spec.patience is not None:
            assert spec.watched is not None, "patience needs a watched metric"
            self._stopping = EarlyStopping(spec.watched, spec.patience)
        self._last: EpochRecord | None = None
        self.has_ended = False

    def begin(self, history: Sequence[EpochRecord] = (), *, in_epoch: bool = False) -> None:
        """Begin the fit, or resume it after the epochs of a history. Collective if the fit may end early.

        Args:
            history: records of the completed epochs.
            in_epoch: whether the fit resumes within an epoch; requests to stop then count at the end of that epoch.
        """
        if history:
            self._last = history[-1]
            if not in_epoch:
                self.agree_to_stop()
        self.call("on_fit_start")

    def call(self, method: str, **where: Any) -> None:
        """Call a method of all callbacks, in their order.

        Raises:
            TrainingError: if a callback fails; the message names it.
        """
        default = getattr(Callback, method)
        callbacks = [
            callback
            for callback in self._callbacks
            if getattr(getattr(callback, method), "__func__", None) is not default
        ]
        if not callbacks:
            return
        context = FitContext(**self._settings, **where, _control=self)
        for callback in callbacks:
            try:
                getattr(callback, method)(context)
            except Exception as error:
                at = f", epoch {context.epoch}" if context.epoch else ""
                at += f", step {context.step}" if context.step else ""
                raise TrainingError(
                    f"Callback {type(callback).__name__} failed in {method}{at} on rank {context.rank}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def end_epoch(self, record: EpochRecord) -> None:
        """Process the record of an epoch, after its validation; :meth:`agree_to_stop` follows."""
        self._last = record
        if self.best is not None:
            self.best.offer(record)
        self.call("on_epoch_end", epoch=record.epoch, record=record)
        if self._stopping is not None:
            self._stopping.observe(record)

    def agree_to_stop(self) -> None:
        """Decide whether the fit ends after this epoch. Collective if it may end early.

        It ends if any rank wants to stop, even if the values of the ranks differ by rounding.
        """
        if not self._callbacks and self._stopping is None:
            return
        wish = self.wants_to_stop or (self._stopping is not None and self._stopping.is_over)
        wishes = np.array([wish], np.int64)
        if self._communicator.world_size > 1:
            self._communicator.allreduce(wishes, op="max")
        self.has_ended = bool(wishes[0])

    def end(self) -> int:
        """End the fit: restore the best weights if they are kept; return the epoch that rank 0's weights are from."""
        assert self._last is not None, "a fit has an epoch"
        best = None if self.best is None else self.best.restore()
        epoch = self._last.epoch if best is None else best
        self.call("on_fit_end", epoch=self._last.epoch, record=self._last, model_epoch=epoch)
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from; rank 0's state is used on every rank.

        A request to stop is not part of it, as it is a state of the rank.
        """
        parts = {"best": self.best, "stopping": self._stopping}
        return {
            **{name: part.state_dict() for name, part in parts.items() if part is not None},
            "callbacks": [callback.state_dict() for callback in self._callbacks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned on rank 0; parts that are missing there start fresh.

        So do all callbacks if their number has changed.
        """
        for name, part in (("best", self.best), ("stopping", self._stopping)):
            if part is not None and name in state:
                part.load_state_dict(state[name])
        if len(state["callbacks"]) == len(self._callbacks):
            for callback, part in zip(self._callbacks, state["callbacks"], strict=True):
                callback.load_state_dict(part)
