"""The progress of a fit on the driver: a line that moves in a terminal, a bar in a notebook, elsewhere some lines."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from sparkdl.estimators.notebook_bar import NotebookBar, is_in_notebook

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN_INTERVAL_S = 10.0
_CLEAR_TO_END = "\x1b[K"


class ProgressLine:
    """Writes the events of rank 0 (:mod:`sparkdl.training.history`) to a stream. Runs on the *driver*.

    In a session on this machine Spark draws a bar of its own over the same line, whenever a task starts or ends
    and once a minute: the line is therefore cleared before each writing, and wins within a quarter of a second.

    Args:
        stream: where to write; when None stderr, or in a notebook the output of the cell, with a bar that moves. A
            terminal gets one line that is written over, anything else a line per epoch and one every ten seconds.
        is_shown: whether to show progress; what :meth:`print` is given is written in any case.
    """

    def __init__(self, stream: TextIO | None = None, *, is_shown: bool = True) -> None:
        self._bar = NotebookBar() if stream is None and is_shown and is_in_notebook() else None
        if stream is None:
            stream = sys.stderr if self._bar is None else sys.stdout  # red on stderr, where nothing is wrong
        self._stream = stream
        self._is_terminal = self._stream.isatty()
        self._is_shown = is_shown
        self._written_at = time.monotonic()
        self._is_open = False

    def update(self, event: Mapping[str, Any]) -> None:
        """Show an event of kind ``"step"``, ``"epoch"`` or ``"resumed"``; others are ignored."""
        if not self._is_shown:
            return
        if event.get("kind") == "step":
            self._step(event)
        elif event.get("kind") == "resumed":
            self.print(_resumed(event["epoch"], event["epochs"], event["step"]))
        elif event.get("kind") == "epoch":
            text = (
                f"epoch {event['epoch']}/{event['epochs']}  loss {event['loss']:.4f}  "
                f"{event['rows_per_s']:,.0f} rows/s  {event['seconds']:.1f} s"
            )
            text += "".join(f"  {name} {value:.4f}" for name, value in event.get("metrics", {}).items())
            if event.get("data_wait_share") is not None:
                text += f"  {event['data_wait_share']:.0%} waiting for data"
            self.print(text)
            self._written_at = time.monotonic()

    def status(self, text: str) -> None:
        """Say what is being done before and after the steps."""
        if not self._is_shown or not text:
            return
        if self._is_terminal or self._bar is not None:
            self._move(text)
        else:
            self.print(text)

    def print(self, text: str) -> None:
        """Write a line that stays, in the place of the one that moves."""
        self._stream.write(f"\r{text}{_CLEAR_TO_END}\n" if self._is_terminal else f"{text}\n")
        self._stream.flush()
        self._is_open = False

    def close(self) -> None:
        """Leave the stream at the start of a line, and a notebook without the bar."""
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
        # A line that the terminal wraps cannot be written over.
        self._stream.write(f"\r{text[: _columns(self._stream) - 1]}{_CLEAR_TO_END}")
        self._stream.flush()
        self._is_open = True


def _resumed(epoch: int, epochs: int, step: int) -> str:
    if epoch > epochs:
        return f"the checkpoint has all {epochs} epochs done"
    return f"going on from a checkpoint: epoch {epoch}/{epochs}" + (f" after step {step}" if step else "")


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
