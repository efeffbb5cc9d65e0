"""The history of a fit: the record of each epoch, and the progress events of rank 0 at a limited rate.

The losses of an epoch are added up on each rank without waiting for the device; their sum stays on the device until
it is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import truediv
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sparkdl.collective import Communicator, WorldReport
    from sparkdl.training.metrics import EpochMetrics


class LossSum:
    """Adds up losses in double precision, as thousands of steps need more digits than float32 has.

    MPS has no float64; CPU and CUDA do.

    Args:
        device: device of the model.

    Attributes:
        total: weighted sum of the losses: a float64 tensor on the device, so that no step waits for it; on CPU a
            number, which takes less time.
        weight: sum of the weights; ``total / weight`` is the mean loss.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_cpu = device.type == "cpu"
        self.total: Tensor | float = (
            0.0 if self._is_on_cpu else torch.zeros((), dtype=torch.float64, device=device)
        )
        self.weight = 0.0

    def add(self, mean: Tensor, weight: float) -> None:
        """Add the detached mean loss of a batch and the weight of its rows."""
        if weight > 0:  # the mean over nothing may be NaN
            self.total += (float(mean) if self._is_on_cpu else mean.to(torch.float64)) * weight
        self.weight += weight

    def load(self, total: float, weight: float) -> None:
        """Continue from a sum and its weight."""
        if isinstance(self.total, Tensor):
            self.total.fill_(total)
        else:
            self.total = total
        self.weight = weight


AnyBatch = TypeVar("AnyBatch")


@dataclass(frozen=True, kw_only=True)
class RankSeconds:
    """How one rank spent the training of an epoch.

    Attributes:
        reading: seconds spent waiting for batches of the feed.
        communicating: seconds spent blocked in operations of the communicator or waiting for them to end. On a GPU the
            work is queued, and the time that the host waits for it at the end counts as computing.
        computing: all other seconds: forward and backward passes, updates, metrics, callbacks.
    """

    reading: float
    communicating: float
    computing: float


