"""Progress events of rank 0, at a bounded rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from sparkdl.training.history import EpochMeter, EpochRecord

Report: TypeAlias = Callable[[dict[str, Any]], None]


class ProgressReporter:
    """Turns steps and epochs into events, of the kinds that follow. Runs on a *rank*.

    The first of a fit that goes on from a checkpoint is ``"resumed"`` and holds ``epoch, epochs, step``; a
    ``"restored"`` one for each epoch that it had finished has what an ``"epoch"`` event has. A ``"step"`` event
    holds ``epoch, epochs, step, steps, loss, rows_per_s, eta_s``; an epoch event the fields of
    :class:`~sparkdl.training.history.EpochRecord` and ``epochs``. Epochs and steps count from 1. The first step,
    in which everything warms up, says nothing about the rate: ``eta_s`` is None until there is another.
    """

    def __init__(
        self,
        report: Report,
        *,
        epochs: int,
        steps_per_epoch: int,
        interval_s: float = 0.25,
        went_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with the first epoch.

        Args:
            report: takes the events.
            epochs: how many there will be.
            steps_per_epoch: how many steps each has.
            interval_s: least time between two events of steps.
            went_on: called after each step.
        """
        self._report = report
        self._went_on = went_on
        self._epochs = epochs
        self._steps = steps_per_epoch
        self._interval_s = interval_s
        self._started = time.perf_counter()
        self._next_at = self._started
        self._rows = 0
        self._steps_before = 0
        self._warm_since: float | None = None

    def resume(self, *, epoch: int, steps: int, history: Sequence[EpochRecord] = ()) -> None:
        """Begin in an epoch after so many of its steps, and the epochs before it: they took none of our time."""
        self._steps_before = (epoch - 1) * self._steps + steps
        if self._steps_before:
            self._report({"kind": "resumed", "epoch": epoch, "epochs": self._epochs, "step": steps})
        for record in history:
            self._report({"kind": "restored", "epochs": self._epochs, **asdict(record)})

    def step(self, *, epoch: int, step: int, rows: int, meter: EpochMeter) -> None:
        """Count a step of ``rows`` rows over all ranks and report it when the last report is old enough."""
        self._went_on()
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
            eta_s = elapsed / max(1, done - self._steps_before - 1) * (self._epochs * self._steps - done)
        if now < self._next_at:
            return
        self._next_at = now + self._interval_s
        self._report(
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
        """Report the end of an epoch, always."""
        self._report({"kind": "epoch", "epochs": self._epochs, **asdict(record)})
