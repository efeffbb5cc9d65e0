"""The progress of a fit: a bar in a terminal or a notebook, lines of text or JSON, and metrics of an MLflow run."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TextIO

from sparkdl.estimators.summary import html_table, rows_of_epochs
from sparkdl.foreign_errors import needing
from sparkdl.launch import AlikeLines
from sparkdl.topology import name_ranks
from sparkdl.training.history import SYSTEM, EpochRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sparkdl.estimators.fit.bar import FitBar
    from sparkdl.monitor.board import Board
    from sparkdl.tracking import FitRun


def is_in_notebook() -> bool:
    """Whether this process is a notebook kernel, such as Jupyter's or Databricks'; IPython in a terminal is not."""
    library = sys.modules.get("IPython")  # a kernel has imported it
    shell = library.get_ipython() if library is not None else None
    return getattr(shell, "kernel", None) is not None


_PLAIN_INTERVAL_S = 10.0


class FitProgress:
    """Writes what happens in a fit to a stream, as lines of text. Runs on the *driver*.

    Args:
        stream: stream to write to.
        is_shown: whether to show progress; lines of ranks and those given to :meth:`print` are written in any case.
    """

    def __init__(self, stream: TextIO, *, is_shown: bool = True) -> None:
        self._stream, self._is_shown = stream, is_shown
        self._written_at = time.monotonic()

    def update(self, event: Mapping[str, Any]) -> None:
        """Show an event of rank 0 (:mod:`sparkdl.training.history`); kinds without a text are ignored."""
        if not self._is_shown:
            return
        kind = event.get("kind")
        if kind == "step":
            self._show_step(event)
        elif kind == "epoch":
            self._show_epoch(event)
        elif kind == "layout":
            self.print(f"the planner chooses {event['code']}: {event['reason']}")
        elif kind == "resumed":
            epoch, epochs, step = event["epoch"], event["epochs"], event["step"]
            after = f" after step {step}" if step else ""
            self.print(
                f"the checkpoint has all {epochs} epochs done"
                if epoch > epochs
                else f"continuing from a checkpoint: epoch {epoch}/{epochs}{after}"
            )

    def status(self, text: str) -> None:
        """Show the current phase of the fit, before and after the steps."""
        if self._is_shown:
            self.print(text)

    def print(self, text: str) -> None:
        """Write a line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def log(self, ranks: Sequence[int], line: str) -> None:
        """Show a line that ranks have printed."""
        self.print(f"[{name_ranks(ranks)}] {line}")

    def close(self) -> None:
        """End the last line."""

    def _show_step(self, event: Mapping[str, Any]) -> None:
        if time.monotonic() - self._written_at >= _PLAIN_INTERVAL_S:
            step = f"step {event['step']}/{event['steps']}"
            self.print(f"epoch {event['epoch']}/{event['epochs']}  {step}  {_step_text(event)}")
            self._written_at = time.monotonic()

    def _show_epoch(self, event: Mapping[str, Any]) -> None:
        texts = [
            f"epoch {event['epoch']}/{event['epochs']}",
            *_values(event),
            f"{event['rows_per_s']:,.0f} rows/s",
            f"{event['seconds']:.1f} s",
            f"{event['data_wait_share']:.0%} waiting for data",
            *_eta(event),
        ]
        self.print("  ".join(texts))
        self._written_at = time.monotonic()


class BarProgress(FitProgress):
    """Shows one bar, with the loss and the metrics of the last epoch: in a terminal, or in a notebook's cell.

    A terminal has a line per epoch above the bar, a notebook a table of the last epochs below it.
    """

    def __init__(self, stream: TextIO, *, in_notebook: bool) -> None:
        super().__init__(stream)
        self._in_notebook = in_notebook
        self._bar: FitBar | None = None
        self._records: list[EpochRecord] = []
        self._steps = 1
        self._metrics: list[str] = []

    def status(self, text: str) -> None:
        """Show the current phase of the fit."""
        if self._bar is None:
            with needing("showProgress", "data", "tqdm"):
                from sparkdl.estimators.fit.bar import FitBar  # few fits are watched

            self._bar = FitBar(self._stream, text, in_notebook=self._in_notebook)
        else:
            self._bar.show_text(text)

    def print(self, text: str) -> None:
        """Write a line that stays."""
        if self._bar is None:
            super().print(text)
        else:
            self._bar.print(text)

    def close(self) -> None:
        """Leave the bar with the values of the last epoch."""
        if self._bar is not None:
            if self._records:
                last = self._records[-1]
                seconds = sum(record.seconds + (record.validation_s or 0.0) for record in self._records)
                self._bar.show_text("  ".join([*_values(asdict(last)), _duration(seconds)]))
            self._bar.close()

    def _show_step(self, event: Mapping[str, Any]) -> None:
        self._steps = event["steps"]
        done = (event["epoch"] - 1) * event["steps"] + event["step"]
        self._move(event, done, "  ".join([_step_text(event), *self._metrics]))

    def _show_epoch(self, event: Mapping[str, Any]) -> None:
        if not self._in_notebook:
            super()._show_epoch(event)
        record = EpochRecord.from_dict(event)
        self._records = [*(known for known in self._records if known.epoch < record.epoch), record]
        self._metrics = _values(event)[1:]
        text = "  ".join([*_eta(event), *_values(event), f"{record.rows_per_s:,.0f} rows/s"])
        self._move(event, record.epoch * self._steps, text)

    def _move(self, event: Mapping[str, Any], done: int, text: str) -> None:
        if self._bar is None:
            self.status("")
        assert self._bar is not None
        table = html_table(rows_of_epochs(self._records), most=_EPOCHS_BELOW) if self._records else ""
        total = event["epochs"] * self._steps
        self._bar.show_steps(done, total, f"epoch {event['epoch']}/{event['epochs']}", text, table)


