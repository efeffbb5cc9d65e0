"""The progress of a fit on the driver: one line that moves in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN_INTERVAL_S = 10.0


class ProgressLine:
    """Writes the events of rank 0 (:mod:`sparkdl.training.progress`) to a stream. Runs on the *driver*.

    Args:
        stream: where to write; stderr when None. A terminal gets one line that is written over, anything else
            a line per epoch and one every ten seconds.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._written_at = time.monotonic()
        self._width = 0

    def update(self, event: Mapping[str, Any]) -> None:
        """Show an event of kind ``"step"`` or ``"epoch"``; others are ignored."""
        if event.get("kind") == "step":
            self._step(event)
        elif event.get("kind") == "epoch":
            self._end_line(
                f"epoch {event['epoch']}/{event['epochs']}  loss {event['loss']:.4f}  "
                f"{event['rows_per_s']:,.0f} rows/s  {event['seconds']:.1f} s"
            )

    def close(self) -> None:
        """Leave the stream at the start of a line."""
        if self._is_terminal and self._width:
            self._stream.write("\n")
            self._stream.flush()
        self._width = 0

    def _step(self, event: Mapping[str, Any]) -> None:
        text = (
            f"epoch {event['epoch']}/{event['epochs']}  step {event['step']}/{event['steps']}  "
            f"loss {event['loss']:.4f}  {event['rows_per_s']:,.0f} rows/s  ETA {_duration(event['eta_s'])}"
        )
        if self._is_terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = len(text)
        elif time.monotonic() - self._written_at >= _PLAIN_INTERVAL_S:
            self._end_line(text)

    def _end_line(self, text: str) -> None:
        start = "\r" if self._is_terminal else ""
        self._stream.write(f"{start}{text.ljust(self._width)}\n")
        self._stream.flush()
        self._width = 0
        self._written_at = time.monotonic()


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
