"""Where the events of a fit go: the progress line and the run of MLflow. Runs on the *driver*."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from sparkdl.estimators.validation_mixins import EPOCH_METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sparkdl.estimators.progress import ProgressLine
    from sparkdl.tracking import FitRun

_LEAST_INTERVAL_S = 1.0
_SHARE_OF_FIT = 1 / 300


class StepSampler:
    """Which steps MLflow is told of: one a second at first, and ever fewer, so that a week makes some 4,000 of them."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._next_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether a step that ends now is told of; ``now`` in seconds of any clock that goes on."""
        if self._started is None:
            self._started = self._next_at = now
        if now < self._next_at:
            return False
        self._next_at = now + max(_LEAST_INTERVAL_S, (now - self._started) * _SHARE_OF_FIT)
        return True


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
        self._sampler = StepSampler()
        self._num_samples: dict[str, int] = {}
        self.progress = progress

    def hear(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take an event of :class:`~sparkdl.training.history.ProgressReporter`, or of a host's watch."""
        del rank  # what concerns a host names it
        self._check()
        self.progress.update(event)
        kind = event.get("kind")
        if kind in ("epoch", "restored"):
            self.track(event)
        elif kind == "step" and self._sampler.is_due(time.monotonic()):
            self._track_step(event)
        elif kind == "system":
            self._track_host(event["metrics"])

    def track(self, record: Mapping[str, Any]) -> None:
        """Tell the run of an epoch, by the fields of its record, unless it knows."""
        epoch = int(record["epoch"])
        learned = {"loss": float(record["loss"]), **record["metrics"]}
        told = self._tracked.get(epoch)
        if told is None:
            known = {name: float(record[name]) for name in EPOCH_METRICS if record[name] is not None}
            self._tell(epoch, {**known, **record["metrics"]})
        elif others := {
            name: value for name, value in learned.items() if not _is_same(value, told.get(name))
        }:
            self._tell(epoch, others)
        self._tracked[epoch] = learned

    def _tell(self, epoch: int, metrics: Mapping[str, float]) -> None:
        if epoch % max(1, self._run.switches.every_n_iter) == 0:
            self._run.log_metrics(epoch, metrics)

    def _track_host(self, metrics: Mapping[str, float]) -> None:
        """Tell of a host, by its samples' number in this fit: its ranks begin anew at a restart."""
        host = next(iter(metrics), "").rpartition("/")[0]
        number = self._num_samples.get(host, 0)
        self._num_samples[host] = number + 1
        self._run.log_metrics(number, metrics)

    def _track_step(self, event: Mapping[str, Any]) -> None:
        step = (int(event["epoch"]) - 1) * int(event["steps"]) + int(event["step"])
        self._run.log_metrics(
            step, {"step/loss": float(event["loss"]), "step/rows_per_s": float(event["rows_per_s"])}
        )

    def log(self, rank: int, line: str) -> None:
        """Show a line that a rank has printed."""
        self.progress.print(f"[rank {rank}] {line}")


def _is_same(value: float, told: float | None) -> bool:
    return value == told or (told is not None and math.isnan(value) and math.isnan(told))