class JsonProgress(FitProgress):
    """Writes a JSON object per line, for programs that read the log of a job.

    Each has ``time`` (UTC) and ``event``: ``status`` and ``line`` have a ``text``, ``log`` has ``ranks`` and a
    ``line``, and events of rank 0 have their fields, ``step`` every ten seconds. Numbers that are not finite are null.
    """

    def update(self, event: Mapping[str, Any]) -> None:
        """Write an event of rank 0."""
        kind = event.get("kind")
        if not self._is_shown or kind not in _EVENTS:
            return
        if kind == "step" and time.monotonic() - self._written_at < _PLAIN_INTERVAL_S:
            return
        self._written_at = time.monotonic()
        self.write(str(kind), **{name: value for name, value in event.items() if name != "kind"})

    def status(self, text: str) -> None:
        """Write the current phase of the fit."""
        if self._is_shown:
            self.write("status", text=text)

    def print(self, text: str) -> None:
        """Write a text."""
        self.write("line", text=text)

    def log(self, ranks: Sequence[int], line: str) -> None:
        """Write a line that ranks have printed."""
        self.write("log", ranks=list(ranks), line=line)

    def write(self, event: str, **content: Any) -> None:
        """Write an object of any kind."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        written = json.dumps({"time": now, "event": event, **finite(content)})
        self._stream.write(f"{written}\n")
        self._stream.flush()


_EVENTS = ("step", "epoch", "restored", "resumed", "layout", "world", "straggler")
_EPOCHS_BELOW = 12
"""Most epochs in the table below a notebook's bar."""


def open_progress(*, is_shown: bool, log_format: str = "text") -> FitProgress:
    """Return the progress of a fit: a bar in a terminal and in a notebook, lines on any other stream.

    Args:
        is_shown: whether to show progress.
        log_format: ``"text"``, or ``"json"`` for a JSON object per line on any stream.
    """
    if log_format == "json":
        return JsonProgress(sys.stderr, is_shown=is_shown)
    if is_in_notebook():
        # Notebooks show stderr in red.
        return (
            BarProgress(sys.stdout, in_notebook=True) if is_shown else FitProgress(sys.stdout, is_shown=False)
        )
    if is_shown and _has_columns(sys.stderr):
        return BarProgress(sys.stderr, in_notebook=False)
    return FitProgress(sys.stderr, is_shown=is_shown)


def _has_columns(stream: TextIO) -> bool:
    """Whether a stream is a terminal that knows its width, without which there is no bar."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):  # such as a stream in memory
        return False


def _step_text(event: Mapping[str, Any]) -> str:
    return "  ".join([*_eta(event), f"loss {event['loss']:.4f}", f"{event['rows_per_s']:,.0f} rows/s"])


def _values(event: Mapping[str, Any]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in {"loss": event["loss"], **event["metrics"]}.items()]


def _eta(event: Mapping[str, Any]) -> list[str]:
    """The time that the fit will still take, if it is known and not over."""
    return [f"ETA {_duration(event['eta_s'])}"] if event.get("eta_s") else []


def finite(value: Any) -> Any:
    """Return a value for JSON, in which None replaces numbers that are not finite."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _duration(seconds: float) -> str:
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


_LEAST_INTERVAL_S = 1.0
_SHARE_OF_FIT = 1 / 300