_LOGGED = {"is_logged": True}
"""Marks the fields of an :class:`EpochRecord` that are logged to MLflow."""


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One epoch over all ranks.

    Attributes:
        epoch: number of the epoch, from 1.
        loss: mean training loss over the epoch's rows (per row also for a loss that sums).
        rows: rows seen by all ranks together.
        seconds: time the epoch took on the slowest rank.
        rows_per_s: ``rows / seconds``.
        data_wait_share: share of the time in which training waited for the feed, from 0 to 1, on average over the
            ranks.
        learning_rate: learning rate of the optimizer's first parameter group in the epoch's last update.
        metrics: values of the metrics, by name: metrics of the training rows, computed with the model as it was in each
            step, ``val_loss``, and metrics of the validation rows after the epoch, their names prefixed with ``val_``.
        validation_s: seconds that the validation took, in addition to ``seconds``, on average over the ranks; None
            without validation.
        rank_seconds: how each rank spent its time in the training.
        rank_rows: number of rows of each rank in a full step at the end of the epoch, if rows are divided by the speed
            of the ranks; empty otherwise.
    """

    epoch: int
    loss: float = field(metadata=_LOGGED)
    rows: int
    seconds: float = field(metadata=_LOGGED)
    rows_per_s: float = field(metadata=_LOGGED)
    data_wait_share: float = field(metadata=_LOGGED)
    learning_rate: float = field(metadata=_LOGGED)
    metrics: Mapping[str, float] = field(default_factory=dict)
    validation_s: float | None = field(default=None, metadata=_LOGGED)
    rank_seconds: tuple[RankSeconds, ...]
    rank_rows: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> EpochRecord:
        """Restore a record from the dict that :func:`dataclasses.asdict` made of it, also after a JSON round trip.

        Other entries of the dict, as an event has them, are ignored.
        """
        own = {entry.name: content[entry.name] for entry in fields(cls) if entry.name in content}
        ranks = tuple(RankSeconds(**seconds) for seconds in content["rank_seconds"])
        rows = tuple(content.get("rank_rows", ()))
        return cls(**{**own, "rank_seconds": ranks, "rank_rows": rows})

    @property
    def logged(self) -> dict[str, float]:
        """Fields and metrics by the names that they have in MLflow: times and rates are ``system/epoch/...``."""
        fields = {name: getattr(self, name) for name in EPOCH_METRICS if getattr(self, name) is not None}
        return {
            **{
                name if name in _ABOUT_MODEL else f"{SYSTEM}epoch/{name}": float(fields[name])
                for name in fields
            },
            **self.metrics,
        }

    @property
    def values(self) -> dict[str, float]:
        """Loss and metrics by name, the loss first."""
        return {"loss": self.loss, **self.metrics}


_ABOUT_MODEL = ("loss", "learning_rate")

SYSTEM = "system/"
"""Prefix of the metrics in MLflow that are about the course of a fit and not about its model."""

EPOCH_METRICS = tuple(field.name for field in fields(EpochRecord) if field.metadata == _LOGGED)
"""Fields of an :class:`EpochRecord` that are logged to MLflow besides the metrics; metrics cannot have these names."""


@dataclass(frozen=True)
class FitOutcome:
    """Result of training on one rank; rank 0 sends it to the driver.

    Attributes:
        module: result of the function ``keep`` of :func:`~sparkdl.training.trainer.train`: the trained module.
        history: one record per epoch, equal on all ranks.
        model_epoch: number of the epoch that rank 0's weights are from: the best epoch if the fit keeps its weights,
            else the last one. Ranks that do not keep the best weights have those of the last epoch.
        losses: learning rate and loss of each update of a range test; empty for other fits.
        communication: communication report of all ranks; None if it was not requested.
    """

    module: Any
    history: tuple[EpochRecord, ...]
    model_epoch: int
    losses: tuple[tuple[float, float], ...] = ()
    communication: WorldReport | None = None


def join_meter_states(states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Join the meter states of another number of ranks into the state from which a rank's meter continues.

    Rank 0 gets the sums of all ranks. Every rank gets the elapsed time of the slowest rank, the mean waiting times, and
    what the ranks had added up together.
    """
    totals = {name: sum(state[name] for state in states) for name in ("loss_sum", "weight", "rows")}
    shared = max((state["shared"] for state in states), key=lambda of: float(of[2]))
    metrics = [metric for state in states for metric in state["metrics"]]
    return {
        **(totals if rank == 0 else dict.fromkeys(totals, 0.0)),
        "metrics": metrics if rank == 0 else [],
        **{name: sum(state[name] for state in states) / len(states) for name in ("waited_s", "blocked_s")},
        "elapsed_s": max(state["elapsed_s"] for state in states),
        "shared": shared,
    }


