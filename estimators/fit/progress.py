"""The progress of a fit: in a terminal, in a notebook, or as printed lines, and as metrics of an MLflow run.

A terminal shows one line that is overwritten, a notebook a progress bar in the cell's output, other streams get a few
lines. IPython is used only here.
"""

from __future__ import annotations

import html
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from sparkdl.training.history import EPOCH_METRICS, EpochRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sparkdl.monitor.board import Board
    from sparkdl.tracking import FitRun


def is_in_notebook() -> bool:
    """Whether this process is a notebook kernel, such as Jupyter's or Databricks'; IPython in a terminal is not."""
    library = sys.modules.get("IPython")  # a kernel has imported it
    shell = library.get_ipython() if library is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """A progress bar in the output of the running notebook cell; each update replaces the bar."""

    _handle: Any = None

    def show(self, text: str, share: float | None = None) -> None:
        """Show a text beside a bar.

        Args:
            text: one line of text.
            share: filled share of the bar, from 0 to 1; None if it is not known.
        """
        value = "" if share is None else f' value="{share:.4f}"'
        bar = f'<progress style="width: 16em"{value}></progress>'
        self._put({"text/plain": text, "text/html": f"{bar} <code>{html.escape(text)}</code>"})

    def close(self) -> None:
        """Remove the bar; printed lines stay."""
        if self._handle is not None:
            self._put({"text/plain": "", "text/html": ""})

    def _put(self, content: dict[str, str]) -> None:
        if self._handle is not None:
            self._handle.update(content, raw=True)
            return
        from IPython.display import display

        self._handle = display(content, raw=True, display_id=True)


_PLAIN_INTERVAL_S = 10.0
_CLEAR_TO_END = "\x1b[K"


