"""Where the events of a fit go: the progress line and the run of MLflow. Runs on the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdl.estimators.validation_mixins import EPOCH_METRICS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.estimators.progress import ProgressLine
    from sparkdl.tracking import FitRun


class FitListener:
    """Hands the events of rank 0 to the progress line and the run.

    Args:
        run: of MLflow.
        progress: line.

    Attributes:
        progress: of the fit.
    """

    def __init__(self, run: FitRun, progress: ProgressLine) -> None:
        self._run = run
        self._tracked: set[int] = set()
        self.progress = progress

    def hear(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take an event of :class:`~sparkdl.training.progress.ProgressReporter`."""
        del rank  # only rank 0 reports
        self.progress.update(event)
        # A fit that was restarted has the epochs before in its run already.
        if event.get("kind") == "epoch" or (
            event.get("kind") == "restored" and event["epoch"] not in self._tracked
        ):
            self.track(event)

    def track(self, record: Mapping[str, Any]) -> None:
        """Tell the run of an epoch, by the fields of its record."""
        known = {name: float(record[name]) for name in EPOCH_METRICS if record[name] is not None}
        self._run.log_epoch(int(record["epoch"]), {**known, **record["metrics"]})
        self._tracked.add(record["epoch"])

    def log(self, rank: int, line: str) -> None:
        """Show a line that a rank has printed."""
        self.progress.print(f"[rank {rank}] {line}")