class EpochMeter:
    """Adds up one epoch of one rank; the sum of the losses stays on the device until it is read.

    Args:
        epoch: number of the epoch, from 1.
        device: device of the model.
        communicator: communicator of all ranks.
        metrics: metrics of the epoch.

    Attributes:
        waited_s: seconds that this rank has waited for data.
    """

    def __init__(
        self,
        epoch: int,
        device: torch.device,
        communicator: Communicator,
        metrics: EpochMetrics,
    ) -> None:
        self._epoch = epoch
        self._communicator = communicator
        self.metrics = metrics
        self._blocked_before_s = blocked_s(communicator)
        self._loss = LossSum(device)
        self._rows = 0
        self._shared = np.zeros(3)
        """Sum of the losses, weight and rows of all ranks that :meth:`share` has added up."""
        self.waited_s = 0.0
        self._started = time.perf_counter()

    def time_waits(self, batches: Iterable[AnyBatch]) -> Iterator[AnyBatch]:
        """Yield the batches, and count the time until each is available as time spent waiting for data."""
        iterator = iter(batches)
        while True:
            started = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.waited_s += time.perf_counter() - started
            yield batch

    def add(self, loss_mean: Tensor, weight: float, rows: int) -> None:
        """Add one step: the detached mean loss of this rank's rows, their weight, and their number."""
        self._loss.add(loss_mean, weight)
        self._rows += rows

    def share(self, further: float) -> float:
        """Replace the sums of each rank by those of all ranks, so that a lost rank takes nothing away. Collective.

        Args:
            further: a number of this rank that is summed in the same exchange.

        Returns:
            The sum of the further numbers of all ranks.
        """
        sums = np.array([float(self._loss.total), self._loss.weight, self._rows, further])
        if self._communicator.world_size > 1:
            self._communicator.allreduce(sums, op="sum", name="meters of ranks")
        self._shared += sums[:3]
        self._loss.load(0.0, 0.0)
        self._rows = 0
        return float(sums[3])

    def running_loss(self) -> float:
        """Return the mean loss of this rank's rows of the epoch so far, waiting for the device; NaN before any row.

        Steps whose sums the ranks have shared count with the rows of all ranks.
        """
        weight = self._loss.weight + self._shared[1]
        return (float(self._loss.total) + self._shared[0]) / weight if weight else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has added up so far, waiting for the device."""
        return {
            "loss_sum": float(self._loss.total),
            "weight": self._loss.weight,
            "rows": self._rows,
            "waited_s": self.waited_s,
            "blocked_s": blocked_s(self._communicator) - self._blocked_before_s,
            "elapsed_s": time.perf_counter() - self._started,
            "metrics": [self.metrics.state_dict()],
            "shared": self._shared.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self._loss.load(state["loss_sum"], state["weight"])
        self._rows = int(state["rows"])
        self.waited_s = state["waited_s"]
        self._blocked_before_s = blocked_s(self._communicator) - state["blocked_s"]
        self._started = time.perf_counter() - state["elapsed_s"]
        self._shared = np.array(state["shared"])
        self.metrics.load_state_dicts(state["metrics"])

    def close(self, *, learning_rate: float, rank_rows: Sequence[int] = ()) -> EpochRecord:
        """Return the record of the epoch over all ranks. Collective: every rank calls it.

        It takes one allreduce, and the exchange of states that metrics need.

        Args:
            learning_rate: learning rate to put into the record.
            rank_rows: rows of the ranks to put into the record.
        """
        loss_of_rank = float(self._loss.total)  # waits for the device
        elapsed = time.perf_counter() - self._started
        # Each rank fills entries of its own, so that the sum holds the times of all ranks.
        world_size, rank = self._communicator.world_size, self._communicator.rank
        times = [0.0] * (3 * world_size)
        blocked = blocked_s(self._communicator) - self._blocked_before_s
        times[3 * rank : 3 * rank + 3] = [self.waited_s, blocked, elapsed]
        metrics, totals = self.metrics.close(
            self._communicator, loss_of_rank, self._loss.weight, self._rows, *times
        )
        loss_sum, weight, rows, *times = totals
        shared_loss, shared_weight, shared_rows = self._shared.tolist()
        loss_sum, weight, rows = loss_sum + shared_loss, weight + shared_weight, rows + shared_rows
        waited, blocked_of_ranks, elapsed_of_ranks = times[::3], times[1::3], times[2::3]
        duration = max(elapsed_of_ranks)
        return EpochRecord(
            epoch=self._epoch,
            loss=loss_sum / weight if weight else float("nan"),
            rows=round(rows),
            seconds=duration,
            rows_per_s=rows / duration,
            data_wait_share=sum(map(truediv, waited, elapsed_of_ranks)) / world_size,
            learning_rate=learning_rate,
            metrics=metrics,
            rank_seconds=tuple(
                RankSeconds(reading=read, communicating=sent, computing=max(0.0, spent - read - sent))
                for read, sent, spent in zip(waited, blocked_of_ranks, elapsed_of_ranks, strict=True)
            ),
            rank_rows=tuple(rank_rows),
        )


def blocked_s(communicator: Communicator) -> float:
    """Return the seconds that the process has been blocked in communication so far; 0 with one rank."""
    if communicator.world_size == 1:
        return 0.0
    return sum(operation.exposed_s for operation in communicator.report().operations)


Report: TypeAlias = Callable[[dict[str, Any]], None]


_REPORT_EVERY_S = 0.25
"""Minimum time between two ``"step"`` events."""


class ProgressReporter:
    """Turns steps and epochs into events. Runs on a *rank*.

    The first event of a resumed fit is of kind ``"resumed"`` and holds ``epoch, epochs, step``. For each epoch that
    the fit had finished, a ``"restored"`` event follows, with the fields of an ``"epoch"`` event. A ``"step"``
    event holds ``epoch, epochs, step, steps, loss, rows_per_s, eta_s``; an ``"epoch"`` event the fields of
    :class:`~sparkdl.training.history.EpochRecord`, ``epochs`` and ``eta_s``; a ``"straggler"`` event holds
    ``slow_rank`` and ``ratio``. Epochs and steps count from 1. The first step includes warm-up and says nothing
    about the rate: ``eta_s`` is None until a second step is done.

    Attributes:
        report: function that is called with each event.
    """

    def __init__(
        self,
        report: Report,
        *,
        epochs: int,
        steps_per_epoch: int,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with the first epoch.

        Args:
            report: function that is called with each event.
            epochs: number of epochs of the fit.
            steps_per_epoch: number of steps of an epoch.
            on_step: function that is called after each step.
        """
        self.report = report
        self._on_step = on_step
        self._epochs = epochs
        self._steps = steps_per_epoch
        self._started = time.perf_counter()
        self._next_at = self._started
        self._rows = 0
        self._steps_before = 0
        self._warm_since: float | None = None

    def resume(
        self, *, epoch: int, steps: int, history: Sequence[EpochRecord] = (), is_restart: bool = True
    ) -> None:
        """Begin in an epoch after ``steps`` of its steps; earlier steps and epochs do not count in the time.

        Args:
            epoch: number of the epoch, from 1.
            steps: number of its steps that are done.
            history: records of the epochs before.
            is_restart: whether the fit resumes from a checkpoint, which is reported as such.
        """
        self._steps_before = (epoch - 1) * self._steps + steps
        if self._steps_before and is_restart:
            self.report({"kind": "resumed", "epoch": epoch, "epochs": self._epochs, "step": steps})
        for record in history:
            self.report({"kind": "restored", "epochs": self._epochs, **asdict(record)})

    def step(self, *, epoch: int, step: int, rows: int, meter: EpochMeter) -> None:
        """Count a step of ``rows`` rows over all ranks, and report it if the last report is old enough."""
        self._on_step()
        now = time.perf_counter()
        done = (epoch - 1) * self._steps + step
        elapsed = now - (self._warm_since or self._started)
        eta_s = None
        if self._warm_since is None:
            self._warm_since = now
            rate = rows / elapsed if elapsed > 0 else 0.0
        else:
            self._rows += rows
            rate = self._rows / elapsed if elapsed > 0 else 0.0
            eta_s = self._remaining_s(done, now)
        if now < self._next_at:
            return
        self._next_at = now + _REPORT_EVERY_S
        self.report(
            {
                "kind": "step",
                "epoch": epoch,
                "epochs": self._epochs,
                "step": step,
                "steps": self._steps,
                "loss": meter.running_loss(),
                "rows_per_s": rate,
                "eta_s": eta_s,
            }
        )

    def epoch(self, record: EpochRecord) -> None:
        """Report the end of an epoch, however recent the last report is."""
        eta_s = self._remaining_s(record.epoch * self._steps, time.perf_counter())
        self.report({"kind": "epoch", "epochs": self._epochs, "eta_s": eta_s, **asdict(record)})

    def _remaining_s(self, done: int, now: float) -> float | None:
        """Seconds that the steps after the first ``done`` ones will take; None before the second step of this process.

        Validations that are over by now count in the time of a step.
        """
        after_first = done - self._steps_before - 1
        if self._warm_since is None or after_first < 1:
            return None
        return (now - self._warm_since) / after_first * (self._epochs * self._steps - done)
