"""Where the events of a fit go: the progress line and the run of MLflow. Runs on the *driver*."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sparkdl.estimators.validation_mixins import EPOCH_METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sparkdl.estimators.progress import ProgressLine
    from sparkdl.tracking import FitRun


class FitListener:
    """Hands the events of rank 0 to the progress line and the run.

    A fit that was restarted comes to the epochs after its checkpoint again, and the run, which keeps all that it is
    told, has each of them once. Only a loss or metric that has become another one, as on fewer ranks, is told again:
    what MLflow shows of an epoch is what came later, and so what the model comes from. Durations and rates stay those
    of the first time.

    Args:
        run: of MLflow.
        progress: line.
        check: is called with each event, and ends the fit by what it raises.

    Attributes:
        progress: of the fit.
    """

    def __init__(self, run: FitRun, progress: ProgressLine, check: Callable[[], object]) -> None:
        self._run, self._check = run, check
        self._tracked: dict[int, dict[str, float]] = {}
        self.progress = progress

    def hear(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take an event of :class:`~sparkdl.training.progress.ProgressReporter`."""
        del rank  # only rank 0 reports
        self._check()
        self.progress.update(event)
        if event.get("kind") in ("epoch", "restored"):
            self.track(event)

    def track(self, record: Mapping[str, Any]) -> None:
        """Tell the run of an epoch, by the fields of its record, unless it knows."""
        epoch = int(record["epoch"])
        learned = {"loss": float(record["loss"]), **record["metrics"]}
        told = self._tracked.get(epoch)
        if told is None:
            known = {name: float(record[name]) for name in EPOCH_METRICS if record[name] is not None}
            self._run.log_epoch(epoch, {**known, **record["metrics"]})
        elif others := {
            name: value for name, value in learned.items() if not _is_same(value, told.get(name))
        }:
            self._run.log_epoch(epoch, others)
        self._tracked[epoch] = learned

    def log(self, rank: int, line: str) -> None:
        """Show a line that a rank has printed."""
        self.progress.print(f"[rank {rank}] {line}")


def _is_same(value: float, told: float | None) -> bool:
    return value == told or (told is not None and math.isnan(value) and math.isnan(told))