class StepSampler:
    """Selects the steps that are logged to MLflow: one per second at first, then fewer, about 4,000 in a week."""

    _started: float | None = None
    _next_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether a step that ends now is logged; ``now`` is in seconds of any monotonic clock."""
        if self._started is None:
            self._started = self._next_at = now
        if now < self._next_at:
            return False
        self._next_at = now + max(_LEAST_INTERVAL_S, (now - self._started) * _SHARE_OF_FIT)
        return True


class FitListener:
    """Passes the events of rank 0 to the progress and the MLflow run.

    A restarted fit repeats the epochs after its checkpoint, and MLflow keeps every value that is logged, so each epoch
    is logged only once. A loss or metric that has changed, as may happen on fewer ranks, is logged again: MLflow shows
    the later value, which is the value of the returned model. Durations and rates are logged only the first time.

    Args:
        run: MLflow run of the fit; None if the fit is not tracked.
        progress: progress of the fit.
        check: function that is called at each event; an exception that it raises ends the fit.
        on_epoch: function of the user that is called once for each epoch, with its record; an exception that it raises
            ends the fit; None for no function.
        on_position: function that is called with words about where the fit is, when an epoch begins or ends.

    Attributes:
        progress: progress of the fit.
        board: board of the fit's monitor; None without one.
        log: function that is called with rank and line for each line that a rank has printed.
        worlds: an entry for each world that the ranks of an elastic fit have formed so far: its number and its ranks;
            how many ranks were lost, and how often the same ranks met again, before it; and the seconds since the
            first world began.
    """

    def __init__(
        self,
        run: FitRun | None,
        progress: FitProgress,
        check: Callable[[], object],
        on_epoch: Callable[[EpochRecord], object] | None = None,
        on_position: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._run, self._check, self._on_epoch, self._on_position = run, check, on_epoch, on_position
        self._position = ""
        self.board: Board | None = None
        self._tracked: dict[int, dict[str, float]] = {}
        self._sampler = StepSampler()
        self._num_samples: dict[str, int] = {}
        self.progress = progress
        self.log = AlikeLines(progress.log)
        self.worlds: list[dict[str, float]] = []
        self._first_world_at = 0.0
        self._num_stragglers = 0

    def handle_event(self, rank: int, event: Mapping[str, Any]) -> None:
        """Handle an event of :class:`~sparkdl.training.history.ProgressReporter` or of a host watch."""
        del rank  # events of a host name the host
        self._check()
        self.progress.update(event)
        if self.board is not None:
            self.board.handle(event)
        kind = event.get("kind")
        if kind in ("step", "epoch"):
            self._note_position(event)
        if kind in ("epoch", "restored"):
            is_new = int(event["epoch"]) not in self._tracked
            self.track(event)
            if kind == "epoch" and is_new and self._on_epoch is not None:
                on_epoch, self._on_epoch = self._on_epoch, None  # not again while an exception ends the ranks
                on_epoch(EpochRecord.from_dict(event))
                self._on_epoch = on_epoch
        elif kind == "step" and self._sampler.is_due(time.monotonic()):
            step = (int(event["epoch"]) - 1) * int(event["steps"]) + int(event["step"])
            values = {
                "step_loss": float(event["loss"]),
                f"{SYSTEM}step/rows_per_s": float(event["rows_per_s"]),
            }
            self.log_metrics(step, values)
        elif kind == "system":
            self._track_host(event["metrics"])
        elif kind == "layout" and self._run is not None:
            self._run.log_layout(event)
        elif kind == "world":
            self._track_world(event)
        elif kind == "straggler":
            self._num_stragglers += 1
            self.log_metrics(
                self._num_stragglers, {f"{SYSTEM}stragglers/rank_{event['slow_rank']}": float(event["ratio"])}
            )

    def track(self, record: Mapping[str, Any]) -> None:
        """Log the fields of an epoch's record to the run, unless they are logged already."""
        epoch = int(record["epoch"])
        learned = {"loss": float(record["loss"]), **record["metrics"]}
        logged = self._tracked.get(epoch)
        if logged is None:
            new = EpochRecord.from_dict(record).logged
        else:
            new = {
                name: value
                for name, value in learned.items()
                if value != logged.get(name) and not (math.isnan(value) and math.isnan(logged.get(name, 0)))
            }
        if new and self._run is not None and epoch % self._run.switches.every_n_iter == 0:
            self._run.log_metrics(epoch, new)
        self._tracked[epoch] = learned

    def _note_position(self, event: Mapping[str, Any]) -> None:
        is_over = event["kind"] == "epoch"
        number = min(event["epoch"] + is_over, event["epochs"])
        loss = f", loss {event['loss']:.4g}" if is_over else ""
        if self._position == (position := f"epoch {number}/{event['epochs']}") and not is_over:
            return
        self._position = position
        self._on_position(f"{position}{loss}")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics to the run, if the fit is tracked."""
        if self._run is not None:
            self._run.log_metrics(step, metrics)

    def _track_host(self, metrics: Mapping[str, float]) -> None:
        """Log a sample of a host, numbered over the whole fit; the ranks' own numbers begin again after a restart.

        The numbers begin at 1, because MLflow shows what a run has logged at step 0 as metrics of its models.
        """
        host = next(iter(metrics), "").rpartition("/")[0]
        number = self._num_samples[host] = self._num_samples.get(host, 0) + 1
        self.log_metrics(number, metrics)

    def _track_world(self, event: Mapping[str, Any]) -> None:
        if not self.worlds:
            self._first_world_at = time.monotonic()
        counts = {name: event[name] for name in ("ranks", "losses", "retries")}
        after_s = round(time.monotonic() - self._first_world_at, 3)
        self.worlds.append({"number": event["number"], "after_s": after_s, **counts})
        self.log_metrics(
            event["number"], {f"{SYSTEM}elastic/{name}": count for name, count in counts.items()}
        )