class ProgressLine:
    """Writes the events of rank 0 (:mod:`sparkdl.training.history`) to a stream. Runs on the *driver*.

    With a local session, Spark draws its own progress bar over the same line, whenever a task starts or ends and once a
    minute. The line is therefore cleared at each update, and is visible again within a quarter of a second.

    Args:
        stream: stream to write to; None for stderr, or in a notebook for the output of the cell, with a progress bar. A
            terminal gets one line that is overwritten, any other stream a line per epoch and a line every ten seconds.
        is_shown: whether to show progress; texts given to :meth:`print` are written in any case.
    """

    def __init__(self, stream: TextIO | None = None, *, is_shown: bool = True) -> None:
        self._bar = NotebookBar() if stream is None and is_shown and is_in_notebook() else None
        if stream is None:
            stream = sys.stderr if self._bar is None else sys.stdout  # notebooks show stderr in red
        self._stream = stream
        self._is_terminal = self._stream.isatty()
        self._is_shown = is_shown
        self._written_at = time.monotonic()
        self._is_open = False

    def update(self, event: Mapping[str, Any]) -> None:
        """Show an event of kind ``"step"``, ``"epoch"``, ``"layout"`` or ``"resumed"``; others are ignored."""
        if not self._is_shown:
            return
        if event.get("kind") == "step":
            self._step(event)
        elif event.get("kind") == "layout":
            self.print(f"the planner chooses {event['code']}: {event['reason']}")
        elif event.get("kind") == "resumed":
            epoch, epochs, step = event["epoch"], event["epochs"], event["step"]
            if epoch > epochs:
                self.print(f"the checkpoint has all {epochs} epochs done")
            else:
                after = f" after step {step}" if step else ""
                self.print(f"continuing from a checkpoint: epoch {epoch}/{epochs}{after}")
        elif event.get("kind") == "epoch":
            text = (
                f"epoch {event['epoch']}/{event['epochs']}  loss {event['loss']:.4f}  "
                f"{event['rows_per_s']:,.0f} rows/s  {event['seconds']:.1f} s"
            )
            text += "".join(f"  {name} {value:.4f}" for name, value in event.get("metrics", {}).items())
            self.print(f"{text}  {event['data_wait_share']:.0%} waiting for data")
            self._written_at = time.monotonic()

    def status(self, text: str) -> None:
        """Show the current phase of the fit, before and after the steps."""
        if not self._is_shown:
            return
        if self._is_terminal or self._bar is not None:
            self._move(text)
        else:
            self.print(text)

    def print(self, text: str) -> None:
        """Write a line that stays, in place of the line that is overwritten."""
        self._stream.write(f"\r{text}{_CLEAR_TO_END}\n" if self._is_terminal else f"{text}\n")
        self._stream.flush()
        self._is_open = False

    def close(self) -> None:
        """End the current line of the stream, and remove a notebook's bar."""
        if self._bar is not None:
            self._bar.close()
        if self._is_open:
            self._stream.write("\n")
            self._stream.flush()
        self._is_open = False

    def _step(self, event: Mapping[str, Any]) -> None:
        text = (
            f"epoch {event['epoch']}/{event['epochs']}  step {event['step']}/{event['steps']}  "
            f"loss {event['loss']:.4f}  {event['rows_per_s']:,.0f} rows/s"
        )
        if event["eta_s"] is not None:
            text += f"  ETA {_duration(event['eta_s'])}"
        if self._is_terminal or self._bar is not None:
            done = (event["epoch"] - 1) * event["steps"] + event["step"]
            self._move(text, done / (event["epochs"] * event["steps"]))
        elif time.monotonic() - self._written_at >= _PLAIN_INTERVAL_S:
            self.print(text)
            self._written_at = time.monotonic()

    def _move(self, text: str, share: float | None = None) -> None:
        if self._bar is not None:
            self._bar.show(text, share)
            return
        # A line that the terminal wraps cannot be overwritten.
        self._stream.write(f"\r{text[: _columns(self._stream) - 1]}{_CLEAR_TO_END}")
        self._stream.flush()
        self._is_open = True


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


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
    """Passes the events of rank 0 to the progress line and the MLflow run.

    A restarted fit repeats the epochs after its checkpoint, and MLflow keeps every value that is logged, so each epoch
    is logged only once. A loss or metric that has changed, as may happen on fewer ranks, is logged again: MLflow shows
    the later value, which is the value of the returned model. Durations and rates are logged only the first time.

    Args:
        run: MLflow run of the fit; None if the fit is not tracked.
        progress: progress line of the fit.
        check: function that is called at each event; an exception that it raises ends the fit.
        on_epoch: function of the user that is called once for each epoch, with its record; an exception that it raises
            ends the fit; None for no function.

    Attributes:
        progress: progress line of the fit.
        board: board of the fit's monitor; None without one.
        worlds: the worlds that the ranks of an elastic fit have formed so far: number, ranks, and how many ranks were
            lost and how often the same ranks have met again until then; and the seconds since the first one began.
    """

    def __init__(
        self,
        run: FitRun | None,
        progress: ProgressLine,
        check: Callable[[], object],
        on_epoch: Callable[[EpochRecord], object] | None = None,
    ) -> None:
        self._run, self._check, self._on_epoch = run, check, on_epoch
        self.board: Board | None = None
        self._tracked: dict[int, dict[str, float]] = {}
        self._sampler = StepSampler()
        self._num_samples: dict[str, int] = {}
        self.progress = progress
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
        if kind in ("epoch", "restored"):
            is_new = int(event["epoch"]) not in self._tracked
            self.track(event)
            if kind == "epoch" and is_new and self._on_epoch is not None:
                on_epoch, self._on_epoch = self._on_epoch, None  # not again while an exception ends the ranks
                on_epoch(EpochRecord.from_dict(event))
                self._on_epoch = on_epoch
        elif kind == "step" and self._sampler.is_due(time.monotonic()):
            step = (int(event["epoch"]) - 1) * int(event["steps"]) + int(event["step"])
            values = {"step/loss": float(event["loss"]), "step/rows_per_s": float(event["rows_per_s"])}
            self.log_metrics(step, values)
        elif kind == "system":
            self._track_host(event["metrics"])
        elif kind == "layout" and self._run is not None:
            self._run.log_params({"parallelism": event["code"], "parallelismReason": event["reason"]})
        elif kind == "world":
            self._track_world(event)
        elif kind == "straggler":
            self._num_stragglers += 1
            self.log_metrics(
                self._num_stragglers, {f"stragglers/rank_{event['slow_rank']}": float(event["ratio"])}
            )

    def track(self, record: Mapping[str, Any]) -> None:
        """Log the fields of an epoch's record to the run, unless they are logged already."""
        epoch = int(record["epoch"])
        learned = {"loss": float(record["loss"]), **record["metrics"]}
        logged = self._tracked.get(epoch)
        if logged is None:
            known = {name: float(record[name]) for name in EPOCH_METRICS if record[name] is not None}
            new = {**known, **record["metrics"]}
        else:
            new = {
                name: value
                for name, value in learned.items()
                if value != logged.get(name) and not (math.isnan(value) and math.isnan(logged.get(name, 0)))
            }
        if new and self._run is not None and epoch % self._run.switches.every_n_iter == 0:
            self._run.log_metrics(epoch, new)
        self._tracked[epoch] = learned

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
        self.log_metrics(event["number"], {f"elastic/{name}": count for name, count in counts.items()})

    def log(self, rank: int, line: str) -> None:
        """Show a line that a rank has printed."""
        self.progress.print(f"[rank {rank}] {line}")
